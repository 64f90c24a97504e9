"""Checks that stages, also remote ones, have settled or refuse a request."""

from __future__ import annotations

import time
from collections.abc import Iterable

from omni import Omni
from omni.requests.request import OmniRequest
from omni.runtime.orchestrator import Orchestrator
from stages import Stage, StageOutput, StageRequest
from tests.support.patience import PATIENCE_S


def assert_settled(stages: Iterable[Stage]) -> None:
    """Check that no stage has a request or has lost anything.

    A remote worker may not have received an abort yet.
    """
    until = time.monotonic() + PATIENCE_S
    for stage in stages:
        while stage.has_unfinished_requests and time.monotonic() < until:
            time.sleep(0.001)
        stage.check_integrity()


def check_integrity(omni: Omni) -> None:
    """Check every stage while nothing runs; running requests raise."""
    with omni.paused() as pipeline:
        for stage in pipeline.stages.values():
            stage.check_integrity()


def run_stage(stage: Stage, *requests: StageRequest) -> dict[str, StageOutput]:
    """Return the last output of each request."""
    for request in requests:
        stage.add_request(request)
    last: dict[str, StageOutput] = {}
    while stage.has_unfinished_requests:
        last |= {output.request_id: output for output in stage.step()}
    stage.check_integrity()
    return last


def refusal(orchestrator: Orchestrator, request: OmniRequest) -> str:
    """Return why a request is refused, as its last output says."""
    orchestrator.add_request(request)
    outputs = []
    while orchestrator.has_unfinished_requests:
        outputs += orchestrator.step()
    (last,) = (output for output in outputs if output.finished)
    assert last.error is not None
    return last.error

"""What is told soon where stages run elsewhere: that all have settled, or that one refuses."""

from __future__ import annotations

import time
from collections.abc import Iterable

from omni.requests.request import OmniRequest
from omni.runtime.orchestrator import Orchestrator
from stages import Stage
from tests.support.patience import PATIENCE_S


def assert_settled(stages: Iterable[Stage]) -> None:
    """No stage has a request or has lost anything.

    A worker elsewhere may be about to hear that a request was aborted.
    """
    until = time.monotonic() + PATIENCE_S
    for stage in stages:
        while stage.has_unfinished_requests and time.monotonic() < until:
            time.sleep(0.001)
        stage.check_integrity()


def refusal(orchestrator: Orchestrator, request: OmniRequest) -> str:
    """Why a request is refused: at once by a stage in this thread, or as its last output."""
    try:
        orchestrator.add_request(request)
    except ValueError as error:
        return str(error)
    outputs = []
    while orchestrator.has_unfinished_requests:
        outputs += orchestrator.step()
    (last,) = (output for output in outputs if output.finished)
    assert last.error is not None
    return last.error

"""While a stage has no worker, a request is refused at once, and no other stage works for it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from omni.runtime.orchestrator import refusal
from stages.remote import supervisor
from stages.worker.stage_link import WorkerState, why_lost
from tests.support.patience import wait_for
from tests.support.speech_pipeline import drain
from tests.support.worker_rig import chain, rig

UP, STARTING = WorkerState("up", 3, "was killed"), WorkerState("starting", 1, "was killed")
WAITING = WorkerState("waiting", 1, "could not be started: no node has what it needs")
DOWN = WorkerState("down", 5, "was killed by SIGKILL")
WAITS = (
    "it takes no requests until there is a place for it: its worker could not be started: no node "
    "has what it needs"
)
IS_DOWN = "it cannot be used any more: its worker was killed by SIGKILL"


@pytest.mark.parametrize(
    ("workers", "why"),
    [
        ([WAITING], WAITS),
        ([DOWN], IS_DOWN),
        ([DOWN, WAITING], WAITS),
        ([DOWN, DOWN], IS_DOWN),
        ([DOWN, STARTING], None),
        ([WAITING, UP], None),
        ([STARTING], None),
    ],
)
def test_a_request_that_would_come_to_a_stage_without_a_worker_does_not_begin(
    workers: Sequence[WorkerState], why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last stage's restarts are simulated."""
    assert why_lost(workers) == why
    with rig(chain(), max_retries=0) as pipeline:
        first, last = pipeline.stages
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(last, "worker_states", lambda: tuple(workers))
            if why is None:
                pipeline.add({"x": "x"})
            else:
                with pytest.raises(ValueError, match=f"^stage 'b': {why}$") as caught:
                    pipeline.add({"x": "x"})
                assert not refusal("x", caught.value).refused, "it is not the client's to fix"
                assert not pipeline.orchestrator.has_unfinished_requests
                assert not first.has_unfinished_requests
        if why is not None:
            pipeline.add({"x": "x"})  # its id is free
        assert drain(pipeline.orchestrator)["x"][-1].error is None


def test_a_worker_that_is_back_gets_the_first_request_that_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No driver turn, which would process its news, runs between its return and the request."""
    monkeypatch.setattr(supervisor, "MAX_STARTS", 2)
    monkeypatch.setattr(supervisor, "_FIRST_DELAY_S", 0.0)
    with rig(chain(), max_retries=0) as pipeline:
        first, _ = pipeline.stages
        (worker,) = first.workers
        pipeline.workers.has_place = False
        pipeline.add({"x": "x"})
        pipeline.workers.kill("a")
        assert WAITS in str(drain(pipeline.orchestrator)["x"][-1].error)
        pipeline.workers.has_place = True
        wait_for(lambda: worker.is_up)
        pipeline.add({"x": "x"})
        assert drain(pipeline.orchestrator)["x"][-1].error is None

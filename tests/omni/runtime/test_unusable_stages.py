"""A stage that a failure leaves unusable: its worker is restarted as if it had died."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from stages.remote import supervisor
from stages.worker.guarded_stage import MAX_REBUILDS
from tests.support.patience import wait_for
from tests.support.speech_pipeline import drain, until
from tests.support.worker_rig import Make, chain, holds, rig


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_FIRST_DELAY_S", 0.0)


def held_up_at_first() -> Make:
    """A chain; the first workers, made from the shapes, never end a request."""
    number = itertools.count()

    def make() -> list[Any]:
        a, b = chain()()
        b.endless = ("x", "y") if next(number) <= 2 else ()
        return [a, b]

    return make


def test_without_retries_only_the_requests_in_it_fail_and_say_why() -> None:
    with rig(held_up_at_first(), max_retries=0) as pipeline:
        pipeline.add({"x": "x"})
        until(pipeline.orchestrator, lambda: holds(pipeline, "b", 1))
        pipeline.spoil("b")
        last = drain(pipeline.orchestrator)["x"][-1]
        assert str(last.error).startswith("stage 'b': its worker was ended (it broke by KeyError")
        assert "after ArithmeticError: boom" in str(last.error)
        pipeline.add({"y": "y"})
        assert drain(pipeline.orchestrator)["y"][-1].error is None


def test_a_stage_that_breaks_when_it_has_no_requests_is_replaced_before_the_next_one() -> None:
    with rig(held_up_at_first(), max_retries=0) as pipeline:
        pipeline.add({"x": "x"})
        until(pipeline.orchestrator, lambda: holds(pipeline, "b", 1))
        (first,) = (each for each in pipeline.built if each.name == "b")

        def reset() -> None:
            raise KeyError("gone")

        first.reset_prefix_cache = reset  # as after a failed step
        pipeline.let_raise("b")
        drain(pipeline.orchestrator)
        wait_for(lambda: pipeline.workers.started == ["a", "b", "b"])
        pipeline.add({"y": "y"})
        assert drain(pipeline.orchestrator)["y"][-1].error is None


@pytest.mark.parametrize(
    ("error", "num_tries", "message"),
    [
        (MemoryError("no room"), 1, "could not be rebuilt: MemoryError: no room"),
        (None, MAX_REBUILDS, "it broke 4 times in a row"),
    ],
)
def test_a_stage_that_cannot_be_rebuilt_or_breaks_again_gets_another_worker(
    error: Exception | None, num_tries: int, message: str
) -> None:
    """Inline it would be retried when the next request comes: there is no alternative."""
    tries = 0
    shapes = held_up_at_first()

    def make() -> list[Any]:
        a, b = shapes()

        def rebuild() -> None:
            nonlocal tries
            tries += 1
            if error is not None:
                raise error
            b.held.clear()
            pipeline.spoil("b")

        b.rebuild = rebuild
        return [a, b]

    with rig(make, max_retries=9) as pipeline:
        pipeline.add({"x": "x"})
        until(pipeline.orchestrator, lambda: holds(pipeline, "b", 1))
        pipeline.spoil("b")
        last = drain(pipeline.orchestrator)["x"][-1]
        assert last.error is None and last.stages["b"].text == "b(a(x))"
        assert tries == num_tries
        (state,) = pipeline.stages[1].worker_states()
        assert message in str(state.last_end)

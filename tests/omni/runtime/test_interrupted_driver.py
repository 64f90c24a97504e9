"""An exception at any line of the driver's turns fails live requests, and the next ones work.

``torture/interrupted_driver.py`` tries every line.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from omni import Omni
from omni.pipelines.pipeline import Pipeline
from omni.runtime.orchestrator import Orchestrator
from tests.support.disturbed_pipeline import DisturbedPipeline
from tests.support.fake_stage import FakeStage
from tests.support.patience import PATIENCE_S
from tests.support.speech_pipeline import PROMPTS, speech_stages

FAULTS = 40
SOUND = {"went on", "failed alone"}


@pytest.mark.parametrize("method", ["step", "_take", "_events", "_enter"])
def test_live_requests_fail_with_the_cause_and_the_next_one_works(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = [FakeStage("a"), FakeStage("b", ("a",))]
    with Omni(Pipeline(stages)) as omni:
        assert omni.generate("warm-up")[0].error is None
        whole: Callable[..., object] = getattr(Orchestrator, method)
        left = [2]

        def fail_once(*args: object, **options: object) -> object:
            left[0] -= 1
            if left[0] == 0:
                raise MemoryError("no room")
            return whole(*args, **options)

        monkeypatch.setattr(Orchestrator, method, fail_once)
        outputs = omni.generate(["x", "y"])
        assert left[0] <= 0
        errors = [each.error for each in outputs if each.error is not None]
        assert errors
        assert all("MemoryError" in error and "no room" in error for error in errors)
        assert not any(stage.held for stage in stages)
        again = omni.generate(["x", "y"])
        assert [each.stages["b"].text for each in again] == ["b(a(x))", "b(a(y))"]


def test_a_driver_interrupted_at_a_line_answers_nothing_wrongly() -> None:
    pipeline = DisturbedPipeline(
        lambda: speech_stages((2, 3), thinker={"seats": 2}), PROMPTS, PATIENCE_S
    )
    draw = random.Random(0)
    places = pipeline.places(1, draw)
    assert len(places) > 400
    kinds = []
    for place in draw.sample(places, FAULTS):
        outcome = pipeline.run(place)
        assert outcome.kind in SOUND, (place, outcome)
        if outcome.place is not None:  # threads beside it may have taken another way
            kinds.append(outcome.kind)
    assert "failed alone" in kinds
    assert len(kinds) > FAULTS // 2
    pipeline.omni.close()

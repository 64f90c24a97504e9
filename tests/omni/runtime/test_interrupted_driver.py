"""An exception at any line of the driver's loop fails live requests, and later ones work.

``torture/interrupted_driver.py`` tries every line.
"""

from __future__ import annotations

import random

from tests.support.disturbed_pipeline import DisturbedPipeline
from tests.support.patience import PATIENCE_S
from tests.support.speech_pipeline import PROMPTS, speech_stages

FAULTS = 40
SOUND = {"went on", "failed alone"}


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
        if outcome.place is not None:  # other threads may have changed its path
            kinds.append(outcome.kind)
    assert "failed alone" in kinds
    assert len(kinds) > FAULTS // 2
    pipeline.omni.close()

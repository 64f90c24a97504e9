"""A short part of ``torture/request_fuzz.py``: every request is accepted, or refused alone."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from torture import request_fuzz


@pytest.fixture(autouse=True)
def models_of_this_run(checkpoint_cache: Path) -> Iterator[None]:
    yield
    logging.disable(logging.NOTSET)


# Numbers of which some are accepted and some refused.
@pytest.mark.parametrize(
    ("kind", "first", "num"),
    [("yaml", 460, 120), ("lines", 0, 60), ("requests", 0, 16), ("templates", 0, 12)],
)
def test_hostile_inputs_are_taken_or_refused_alone(kind: str, first: int, num: int) -> None:
    outcomes = list(request_fuzz.TAKERS[kind](range(first, first + num)))
    assert len(outcomes) == num
    wrong = [
        f"{kind} {first + at}: {detail}"
        for at, (outcome, detail) in enumerate(outcomes)
        if outcome not in ("went on", "failed alone")
    ]
    assert not wrong, "\n".join(wrong)
    counts = Counter(outcome for outcome, _ in outcomes)
    assert counts["failed alone"]
    if kind != "templates":
        assert counts["went on"]

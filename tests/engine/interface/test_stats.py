"""Readings of an engine's counters, added and subtracted."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from engine import EngineStats
from prefix_cache import KVCacheStats
from stages import StageStats

POOL = KVCacheStats(8, 7, 0, 0, evictions=2, hit_tokens=3, queried_tokens=4)


def test_what_was_added_since_a_reading_is_counted_and_snapshots_stay_as_read() -> None:
    before = EngineStats(num_steps=2, prompt_tokens=5, kv=KVCacheStats(8, 6, 1, 0, 0, 0, 0))
    after = before.plus(num_steps=1, busy_s=0.5, generated_tokens=4)
    assert (after.num_steps, after.prompt_tokens, after.kv) == (3, 5, before.kv)
    later = EngineStats(num_steps=3, busy_s=0.5, prompt_tokens=9, num_preemptions=1, kv=POOL)
    assert later.since(before) == EngineStats(
        num_steps=1, busy_s=0.5, prompt_tokens=4, num_preemptions=1, kv=POOL
    )


def test_a_reading_does_not_change_and_stages_have_the_same() -> None:
    with pytest.raises(FrozenInstanceError):
        EngineStats().num_steps = 1  # type: ignore[misc]
    assert StageStats is EngineStats

"""Readings of an engine's counters, added and subtracted."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

from engine import EngineStats
from prefix_cache import GroupStats, KVCacheStats, OffloadStats
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


def test_engines_beside_each_other_are_added_with_what_is_of_now() -> None:
    group = GroupStats("full attention", 1, 2, block_bytes=64, evictions=3, misses=4)
    misses = {"unseen": 1, "group": 2}
    pool = replace(POOL, nbytes=512, output_bytes=3, groups=(group,), misses=misses)
    tiers = OffloadStats(1, 2, 3, 4, 5, 6, 7, 8)
    one = EngineStats(num_steps=2, num_running=3, num_restarts=1, kv=pool)
    both = one.beside(EngineStats(num_steps=1, num_waiting=4, kv=pool, offload=tiers))
    assert both == EngineStats(
        num_steps=3,
        num_running=3,
        num_waiting=4,
        num_restarts=1,
        kv=KVCacheStats(
            16,
            14,
            0,
            0,
            4,
            6,
            8,
            1024,
            6,
            (replace(group, held=2, cached=4, evictions=6, misses=8),),
            {"unseen": 2, "group": 4},
        ),
        offload=tiers,
    )
    assert tiers.beside(tiers) == OffloadStats(2, 4, 6, 8, 10, 12, 14, 8)


def test_a_reading_that_follows_another_has_what_is_of_its_own_time() -> None:
    before = EngineStats(num_steps=2, num_running=3, kv=POOL)
    after = EngineStats(num_steps=1, num_waiting=1)
    assert after.following(before) == EngineStats(num_steps=3, num_waiting=1)

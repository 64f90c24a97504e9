"""Encoder outputs by content: nothing held is ever evicted, and no byte is lost or made up."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from prefix_cache import EncoderCache, IntegrityError
from tests.support.examples import examples

ROW_BYTES = 4 * 8
KEYS = [bytes([number]) * 32 for number in range(6)]


def num_rows(key: bytes) -> int:
    return 1 + key[0] % 4


def rows_of(key: bytes) -> torch.Tensor:
    return torch.full((num_rows(key), 8), float(key[0]))


def put(cache: EncoderCache, key: bytes) -> None:
    cache.reserve(key, num_rows(key) * ROW_BYTES)
    cache.fill(key, rows_of(key))


class CacheMachine(RuleBasedStateMachine):
    """Random holders against a plain count of who holds what."""

    holds = Bundle("holds")

    @initialize(capacity=st.integers(4, 12))
    def start(self, capacity: int) -> None:
        self.cache = EncoderCache(capacity * ROW_BYTES)
        self.counts: Counter[bytes] = Counter()
        self.filled: set[bytes] = set()
        self.hits = 0

    @rule(target=holds, key=st.sampled_from(KEYS), encode=st.booleans())
    def take(self, key: bytes, encode: bool) -> object:
        known = key in self.cache
        assert self.cache.hold(key) is known
        if known:
            self.hits += 1
        else:
            self.filled.discard(key)
            nbytes = num_rows(key) * ROW_BYTES
            if not self.cache.has_room(nbytes):
                with pytest.raises(ValueError, match="does not fit"):
                    self.cache.reserve(key, nbytes)
                return multiple()
            self.cache.reserve(key, nbytes)
        self.counts[key] += 1
        if encode and key not in self.filled:
            self.cache.fill(key, rows_of(key))
            self.filled.add(key)
        return key

    @rule(key=consumes(holds))
    def give_back(self, key: bytes) -> None:
        self.cache.release(key)
        self.counts[key] -= 1
        # Released unencoded, nobody may find it; encoded, it stays until something needs room.
        assert (key in self.cache) == (self.counts[key] > 0 or key in self.filled)

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        assert all((key in self.cache) == (self.counts[key] > 0) for key in KEYS)

    @invariant()
    def held_items_are_there_and_the_budget_is_kept(self) -> None:
        held = +self.counts
        self.cache.check_integrity(held)
        stats = self.cache.stats()
        assert stats.nbytes <= stats.capacity_bytes
        assert stats.held_bytes == sum(num_rows(key) * ROW_BYTES for key in held)
        assert stats.hits == self.hits
        for key in held:
            if key in self.filled:
                assert torch.equal(self.cache.rows(key), rows_of(key))


CacheMachine.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40)
TestCacheMachine = CacheMachine.TestCase


def test_the_least_recently_used_item_goes_first() -> None:
    cache = EncoderCache(6 * ROW_BYTES)
    one, two, three = KEYS[0], KEYS[1], KEYS[2]  # 1, 2 and 3 rows
    for key in (one, two, three):
        put(cache, key)
        cache.release(key)
    assert cache.hold(one)
    cache.release(one)
    put(cache, KEYS[4])  # 1 row: two, which was used before three, is enough
    assert one in cache and three in cache and two not in cache
    assert cache.stats().evictions == 1


def test_rows_of_a_batch_do_not_keep_the_batch_alive() -> None:
    cache = EncoderCache(100 * ROW_BYTES)
    batch = torch.randn(50, 8)
    cache.reserve(KEYS[1], 2 * ROW_BYTES)
    cache.fill(KEYS[1], batch[4:6])
    assert cache.rows(KEYS[1]).untyped_storage().nbytes() == 2 * ROW_BYTES
    assert torch.equal(cache.rows(KEYS[1]), batch[4:6])


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        EncoderCache(0)
    cache = EncoderCache(4 * ROW_BYTES)
    cache.reserve(KEYS[1], 2 * ROW_BYTES)
    with pytest.raises(ValueError, match="not encoded yet"):
        cache.rows(KEYS[1])
    with pytest.raises(ValueError, match="hold it instead"):
        cache.reserve(KEYS[1], 2 * ROW_BYTES)
    with pytest.raises(ValueError, match=r"gave 96 bytes in rows \(3, 8\), reserved were 64"):
        cache.fill(KEYS[1], rows_of(KEYS[2]))
    cache.fill(KEYS[1], rows_of(KEYS[1]))
    with pytest.raises(ValueError, match="has its rows already"):
        cache.fill(KEYS[1], rows_of(KEYS[1]))
    with pytest.raises(IntegrityError, match=r"references counted \[1\] != references held \[2\]"):
        cache.check_integrity({KEYS[1]: 2})

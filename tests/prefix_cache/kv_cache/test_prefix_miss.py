"""A prefix says in a word why it is no longer, by the block at which the hit ended."""

from __future__ import annotations

import pytest

from prefix_cache import KVCacheManager
from tests.prefix_cache.kv_cache.test_kv_cache_manager import (
    BLOCK_SIZE,
    PROMPT,
    admit,
    find,
    new_manager,
    run,
)
from tests.support.tiny_kv_cache import hashes_of, mixed_config

LONGER = [*PROMPT, 1]


@pytest.mark.parametrize(
    ("token_ids", "num_tokens", "miss"),
    [
        (LONGER, 12, None),
        ([*LONGER, 2, 3], 12, None),
        (PROMPT, 8, "last_token"),
        (PROMPT[:4], 0, "last_token"),
        (PROMPT[:3], 0, "short"),
        (PROMPT[:1], 0, "short"),
        ([7, *PROMPT[1:4]], 0, "short"),
        ([7, *LONGER[1:]], 0, "unseen"),
        ([*PROMPT[:5], 7, *LONGER[6:]], 4, "unseen"),
        ([*PROMPT[:8], 7, 7], 8, None),
    ],
)
def test_the_block_at_which_a_hit_ends_says_why(
    token_ids: list[int], num_tokens: int, miss: str | None
):
    manager = new_manager()
    run(manager, "a", LONGER)
    prefix = find(manager, token_ids)
    assert (prefix.num_tokens, prefix.miss) == (num_tokens, miss)


def test_nothing_is_looked_for_where_caching_is_off():
    manager = new_manager(enable_prefix_caching=False)
    run(manager, "a", LONGER)
    assert find(manager, LONGER).miss == "off"


def test_what_was_cached_and_gave_way_was_evicted():
    manager = new_manager(num_blocks=5)
    run(manager, "a", LONGER)
    run(manager, "b", range(200, 209))
    prefix = find(manager, LONGER)
    assert (prefix.num_tokens, prefix.miss) == (4, "evicted")
    run(manager, "c", range(300, 316))
    assert find(manager, LONGER).miss == "evicted"
    assert find(manager, range(400, 416)).miss == "unseen"
    manager.reset_prefix_cache()
    assert find(manager, LONGER).miss == "unseen"


def test_evictions_are_remembered_up_to_a_number(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("prefix_cache.blocks.block_pool._MOST_EVICTED", 3)
    manager = new_manager(num_blocks=5)
    for number in range(5):
        run(manager, "a", range(100 * number, 100 * number + 16))
    assert find(manager, range(0, 16)).miss == "unseen"
    assert find(manager, range(300, 316)).miss == "evicted"


def test_a_block_without_rows_that_are_wanted_lacks_rows():
    manager = new_manager()
    run(manager, "a", LONGER, hidden=1.0)
    run(manager, "b", [5, *LONGER], hidden=1.0, logits=1.0)
    prefix = find(manager, LONGER)
    assert (prefix.num_tokens, prefix.miss) == (0, "rows")


def test_a_block_that_another_group_cannot_go_on_from_lacks_a_group():
    config = mixed_config({"full": 1, "mamba": 1}, 40, BLOCK_SIZE)
    manager = KVCacheManager(config, max_num_batched_tokens=64)
    admit(manager, "a", LONGER)
    manager.publish("a", hashes_of(LONGER, BLOCK_SIZE), len(LONGER))
    prefix = find(manager, [*PROMPT[:8], 7, 8, 9])
    assert (prefix.num_tokens, prefix.miss) == (0, "group")
    assert prefix.lacking_group == 1
    manager.count_miss("group", prefix.lacking_group)
    stats = manager.stats()
    assert stats.misses == {"group": 1} and [group.misses for group in stats.groups] == [0, 1]

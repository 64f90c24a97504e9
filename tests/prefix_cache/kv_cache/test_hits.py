"""How long a hit is, against the rule of each kind of layer written down token by token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefix_cache import BlockHash, BlockPool, KVCacheManager, LargePage, PageArena, check_integrity
from prefix_cache.blocks.block_pool import LOW_PRIORITY
from prefix_cache.layer_types.coordinator import KVCacheCoordinator
from tests.support.tiny_kv_cache import GROUP_MIXES, hashes_of, mixed_config

BLOCK_SIZE, NUM_BLOCKS = 2, 10
HASHES = hashes_of(range(NUM_BLOCKS * BLOCK_SIZE), BLOCK_SIZE)


def tokens_needed(kind: str, num_tokens: int, reach: int) -> set[int]:
    """Which tokens' blocks the token at position ``num_tokens`` finds its content in."""
    match kind:
        case "full" | "host":
            return set(range(num_tokens))
        case "sliding":
            return {j for j in range(num_tokens) if num_tokens - reach < j}
        case "chunked":
            return {j for j in range(num_tokens) if j // reach == num_tokens // reach}
        case "mamba":
            return {num_tokens - 1} - {-1}
    raise ValueError(kind)


def needed(kind: str, num_blocks: int, reach: int) -> set[int]:
    tokens = tokens_needed(kind, num_blocks * BLOCK_SIZE, reach)
    return {token // BLOCK_SIZE for token in tokens}


def coordinator_with(
    layers: dict[str, int], reach: int, cached: list[set[int]]
) -> tuple[KVCacheCoordinator, list[dict[int, int]]]:
    """A coordinator in which just these blocks of each group are cached; their ids."""
    config = mixed_config(layers, 40, BLOCK_SIZE, reach=reach)
    pool = BlockPool.for_config(config)
    ids: list[dict[int, int]] = []
    for group_id, indices in enumerate(cached):
        blocks = pool.allocate({group_id: len(indices)})[group_id]
        ids.append({})
        for index, block in zip(sorted(indices), blocks, strict=True):
            pool.publish(block, HASHES[index])
            ids[group_id][index] = block.block_id
        pool.release(blocks)
    return KVCacheCoordinator(config, pool, 8), ids


def table(blocks) -> list[int]:
    return [block.block_id for block in blocks]


# Mostly there, so that long hits occur.
CACHED = st.sets(st.integers(0, NUM_BLOCKS - 1)) | st.sets(
    st.integers(0, NUM_BLOCKS - 1), max_size=2
).map(lambda missing: set(range(NUM_BLOCKS)) - missing)


@pytest.mark.parametrize("mix", [mix for mix in GROUP_MIXES if mix != "full"])
@given(data=st.data())
def test_a_hit_is_the_longest_that_every_group_can_serve(mix, data):
    layers = GROUP_MIXES[mix]
    reach = data.draw(st.integers(BLOCK_SIZE, 9), label="reach")
    cached = [data.draw(CACHED, label=kind) if kind != "cross" else set() for kind in layers]
    cap = data.draw(st.integers(0, NUM_BLOCKS * BLOCK_SIZE + 3), label="max_num_tokens")
    coordinator, ids = coordinator_with(layers, reach, cached)
    groups = [(g, kind.strip()) for g, kind in enumerate(layers) if kind != "cross"]
    longest = max(
        length
        for length in range(min(cap // BLOCK_SIZE, NUM_BLOCKS) + 1)
        if all(needed(kind, length, reach) <= cached[g] for g, kind in groups)
    )
    hit = coordinator.find_longest_cache_hit(HASHES, cap)
    for group_id, kind in groups:
        wanted = needed(kind, longest, reach)
        expected = [ids[group_id][i] if i in wanted else 0 for i in range(longest)]
        assert table(hit[group_id]) == expected
    for group_id, kind in enumerate(layers):
        if kind == "cross":
            assert hit[group_id] == ()


@given(size=st.integers(1, 7), missing=st.sets(st.integers(0, 3)))
def test_an_encoder_output_is_found_whole_or_not_at_all(size, missing):
    config = mixed_config({"cross": 1, "full": 1}, 9, BLOCK_SIZE)
    pool = BlockPool.for_config(config)
    cross = KVCacheCoordinator(config, pool, 8).managers[0]
    keys = [BlockHash(bytes([i]) * 32) for i in range(-(-size // BLOCK_SIZE))]
    blocks = pool.allocate({0: len(keys)})[0]
    for index, (block, key) in enumerate(zip(blocks, keys, strict=True)):
        if index not in missing:
            pool.publish(block, key)
    whole = not missing & set(range(len(keys)))
    assert cross.find_longest_cache_hit(keys, size) == (blocks if whole else [])


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=12), min_size=1, max_size=12),
    mix=st.sampled_from(["full", "gemma", "jamba"]),
)
def test_what_earlier_requests_had_in_common_is_known_after_its_eviction_too(prompts, mix):
    manager = KVCacheManager(mixed_config(GROUP_MIXES[mix], 8, BLOCK_SIZE))
    seen: set[tuple[int, ...]] = set()
    for index, token_ids in enumerate(prompts):
        hashes = hashes_of(token_ids, BLOCK_SIZE)
        prefix = manager.find_cached_prefix(hashes, len(token_ids))
        ends = range(BLOCK_SIZE, len(token_ids), BLOCK_SIZE)
        known = [end for end in ends if tuple(token_ids[:end]) in seen]
        assert prefix.num_tokens <= prefix.num_seen_tokens == max(known, default=0)
        if manager.allocate_slots(
            str(index),
            len(token_ids),
            num_computed_tokens=prefix.num_tokens,
            prefix=prefix,
            block_hashes=hashes,
        ):
            manager.publish(str(index), hashes, len(token_ids))
            manager.free(str(index))
            seen |= {tuple(token_ids[: n * BLOCK_SIZE]) for n in range(1, len(hashes) + 1)}
        check_integrity(manager)


def test_where_requests_part_the_window_stays_for_the_third():
    manager = KVCacheManager(mixed_config({"full": 1, "sliding": 1}, 60, BLOCK_SIZE, reach=4))
    common = list(range(100, 112))

    def serve(request_id: str, end: list[int]) -> int:
        token_ids = [*common, *end]
        hashes = hashes_of(token_ids, BLOCK_SIZE)
        prefix = manager.find_cached_prefix(hashes, len(token_ids))
        computed = prefix.num_tokens
        while computed < len(token_ids):
            assert manager.allocate_slots(
                request_id,
                computed + BLOCK_SIZE,
                num_computed_tokens=computed,
                prefix=prefix if computed == prefix.num_tokens else None,
                block_hashes=hashes,
            )
            computed += BLOCK_SIZE
            manager.publish(request_id, hashes, computed)
        manager.free(request_id)
        return prefix.num_tokens

    def lose_low_priority() -> None:
        pages = manager.pool.arenas[0]
        pages.shares[LOW_PRIORITY] = 1e-9
        blocks = manager.pool.allocate({0: len(pages.free_pages) + len(low(pages))})[0]
        manager.pool.release(blocks)

    def low(pages: PageArena) -> list[LargePage]:
        return [page for page in pages.unheld if page.key[0] == LOW_PRIORITY]

    assert serve("a", list(range(200, 212))) == 0
    lose_low_priority()
    assert serve("b", list(range(300, 312))) == 0, "the window at its end is gone"
    lose_low_priority()
    assert serve("c", list(range(400, 412))) == len(common)

"""Example-based tests of the cache: hits, misses, waiting, allocation, publishing."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from prefix_cache import (
    BlockHash,
    BlockPool,
    CachedPrefix,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheManager,
    LargePage,
    PageArena,
    StageOutputCache,
    WholeInputCache,
    check_integrity,
    check_pool_integrity,
)
from prefix_cache.blocks.block_pool import LOW_PRIORITY
from prefix_cache.layer_types.coordinator import KVCacheCoordinator
from tests.support.tiny_kv_cache import (
    GROUP_MIXES,
    hashes_of,
    mixed_config,
    tiny_config,
)

BLOCK_SIZE = 4
PROMPT = list(range(100, 112))


def new_manager(num_blocks: int = 9, **kwargs) -> KVCacheManager:
    return KVCacheManager(tiny_config(num_blocks, BLOCK_SIZE), **kwargs)


def admit(manager: KVCacheManager, request_id: str, token_ids, salt=None) -> CachedPrefix:
    hashes = hashes_of(token_ids, BLOCK_SIZE, salt)
    prefix = manager.find_cached_prefix(hashes, len(token_ids))
    assert manager.allocate_slots(request_id, len(token_ids), prefix=prefix, block_hashes=hashes)
    return prefix


def write(manager: KVCacheManager, request_id: str, start: int, end: int, **rows: float) -> None:
    """Write constant rows for positions [start, end)."""
    table = torch.tensor(manager.block_ids(request_id))
    positions = torch.arange(start, end)
    manager.stage_outputs.write(
        table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
        {name: torch.full((end - start, 2), value) for name, value in rows.items()},
    )


def run(manager: KVCacheManager, request_id: str, token_ids, salt=None, **rows: float) -> int:
    """Admit, write, publish and free a request; return its number of cached tokens."""
    prefix = admit(manager, request_id, token_ids, salt)
    write(manager, request_id, prefix.num_tokens, len(token_ids), **rows)
    manager.publish(request_id, hashes_of(token_ids, BLOCK_SIZE, salt), len(token_ids))
    manager.free(request_id)
    check_integrity(manager)
    return prefix.num_tokens


def find(manager: KVCacheManager, token_ids, salt=None) -> CachedPrefix:
    return manager.find_cached_prefix(hashes_of(token_ids, BLOCK_SIZE, salt), len(token_ids))


def test_can_finish_leaves_headroom():
    manager = new_manager(num_blocks=5)
    run(manager, "a", PROMPT)
    prefix = find(manager, PROMPT)  # 2 of 4 blocks, 1 more to allocate, 1 left over
    assert manager.can_finish(12, prefix=prefix, headroom=1)
    assert not manager.can_finish(12, prefix=prefix, headroom=2)


def test_tables_grow_at_their_end_and_never_shrink():
    manager = new_manager()
    assert manager.allocate_slots("a", 5)
    assert manager.block_ids("a") == [1, 2]
    assert manager.allocate_slots("a", 8) and manager.block_ids("a") == [1, 2]
    assert manager.allocate_slots("a", 9) and manager.block_ids("a") == [1, 2, 3]
    assert manager.allocate_slots("a", 1) and manager.block_ids("a") == [1, 2, 3]
    assert not manager.allocate_slots("a", 8 * BLOCK_SIZE + 1)
    assert manager.block_ids("a") == [1, 2, 3]
    check_integrity(manager)


def test_with_caching_off_nothing_is_found_and_all_else_works():
    manager = new_manager(enable_prefix_caching=False)
    for request_id in ("a", "b"):
        prefix = admit(manager, request_id, PROMPT)
        assert prefix == CachedPrefix(((),), num_tokens=0, in_flight=False)
        write(manager, request_id, 0, 12, h=1.0)
        manager.publish(request_id, hashes_of(PROMPT, BLOCK_SIZE), 12)
        assert manager.gather_outputs(request_id, 12)["h"].shape == (12, 2)
        assert find(manager, [*PROMPT, 1]).miss == "off"
    assert not manager.pool.hash_tables[0] and not manager.pending.counts
    with pytest.raises(ValueError, match="cannot be switched while 2 requests"):
        manager.enable_prefix_caching = True
    manager.free("a")
    manager.free("b")
    manager.enable_prefix_caching = True
    run(manager, "c", PROMPT, h=1.0)
    assert find(manager, PROMPT).num_tokens == 8
    manager.enable_prefix_caching = False
    assert find(manager, PROMPT).num_tokens == 0


def test_stats_count_blocks_by_state_and_hits_of_admitted_requests_only():
    manager = new_manager(num_blocks=8)
    run(manager, "a", PROMPT)
    admit(manager, "b", [*PROMPT[:4], 1])
    for _ in range(3):
        find(manager, PROMPT)
    stats = manager.stats()
    assert (stats.free, stats.held, stats.cached) == (3, 2, 2)
    assert stats.free + stats.held + stats.cached + 1 == stats.num_blocks == 8
    assert (stats.hit_tokens, stats.queried_tokens) == (4, 12 + 4)
    assert manager.pool.num_free() == 5
    assert [manager.pages_for(n) for n in (0, 1, 4, 5, 28)] == [0, 1, 1, 2, 7]
    assert [manager.fits(n) for n in (28, 29)] == [True, False]
    assert [manager.longest_sequence(limit) for limit in (20, 99)] == [20, 28]


def test_mistakes_are_named():
    manager = new_manager()
    for call in (
        lambda: manager.free("x"),
        lambda: manager.publish("x", [], 0),
        lambda: manager.block_ids("x"),
        lambda: manager.gather_outputs("x", 1),
    ):
        with pytest.raises(ValueError, match="request 'x' holds no blocks"):
            call()
    prefix = admit(manager, "a", PROMPT)
    with pytest.raises(ValueError, match="request 'a' holds blocks; a prefix comes first"):
        manager.allocate_slots("a", 20, prefix=prefix)


def test_an_outdated_prefix_is_refused_and_nothing_changes():
    manager = new_manager(num_blocks=4)
    run(manager, "a", PROMPT)
    hashes = hashes_of(PROMPT, BLOCK_SIZE)
    prefix = find(manager, PROMPT)
    with pytest.raises(ValueError, match="8 tokens does not fit into 7 tokens"):
        manager.allocate_slots("b", 7, prefix=prefix, block_hashes=hashes)
    with pytest.raises(ValueError, match="under the 0 block hashes given"):
        manager.allocate_slots("b", 12, prefix=prefix)
    run(manager, "c", list(range(12)))  # takes all blocks
    with pytest.raises(ValueError, match=r"no longer.* cached .* find it again"):
        manager.allocate_slots("b", 12, prefix=prefix, block_hashes=hashes)
    assert manager.request_ids == frozenset()
    check_integrity(manager)


@dataclass(frozen=True, slots=True)
class _UnknownSpec(FullAttentionSpec):
    """A layer type without a manager."""


def test_unknown_layer_types_and_mixed_block_sizes_are_refused():
    known = tiny_config(4, BLOCK_SIZE).groups[0]
    unknown = KVCacheGroup(("x",), _UnknownSpec(BLOCK_SIZE, 1, 1, torch.float32))
    with pytest.raises(
        NotImplementedError, match=r"no manager for _UnknownSpec; .*FullAttentionSpec"
    ):
        KVCacheManager(KVCacheConfig(4, (known, unknown)))
    other_size = tiny_config(4, 2 * BLOCK_SIZE).groups[0]
    with pytest.raises(NotImplementedError, match=r"one block size, got \[4, 8\]"):
        KVCacheManager(KVCacheConfig(4, (known, other_size)))


def test_outputs_need_a_group_that_keeps_all_tokens():
    with pytest.raises(ValueError, match="only: SlidingWindowSpec, MambaSpec. Add a group of Host"):
        KVCacheManager(mixed_config({"sliding": 1, "mamba": 1}, 8, BLOCK_SIZE))


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
def test_a_miss_reports_its_reason(token_ids: list[int], num_tokens: int, miss: str | None):
    manager = new_manager()
    run(manager, "a", LONGER)
    prefix = find(manager, token_ids)
    assert (prefix.num_tokens, prefix.miss) == (num_tokens, miss)


def test_a_miss_after_eviction_reports_evicted():
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
    monkeypatch.setattr("prefix_cache.blocks.block_pool._MAX_EVICTED", 3)
    manager = new_manager(num_blocks=5)
    for number in range(5):
        run(manager, "a", range(100 * number, 100 * number + 16))
    assert find(manager, range(0, 16)).miss == "unseen"
    assert find(manager, range(300, 316)).miss == "evicted"


def test_a_block_without_wanted_rows_reports_missing_rows():
    manager = new_manager()
    run(manager, "a", LONGER, hidden=1.0)
    run(manager, "b", [5, *LONGER], hidden=1.0, logits=1.0)
    prefix = find(manager, LONGER)
    assert (prefix.num_tokens, prefix.miss) == (0, "rows")


def test_a_block_missing_in_another_group_reports_that_group():
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


SMALL, NUM_SMALL = 2, 10
HASHES = hashes_of(range(NUM_SMALL * SMALL), SMALL)


def tokens_needed(kind: str, num_tokens: int, reach: int) -> set[int]:
    """Return the tokens whose blocks the token at position ``num_tokens`` reads."""
    match kind:
        case "full" | "host":
            return set(range(num_tokens))
        case "sliding":
            return {j for j in range(num_tokens) if num_tokens - reach < j}
        case "mamba":
            return {num_tokens - 1} - {-1}
    raise ValueError(kind)


def needed(kind: str, num_blocks: int, reach: int) -> set[int]:
    return {token // SMALL for token in tokens_needed(kind, num_blocks * SMALL, reach)}


def coordinator_with(
    layers: dict[str, int], reach: int, cached: list[set[int]]
) -> tuple[KVCacheCoordinator, list[dict[int, int]]]:
    """Return a coordinator in which only these blocks of each group are cached, and their ids."""
    config = mixed_config(layers, 40, SMALL, reach=reach)
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


# Mostly cached, so that long hits occur.
CACHED = st.sets(st.integers(0, NUM_SMALL - 1)) | st.sets(
    st.integers(0, NUM_SMALL - 1), max_size=2
).map(lambda missing: set(range(NUM_SMALL)) - missing)


@pytest.mark.parametrize("mix", [mix for mix in GROUP_MIXES if mix != "full"])
@given(data=st.data())
def test_a_hit_is_the_longest_that_every_group_can_serve(mix, data):
    layers = GROUP_MIXES[mix]
    reach = data.draw(st.integers(SMALL, 9), label="reach")
    cached = [data.draw(CACHED, label=kind) if kind != "cross" else set() for kind in layers]
    cap = data.draw(st.integers(0, NUM_SMALL * SMALL + 3), label="max_num_tokens")
    coordinator, ids = coordinator_with(layers, reach, cached)
    groups = [(g, kind.strip()) for g, kind in enumerate(layers) if kind != "cross"]
    longest = max(
        length
        for length in range(min(cap // SMALL, NUM_SMALL) + 1)
        if all(needed(kind, length, reach) <= cached[g] for g, kind in groups)
    )
    hit = coordinator.find_longest_cache_hit(HASHES, cap)
    for group_id, kind in groups:
        wanted = needed(kind, longest, reach)
        expected = [ids[group_id][i] if i in wanted else 0 for i in range(longest)]
        assert [block.block_id for block in hit[group_id]] == expected
    for group_id, kind in enumerate(layers):
        if kind == "cross":
            assert hit[group_id] == ()


@given(size=st.integers(1, 7), missing=st.sets(st.integers(0, 3)))
def test_an_encoder_output_is_found_whole_or_not_at_all(size, missing):
    config = mixed_config({"cross": 1, "full": 1}, 9, SMALL)
    pool = BlockPool.for_config(config)
    cross = KVCacheCoordinator(config, pool, 8).managers[0]
    keys = [BlockHash(bytes([i]) * 32) for i in range(-(-size // SMALL))]
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
def test_seen_prefixes_are_remembered_after_eviction(prompts, mix):
    manager = KVCacheManager(mixed_config(GROUP_MIXES[mix], 8, SMALL))
    seen: set[tuple[int, ...]] = set()
    for index, token_ids in enumerate(prompts):
        hashes = hashes_of(token_ids, SMALL)
        prefix = manager.find_cached_prefix(hashes, len(token_ids))
        ends = range(SMALL, len(token_ids), SMALL)
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
            seen |= {tuple(token_ids[: n * SMALL]) for n in range(1, len(hashes) + 1)}
        check_integrity(manager)


def test_the_window_at_a_divergence_is_kept_for_the_third_request():
    manager = KVCacheManager(mixed_config({"full": 1, "sliding": 1}, 60, SMALL, reach=4))
    common = list(range(100, 112))

    def serve(request_id: str, end: list[int]) -> int:
        token_ids = [*common, *end]
        hashes = hashes_of(token_ids, SMALL)
        prefix = manager.find_cached_prefix(hashes, len(token_ids))
        computed = prefix.num_tokens
        while computed < len(token_ids):
            assert manager.allocate_slots(
                request_id,
                computed + SMALL,
                num_computed_tokens=computed,
                prefix=prefix if computed == prefix.num_tokens else None,
                block_hashes=hashes,
            )
            computed += SMALL
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
    assert serve("b", list(range(300, 312))) == 0, "the window at the end was evicted"
    lose_low_priority()
    assert serve("c", list(range(400, 412))) == len(common)


TWIN_PROMPT = list(range(20))
ANSWER = list(range(100, 128))
NEXT_TURN = [*TWIN_PROMPT, *ANSWER, *range(200, 207)]


def grow(manager: KVCacheManager, name: str, ids: list[int], start: int) -> None:
    """Compute ``ids[start:]`` one token per step and publish full blocks."""
    for end in range(start + 1, len(ids) + 1):
        assert manager.allocate_slots(name, end, num_computed_tokens=end - 1)
        manager.publish(name, hashes_of(ids, BLOCK_SIZE), end)
    check_integrity(manager)


def begin(manager: KVCacheManager, name: str) -> None:
    admit(manager, name, TWIN_PROMPT)
    manager.publish(name, hashes_of(TWIN_PROMPT, BLOCK_SIZE), len(TWIN_PROMPT))


@pytest.mark.parametrize("mix", sorted(GROUP_MIXES))
def test_evicting_a_duplicate_costs_no_hit(mix: str) -> None:
    config = mixed_config(GROUP_MIXES[mix], 60, BLOCK_SIZE, num_host_blocks=60)
    hits = []
    for has_twin in (False, True):
        manager = KVCacheManager(config, output_names=(), max_num_batched_tokens=64)
        begin(manager, "A")
        if has_twin:
            begin(manager, "B")
            grow(manager, "B", TWIN_PROMPT + ANSWER, len(TWIN_PROMPT))
        grow(manager, "A", TWIN_PROMPT + ANSWER, len(TWIN_PROMPT))
        if has_twin:
            manager.free("B")
        # Evict everything: allocate and release all available blocks of one group after another.
        for group_id in range(len(config.groups)):
            taken = manager.pool.allocate({group_id: manager.pool.num_free(group_id)})
            manager.pool.release(taken[group_id])
        check_integrity(manager)
        hashes = hashes_of(NEXT_TURN, BLOCK_SIZE)
        hits.append(manager.find_cached_prefix(hashes, len(NEXT_TURN)).num_tokens)
    assert hits[1] == hits[0] == 48


def test_a_whole_input_computed_twice_is_found_while_one_copy_is_held() -> None:
    pool = BlockPool.uniform(6)
    rows = StageOutputCache(6, BLOCK_SIZE, pool.generations(0), ["h"])
    cache = WholeInputCache(pool, rows, BLOCK_SIZE)
    key = BlockHash(bytes(32))
    held = [cache.allocate(7) for _ in range(2)]
    for blocks in held:
        slots = rows.slots(torch.tensor([block.block_id for block in blocks]))[:7]
        rows.write(slots, {"h": torch.ones(7, 1)})
        cache.publish(key, 7, blocks)
    first, second = held
    cache.release(second)
    taken = cache.allocate(3 * BLOCK_SIZE)  # evicts them
    found = cache.find(key, 7)
    assert found == first
    check_pool_integrity(pool, [first, first, taken])


EXAMPLE_BLOCKS, HIDDEN_SIZE, FEATURE_SIZE = 8, 2, 16
FIRST_TEXT = "The quick brown fox was tired and slept beneath the shady tree"
SECOND_TEXT = "The quick brown fox jumped over the dog"
FIRST_PROMPT, SECOND_PROMPT = FIRST_TEXT.split(), SECOND_TEXT.split()
VOCABULARY = {word: index for index, word in enumerate(dict.fromkeys(FIRST_PROMPT + SECOND_PROMPT))}


def token_ids(words: list[str]) -> list[int]:
    return [VOCABULARY[word] for word in words]


def forward(words: list[str]) -> dict[str, Tensor]:
    """Run a causal model: row i is determined by the words up to i only."""
    causal_sums = torch.tensor(token_ids(words), dtype=torch.float64).cumsum(0).unsqueeze(1)
    return {
        "hidden_states": causal_sums * torch.tensor([1.0, -1.0], dtype=torch.float64),
        "mm_feature": causal_sums + torch.arange(FEATURE_SIZE, dtype=torch.float64),
    }


def run_words(
    manager: KVCacheManager, request_id: str, words: list[str]
) -> tuple[int, dict[str, Tensor]]:
    """Run one request; return its number of cached tokens and all rows."""
    ids = token_ids(words)
    hashes = hashes_of(ids, BLOCK_SIZE)
    prefix = manager.find_cached_prefix(hashes, len(ids))
    assert manager.allocate_slots(request_id, len(ids), prefix=prefix, block_hashes=hashes)
    block_table = torch.tensor(manager.block_ids(request_id))
    positions = torch.arange(prefix.num_tokens, len(ids))
    slot_mapping = block_table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    new_rows = {name: rows[positions] for name, rows in forward(words).items()}
    manager.stage_outputs.write(slot_mapping, new_rows)
    manager.publish(request_id, hashes, len(ids))
    return prefix.num_tokens, manager.gather_outputs(request_id, len(ids))


def test_outputs_of_the_design_example():
    manager = KVCacheManager(tiny_config(EXAMPLE_BLOCKS, BLOCK_SIZE))
    assert (len(FIRST_PROMPT), len(SECOND_PROMPT)) == (12, 8)

    # First prompt: 12 tokens, three blocks, nothing cached, both tensors discovered.
    num_cached, outputs = run_words(manager, "first", FIRST_PROMPT)
    assert num_cached == 0
    assert manager.block_ids("first") == [1, 2, 3]
    assert manager.stage_outputs.shapes == {
        "hidden_states": (EXAMPLE_BLOCKS, BLOCK_SIZE, HIDDEN_SIZE),
        "mm_feature": (EXAMPLE_BLOCKS, BLOCK_SIZE, FEATURE_SIZE),
    }
    # Flattened: rows 4 to 15 are "The" to "tree", in order.
    expected = forward(FIRST_PROMPT)
    whole_store = manager.stage_outputs.gather([1, 2, 3], 12)
    for row, word in enumerate(FIRST_PROMPT):
        block_id, offset = 1 + row // BLOCK_SIZE, row % BLOCK_SIZE
        one_row = manager.stage_outputs.gather([block_id], offset + 1, start=offset)
        for name in ("hidden_states", "mm_feature"):
            assert torch.equal(one_row[name][0], expected[name][row]), word
            assert torch.equal(whole_store[name][row], expected[name][row]), word
    assert outputs["hidden_states"].shape == (12, HIDDEN_SIZE)
    assert outputs["mm_feature"].shape == (12, FEATURE_SIZE)
    assert manager.stage_outputs.gather([4], 1) == {}, "the next block has no rows"
    manager.free("first")

    # Second prompt: "The quick brown fox" is cached, four new tokens fill one new block.
    num_cached, outputs = run_words(manager, "second", SECOND_PROMPT)
    assert num_cached == 4
    assert manager.block_ids("second") == [1, 4]
    new_rows = manager.stage_outputs.gather([4], 4)
    assert torch.equal(new_rows["mm_feature"], forward(SECOND_PROMPT)["mm_feature"][4:])
    manager.free("second")
    check_integrity(manager)
    assert manager.stats().cached == 4 and manager.stats().free == 3

    # The full output equals that of a run without the cache.
    uncached = KVCacheManager(tiny_config(EXAMPLE_BLOCKS, BLOCK_SIZE), enable_prefix_caching=False)
    run_words(uncached, "first", FIRST_PROMPT)
    num_cached, uncached_outputs = run_words(uncached, "second", SECOND_PROMPT)
    assert num_cached == 0
    assert outputs.keys() == uncached_outputs.keys() == {"hidden_states", "mm_feature"}
    for name, rows in outputs.items():
        assert torch.equal(rows, uncached_outputs[name])
        assert torch.equal(rows, forward(SECOND_PROMPT)[name])


def test_an_image_that_ends_inside_a_block_is_hit_up_to_the_last_full_block():
    # [Im0 Im1 Im2 Im3] [Im4 Im5 foo] and then [Im0 Im1 Im2 Im3] [Im4 Im5 bar baz]
    manager = KVCacheManager(tiny_config(EXAMPLE_BLOCKS, BLOCK_SIZE))
    image = ["The"] * 6
    run_words(manager, "first", [*image, "quick"])
    manager.free("first")
    num_cached, outputs = run_words(manager, "second", [*image, "brown", "fox"])
    assert num_cached == 4
    expected = forward([*image, "brown", "fox"])
    assert torch.equal(outputs["hidden_states"], expected["hidden_states"])

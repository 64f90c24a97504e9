"""Groups of layers: page sizes, block tables of running requests, wasted memory."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_cache import (
    BlockPool,
    CrossAttentionSpec,
    EncoderBlocks,
    FullAttentionSpec,
    HostOnlySpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheManager,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    StateTensor,
    check_integrity,
    group_layers,
    needed_bytes,
    one_size_groups,
    request_bytes,
)
from prefix_cache.layer_types.coordinator import KVCacheCoordinator
from prefix_cache.specs.kv_cache_spec import pad_pages
from tests.support.examples import examples
from tests.support.tiny_kv_cache import GROUP_MIXES, hashes_of, mixed_config


def spec(
    block_size: int = 16, head_dim: int = 64, dtype: torch.dtype = torch.float32
) -> FullAttentionSpec:
    return FullAttentionSpec(block_size, num_kv_heads=4, head_dim=head_dim, dtype=dtype)


def test_page_sizes():
    # 16 tokens x K and V x 4 heads of 64 x 4 bytes, then twelve layers of that.
    assert spec().layer_page_bytes == 16 * 2 * 4 * 64 * 4 == 32_768
    assert spec(dtype=torch.bfloat16).layer_page_bytes == 16_384
    assert KVCacheGroup(tuple(map(str, range(12))), spec()).page_bytes == 12 * 32_768


def test_layers_of_one_spec_are_one_group_in_the_order_of_the_model():
    wide = spec(head_dim=128)
    groups = group_layers({"a": spec(), "b": wide, "c": spec(), "d": wide, "e": spec()})
    assert groups == (KVCacheGroup(("a", "c", "e"), spec()), KVCacheGroup(("b", "d"), wide))


def test_states_are_aligned_one_after_another():
    states = (StateTensor((3, 5), torch.bfloat16), StateTensor((7,), torch.float32))
    assert [state.nbytes for state in states] == [32, 32]
    assert MambaSpec(16, states).layer_page_bytes == 64


def test_host_only_groups_take_nothing_on_the_device():
    config = mixed_config({"sliding": 3, "host": 1}, 5, 4, num_host_blocks=9)
    assert config.large_page_bytes == config.groups[0].page_bytes == 3 * 32
    assert [config.num_blocks(group_id) for group_id in (0, 1)] == [5, 9]
    assert config.pages_per_large_page(1) == 1 and not config.groups[1].on_device


def test_pages_of_compatible_sizes_are_not_padded():
    groups = mixed_config({"full": 2, "sliding": 3, "mamba": 5, "host": 1}, 2, 4).groups
    assert pad_pages(groups) == groups


def test_an_odd_state_is_padded_and_attention_is_kept():
    attention = KVCacheGroup(("a", "b"), spec(block_size=4, head_dim=8))
    odd = MambaSpec(4, (StateTensor((1009,), torch.float32),))
    for groups in ([KVCacheGroup(("m",), odd), attention], [attention, KVCacheGroup(("m",), odd)]):
        padded = {type(group.spec): group for group in pad_pages(groups)}
        assert padded[FullAttentionSpec].padding_bytes == 0
        assert 0 < padded[MambaSpec].padding_bytes < odd.layer_page_bytes
        assert [type(group.spec) for group in pad_pages(groups)] == [type(g.spec) for g in groups]


@given(
    attention=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 5)), min_size=1, max_size=3),
    states=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 2000)), max_size=2),
    block_size=st.sampled_from([1, 3, 16]),
)
def test_a_large_page_is_at_most_64_of_the_largest_pages_and_padding_keeps_the_content(
    attention, states, block_size
):
    groups = [
        KVCacheGroup(
            tuple(map(str, range(layers))),
            FullAttentionSpec(block_size, num_kv_heads=heads, head_dim=3, dtype=torch.float32),
        )
        for layers, heads in attention
    ]
    groups += [
        KVCacheGroup(
            tuple(map(str, range(layers))),
            MambaSpec(block_size, (StateTensor((width,), torch.float32),)),
        )
        for layers, width in states
    ]
    padded = pad_pages(groups)
    config = KVCacheConfig(2, padded)
    largest = max(group.page_bytes for group in padded)
    assert config.large_page_bytes <= 64 * largest
    for before, after in zip(groups, padded, strict=True):
        assert after.padding_bytes >= 0 and after.content_bytes == before.content_bytes
        assert after.page_bytes % after.spec.page_unit_bytes == 0
    # The largest attention page is placed first and never padded.
    assert any(g.padding_bytes == 0 for g in padded if isinstance(g.spec, FullAttentionSpec))


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        spec(block_size=0)
    with pytest.raises(ValueError, match=r"at least 2 .*got 1"):
        KVCacheConfig(1, (KVCacheGroup(("a",), spec()),))
    with pytest.raises(ValueError, match="at least one group"):
        KVCacheConfig(8, ())
    host = KVCacheGroup((), HostOnlySpec(4))
    with pytest.raises(ValueError, match="at least one group of layers"):
        KVCacheConfig(8, (host,), num_host_blocks=8)
    with pytest.raises(ValueError, match=r"num_host_blocks must be at least 2 .*got 0"):
        KVCacheConfig(8, (KVCacheGroup(("a",), spec()), host))
    with pytest.raises(ValueError, match="window of 3 tokens is smaller than a block of 4"):
        mixed_config({"sliding": 1}, 8, 4, reach=3)
    with pytest.raises(NotImplementedError, match="KVCacheSpec states no page size"):
        _ = KVCacheSpec(4).layer_page_bytes


BLOCK_SIZE = 4
CHUNKS = st.lists(st.integers(1, 13), min_size=1, max_size=8)
KINDS = ["full", "sliding", "mamba", "host"]


def check_step(manager: KVCacheManager, kind: str, group: int, start: int, end: int) -> None:
    """Check that distinct blocks are held for ``[start, end)`` and all tokens it sees."""
    table = manager.block_ids("a", group)
    reach = 7 if kind == "sliding" else end
    if kind == "mamba":
        # The states after tokens start - 1 and end - 1.
        places = {index // BLOCK_SIZE for index in (start - 1, end - 1) if index >= 0}
        assert len(table) - 1 == max(places)
    else:
        places = {
            seen // BLOCK_SIZE
            for position in range(start, end)
            for seen in range(max(0, position - reach + 1), position + 1)
        }
    held = [table[index] for index in sorted(places)]
    assert 0 not in held and len(set(held)) == len(held)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(40))
@given(chunks=CHUNKS, cached=st.booleans())
def test_a_step_holds_all_visible_blocks_and_no_more_than_the_bound(kind, chunks, cached):
    layers = {kind: 1, "full ": 1} if kind == "host" else {kind: 1, "host": 1}
    manager = KVCacheManager(
        mixed_config(layers, 40, BLOCK_SIZE, reach=7),
        enable_prefix_caching=cached,
        max_num_batched_tokens=max(chunks),
    )
    total = sum(chunks)
    token_ids = list(range(total))
    hashes = hashes_of(token_ids, BLOCK_SIZE)
    bound = manager.coordinator.max_blocks(total)[0]
    start = 0
    for chunk in chunks:
        end = start + chunk
        assert manager.allocate_slots("a", end, num_computed_tokens=start)
        check_step(manager, kind, 0, start, end)
        assert sum(block_id != 0 for block_id in manager.block_ids("a")) <= bound
        manager.publish("a", hashes, end)
        start = end
        check_integrity(manager)
    manager.free("a")
    assert manager.stats().held == 0


@settings(max_examples=examples(40))
@given(chunk=st.integers(1, 9), reach=st.integers(BLOCK_SIZE, 11))
def test_a_long_request_holds_only_its_window(chunk, reach):
    config = mixed_config({"sliding": 1, "host": 1}, 12, BLOCK_SIZE, reach=reach)
    manager = KVCacheManager(config, enable_prefix_caching=False, max_num_batched_tokens=chunk)
    bound = manager.coordinator.max_blocks(400)[0]
    assert bound == (reach - 1 + chunk + BLOCK_SIZE - 2) // BLOCK_SIZE + 1 < 12
    held = []
    for start in range(0, 400, chunk):
        assert manager.allocate_slots("a", start + chunk, num_computed_tokens=start)
        held.append(sum(block_id != 0 for block_id in manager.block_ids("a")))
    assert max(held) <= bound
    if chunk % 2:
        assert max(held) == bound, "the bound is tight"
    assert manager.stats().free + manager.stats().held == 11


@settings(max_examples=examples(60))
@given(num_tokens=st.integers(1, 40), chunks=CHUNKS, hit=st.integers(0, 6))
def test_the_bound_holds_for_a_request_that_begins_with_a_hit(num_tokens, chunks, hit):
    mix = {"sliding": 2, "mamba": 3, "host": 1}
    manager = KVCacheManager(
        mixed_config(mix, 40, BLOCK_SIZE, reach=7), max_num_batched_tokens=max(chunks)
    )
    token_ids = list(range(hit * BLOCK_SIZE + 1 + sum(chunks)))
    hashes = hashes_of(token_ids, BLOCK_SIZE)
    for end in range(BLOCK_SIZE, hit * BLOCK_SIZE + 1, BLOCK_SIZE):
        assert manager.allocate_slots("b", end, num_computed_tokens=end - BLOCK_SIZE)
        manager.publish("b", hashes, end)
    if hit:
        manager.free("b")
    prefix = manager.find_cached_prefix(hashes, hit * BLOCK_SIZE + 1)
    assert prefix.num_tokens == hit * BLOCK_SIZE
    bounds = manager.coordinator.max_blocks(len(token_ids))
    start = prefix.num_tokens
    for index, chunk in enumerate(chunks):
        assert manager.allocate_slots(
            "a",
            start + chunk,
            num_computed_tokens=start,
            prefix=None if index else prefix,
            block_hashes=() if index else hashes,
        )
        for group, kind in enumerate(mix):
            check_step(manager, kind, group, start, start + chunk)
            held = [block_id for block_id in manager.block_ids("a", group) if block_id]
            assert len(held) <= bounds[group]
        start += chunk
        manager.publish("a", hashes, start)
        check_integrity(manager)


@given(encoder=st.integers(1, 30), chunks=CHUNKS)
def test_a_cross_attention_table_is_allocated_once(encoder, chunks):
    manager = KVCacheManager(mixed_config(GROUP_MIXES["mllama"], 40, BLOCK_SIZE))
    tables = []
    end = 0
    for chunk in chunks:
        assert manager.allocate_slots(
            "a", end + chunk, num_computed_tokens=end, encoder=EncoderBlocks(encoder, ())
        )
        end += chunk
        tables.append(manager.block_ids("a", 0))
    assert all(table == tables[0] for table in tables)
    assert len(tables[0]) == -(-encoder // BLOCK_SIZE) and 0 not in tables[0]
    assert manager.coordinator.max_blocks(end, encoder)[0] == len(tables[0])


@pytest.mark.parametrize("mix", GROUP_MIXES)
@settings(max_examples=examples(40))
@given(num_tokens=st.integers(1, 60), budget=st.integers(1, 16), pages=st.integers(2, 8))
def test_a_request_that_fits_runs_to_its_end_in_an_empty_pool(mix, num_tokens, budget, pages):
    config = mixed_config(GROUP_MIXES[mix], pages, BLOCK_SIZE, reach=7)
    manager = KVCacheManager(config, max_num_batched_tokens=budget)
    if not manager.fits(num_tokens, num_encoder_tokens=9):
        return
    assert manager.can_finish(num_tokens, num_encoder_tokens=9)
    hashes = hashes_of(range(num_tokens), BLOCK_SIZE)
    for start in range(0, num_tokens, budget):
        end = min(start + budget, num_tokens)
        assert manager.allocate_slots(
            "a", end, num_computed_tokens=start, encoder=EncoderBlocks(9, ()), block_hashes=hashes
        )
        manager.publish("a", hashes, end)
    check_integrity(manager)


def test_blocks_of_a_request_share_large_pages() -> None:
    config = mixed_config({"full": 2, "sliding": 3}, 9, BLOCK_SIZE, reach=99)
    pool = BlockPool.for_config(config)
    coordinator = KVCacheCoordinator(config, pool, 64)
    assert [config.pages_per_large_page(group_id) for group_id in (0, 1)] == [3, 2]

    def pages(request_id: str, group_id: int) -> list[int]:
        table = coordinator.managers[group_id].block_tables[request_id]
        return [block.large_page.page_id for block in table]

    assert coordinator.allocate("a", 4 * BLOCK_SIZE)
    assert (pages("a", 0), pages("a", 1)) == ([1, 1, 1, 2], [3, 3, 4, 4])
    # A half-used page of the same group is preferred to a new one.
    assert coordinator.allocate("b", BLOCK_SIZE)
    assert (pages("b", 0), pages("b", 1)) == ([2], [5])
    # Each request continues in its own page while there is room.
    assert coordinator.allocate("a", 5 * BLOCK_SIZE)
    assert (pages("a", 0)[4:], pages("a", 1)[4:]) == ([2], [5])
    assert coordinator.allocate("b", 3 * BLOCK_SIZE)
    assert (pages("b", 0), pages("b", 1)) == ([2, 6, 6], [5, 7, 7])
    coordinator.free("a")
    assert {page.page_id for page in pool.arenas[0].free_pages} == {1, 3, 4, 8}
    coordinator.free("b")
    assert len(pool.arenas[0].free_pages) == 8


TINY_HEADS = (1, 8, torch.float32)
FULL = FullAttentionSpec(BLOCK_SIZE, *TINY_HEADS)
MAMBA = MambaSpec(BLOCK_SIZE, (StateTensor((4,), torch.float32),))
LENGTHS = st.integers(BLOCK_SIZE, 20)
TABLE_SPECS = st.one_of(
    st.builds(lambda n: SlidingWindowSpec(BLOCK_SIZE, *TINY_HEADS, n), LENGTHS), st.just(MAMBA)
)


def manager_with(specs: list[KVCacheSpec]) -> KVCacheManager:
    groups = group_layers({f"layer.{i}": spec for i, spec in enumerate([FULL, *specs])})
    return KVCacheManager(KVCacheConfig(60, groups), output_names=())


@given(spec=TABLE_SPECS, num_computed_tokens=st.integers(0, 100))
def test_the_first_block_needed_is_the_same_until_the_next_release(
    spec: KVCacheSpec, num_computed_tokens: int
):
    tables = manager_with([spec]).coordinator.managers[1]
    until = tables.next_release(num_computed_tokens)
    assert until > num_computed_tokens
    needed = {tables.first_needed_block(n) for n in range(num_computed_tokens, until)}
    assert needed == {tables.first_needed_block(num_computed_tokens)}


@pytest.mark.parametrize("spec", [FULL, CrossAttentionSpec(BLOCK_SIZE, *TINY_HEADS)])
def test_what_is_needed_to_the_end_is_never_released(spec: KVCacheSpec):
    tables = manager_with([spec]).coordinator.managers[-1]
    assert tables.first_needed_block(10**6) == 0 and tables.next_release(0) > 10**9


@given(
    specs=st.lists(TABLE_SPECS, max_size=3, unique=True),
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=30),
)
def test_after_every_step_only_what_is_needed_is_held(specs: list[KVCacheSpec], counts: list[int]):
    manager = manager_with(specs)
    computed = 0
    for count in counts:
        if not manager.allocate_slots("r", computed + count, num_computed_tokens=computed):
            break
        for group_id, tables in enumerate(manager.coordinator.managers):
            block_ids = manager.block_ids("r", group_id)
            first = min(tables.first_needed_block(computed), len(block_ids) - 1)
            assert not any(block_ids[:first])
            assert block_ids[first] or tables.keeps_states
            assert block_ids[-1] and len(block_ids) == -(-(computed + count) // BLOCK_SIZE)
        computed += count


HEADS = (8, 128, torch.bfloat16)  # keys and values of one token of one layer: 4 KiB
CHUNK = 2048


@dataclass(frozen=True)
class Case:
    """A model of the memory allocator's design document, with its lengths and stated waste."""

    layers: dict[str, KVCacheSpec]
    num_tokens: int
    num_encoder_tokens: int
    one_size_waste: float


def repeated(period: list[KVCacheSpec], times: int) -> dict[str, KVCacheSpec]:
    return {f"layer.{i}": spec for i, spec in enumerate(period * times)}


def mllama(block_size: int) -> Case:
    full, cross = FullAttentionSpec(block_size, *HEADS), CrossAttentionSpec(block_size, *HEADS)
    return Case(repeated([full, full, full, full, cross], 8), 43, 6193, 0.796)


def gemma2(block_size: int) -> Case:
    full = FullAttentionSpec(block_size, 8, 256, torch.bfloat16)
    sliding = SlidingWindowSpec(block_size, 8, 256, torch.bfloat16, window=4096)
    return Case(repeated([sliding, full], 21), 8192, 0, 0.25)


def ministral(block_size: int) -> Case:
    full = FullAttentionSpec(block_size, *HEADS)
    sliding = SlidingWindowSpec(block_size, *HEADS, window=32_768)
    return Case(repeated([full, sliding, sliding, sliding], 9), 131_072, 0, 0.5625)


CASES = {
    "mllama, block size 1": mllama(1),
    "mllama, block size 16": mllama(16),
    "gemma2": gemma2(16),
    "ministral": ministral(64),
}


@pytest.fixture(params=CASES, ids=lambda name: name.replace(", ", "-").replace(" ", "-"))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def manager_of(groups: tuple[KVCacheGroup, ...], num_bytes: int) -> KVCacheManager:
    large_page_bytes = KVCacheConfig(2, groups, num_host_blocks=2).large_page_bytes
    config = KVCacheConfig(2 + num_bytes // large_page_bytes, groups, num_host_blocks=100)
    return KVCacheManager(config, output_names=(), max_num_batched_tokens=CHUNK)


def run(manager: KVCacheManager, name: str, num_tokens: int, num_encoder_tokens: int) -> None:
    """Run a prompt in chunks, then its last token alone, as in a decode."""
    encoder = EncoderBlocks(num_encoder_tokens, ())
    ends = [*range(CHUNK, num_tokens - 1, CHUNK), num_tokens - 1, num_tokens]
    computed = 0
    for end in ends:
        assert manager.allocate_slots(name, end, num_computed_tokens=computed, encoder=encoder)
        computed = end


def held_bytes(manager: KVCacheManager) -> int:
    """Return the bytes of large pages that requests hold."""
    return manager.stats().held * manager.config.large_page_bytes


def held_by_requests(case: Case, groups: tuple[KVCacheGroup, ...], count: int) -> int:
    """Return the bytes of large pages that ``count`` requests hold."""
    needed = needed_bytes(groups, case.num_tokens, case.num_encoder_tokens)
    manager = manager_of(groups, 2 * count * needed)
    for i in range(count):
        run(manager, f"request {i}", case.num_tokens, case.num_encoder_tokens)
    held = held_bytes(manager)
    check_integrity(manager)
    for i in range(count):
        manager.free(f"request {i}")
    assert held_bytes(manager) == 0
    return held


def test_pages_of_one_size_waste_what_the_design_document_says(case: Case):
    groups = group_layers(case.layers)
    needed = needed_bytes(groups, case.num_tokens, case.num_encoder_tokens)
    held = held_by_requests(case, one_size_groups(groups), 1)
    assert 1 - needed / held == pytest.approx(case.one_size_waste, abs=1e-3)


def test_our_waste_is_below_one_percent_beyond_the_last_partial_page(case: Case):
    groups = group_layers(case.layers)
    lengths = (case.num_tokens, case.num_encoder_tokens)
    needed, paged = needed_bytes(groups, *lengths), request_bytes(manager_of(groups, 0), *lengths)
    assert 0 <= paged - needed < sum(group.page_bytes for group in groups), (
        "only partial pages are wasted"
    )
    held = held_by_requests(case, groups, 3)
    assert 0 <= held - 3 * paged < 0.01 * held


def test_text_and_images_share_large_pages():
    """The example drawn in :mod:`prefix_cache.specs.kv_cache_spec`."""
    heads = (1, 32, torch.float16)  # 128 bytes
    cross, full = CrossAttentionSpec(1, *heads), FullAttentionSpec(1, *heads)
    layers = {"cross.0": cross, "cross.1": cross, "0": full, "1": full, "2": full}
    config = KVCacheConfig(4, group_layers(layers))
    assert [group.page_bytes for group in config.groups] == [256, 384]
    assert config.large_page_bytes == 768
    assert [config.pages_per_large_page(group_id) for group_id in (0, 1)] == [3, 2]
    assert [config.num_blocks(group_id) for group_id in (0, 1)] == [12, 8]
    manager = KVCacheManager(config, output_names=())
    assert manager.allocate_slots("r", 2, encoder=EncoderBlocks(3, ()))
    assert manager.block_ids("r", 0) == [3, 4, 5]  # large page 1
    assert manager.block_ids("r", 1) == [4, 5]  # large page 2
    assert manager.stats().free == 1
    assert held_bytes(manager) == needed_bytes(config.groups, 2, 3) == 2 * 768


SPECS = st.sampled_from(
    [
        FullAttentionSpec(4, 1, 8, torch.float32),
        SlidingWindowSpec(4, 1, 8, torch.float32, window=7),
        SlidingWindowSpec(4, 3, 8, torch.float32, window=12),
        CrossAttentionSpec(4, 1, 8, torch.float32),
        MambaSpec(4, (StateTensor((3, 5), torch.float32), StateTensor((7,), torch.float64))),
    ]
)


@given(
    specs=st.lists(SPECS, min_size=1, max_size=8),
    num_tokens=st.integers(2, 70),
    num_encoder_tokens=st.integers(1, 30),
)
def test_a_request_holds_the_predicted_pages(
    specs: list[KVCacheSpec], num_tokens: int, num_encoder_tokens: int
):
    groups = (
        *group_layers({f"layer.{i}": spec for i, spec in enumerate(specs)}),
        KVCacheGroup((), HostOnlySpec(4)),
    )
    manager = manager_of(groups, 2**17)
    run(manager, "r", num_tokens, num_encoder_tokens)
    in_tables = sum(
        group.page_bytes
        for group_id, group in enumerate(groups)
        for block_id in manager.block_ids("r", group_id)
        if block_id
    )
    foretold = request_bytes(manager, num_tokens, num_encoder_tokens)
    assert in_tables == foretold
    needed = needed_bytes(groups, num_tokens, num_encoder_tokens)
    pages = sum(group.page_bytes for group in groups)
    assert needed <= foretold < needed + 2 * pages, "at most a partial page at either end"


def test_recurrent_layers_under_one_page_size_get_pages_that_hold_a_state():
    full = FullAttentionSpec(16, *HEADS)  # 64 KiB a layer
    mamba = MambaSpec(16, (StateTensor((280, 512), torch.float32),))  # 560 KiB a layer
    groups = group_layers(repeated([*[mamba] * 4, full, *[mamba] * 3], 4))
    assert [len(group.layer_names) for group in groups] == [28, 4]
    one_size = one_size_groups(groups)
    assert {group.page_bytes for group in one_size} == {4 * 9 * 16 * 4096}
    assert {group.spec.block_size for group in one_size} == {9 * 16}
    assert [len(group.layer_names) for group in one_size] == [4] * 8
    names = [name for group in one_size for name in group.layer_names]
    assert sorted(names) == sorted(name for group in groups for name in group.layer_names)


def test_one_page_size_is_that_of_the_widest_layer():
    narrow, wide = (SlidingWindowSpec(4, heads, 8, torch.float32, window=8) for heads in (1, 3))
    groups = (*group_layers({"a": narrow, "b": wide}), KVCacheGroup((), HostOnlySpec(4)))
    spec = FullAttentionSpec(4, 3, 8, torch.float32)
    assert one_size_groups(groups) == (KVCacheGroup(("a", "b"), spec),)


def test_states_alone_are_of_one_size_already():
    mamba = MambaSpec(4, (StateTensor((3,), torch.float32),))
    groups = (*group_layers({"a": mamba}), KVCacheGroup((), HostOnlySpec(4)))
    assert one_size_groups(groups) == groups

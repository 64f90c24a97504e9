"""The waste of pages of one size, and of ours, by the allocator's own books."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefix_cache import (
    ChunkedLocalAttentionSpec,
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

HEADS = (8, 128, torch.bfloat16)  # keys and values of one token of one layer: 4 KiB
CHUNK = 2048


@dataclass(frozen=True)
class Case:
    """A model of the memory allocator's design document, at its lengths, with what it says."""

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
    """A prompt in chunks, whose last token runs alone, as when it is decoded."""
    encoder = EncoderBlocks(num_encoder_tokens, ())
    ends = [*range(CHUNK, num_tokens - 1, CHUNK), num_tokens - 1, num_tokens]
    computed = 0
    for end in ends:
        assert manager.allocate_slots(name, end, num_computed_tokens=computed, encoder=encoder)
        computed = end


def held_bytes(manager: KVCacheManager) -> int:
    """Bytes of the large pages that requests hold now: what no other request can have."""
    return manager.stats().held * manager.config.large_page_bytes


def held_by_requests(case: Case, groups: tuple[KVCacheGroup, ...], count: int) -> int:
    """Bytes of the large pages that so many requests take out of the pool."""
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
    assert 0 <= paged - needed < sum(group.page_bytes for group in groups), "the partial pages"
    held = held_by_requests(case, groups, 3)
    assert 0 <= held - 3 * paged < 0.01 * held


def test_text_and_images_beside_each_other_in_pages_of_two_sizes():
    """The picture of the pages in :mod:`prefix_cache.specs.kv_cache_spec`."""
    heads = (1, 32, torch.float16)  # 128 bytes
    cross, full = CrossAttentionSpec(1, *heads), FullAttentionSpec(1, *heads)
    layers = {"cross.0": cross, "cross.1": cross, "0": full, "1": full, "2": full}
    config = KVCacheConfig(4, group_layers(layers))
    assert [group.page_bytes for group in config.groups] == [256, 384]
    assert config.large_page_bytes == 768
    assert [config.pages_per_large_page(group_id) for group_id in (0, 1)] == [3, 2]
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
        ChunkedLocalAttentionSpec(4, 1, 8, torch.float32, chunk_size=10),
        CrossAttentionSpec(4, 1, 8, torch.float32),
        MambaSpec(4, (StateTensor((3, 5), torch.float32), StateTensor((7,), torch.float64))),
    ]
)


@given(
    specs=st.lists(SPECS, min_size=1, max_size=8),
    num_tokens=st.integers(2, 70),
    num_encoder_tokens=st.integers(1, 30),
)
def test_a_request_holds_the_pages_that_were_foretold(
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
    assert needed <= foretold < needed + 2 * pages, "a partial page at either end"


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

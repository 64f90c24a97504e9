"""xformers' biases of the three kinds of attention, materialised, against the reference's masks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.attention.metadata import AttentionMetadata
from engine.attention.reference import visibility_mask
from engine.attention.xformers_backend import (
    decode_bias,
    prefill_bias,
    prefill_slots,
    with_a_key_for_all,
)
from tests.support.examples import examples
from tests.support.paged_batch import (
    cross_metadata_for,
    metadata_for,
    paged_memory,
    random_block_table,
)

CPU = torch.device("cpu")
BLOCK_SIZE = 4
CHUNKS_PER_PAGE = 2
LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=6)

pytest.importorskip("xformers", exc_type=ImportError)


def step(query_lens: list[int], seq_lens: list[int], *, causal: bool) -> AttentionMetadata:
    memory = paged_memory(
        num_blocks=200, block_size=BLOCK_SIZE, num_layers=1, num_kv_heads=1, head_dim=8
    )
    table = random_block_table(seq_lens, BLOCK_SIZE, 200, torch.Generator().manual_seed(0))
    if causal:
        return metadata_for(memory, query_lens, seq_lens, table)
    return cross_metadata_for(memory, query_lens, seq_lens, [True] * len(seq_lens), table)


def decodes_first(query_lens: list[int], seq_lens: list[int]) -> tuple[list[int], list[int]]:
    pairs = sorted(zip(query_lens, seq_lens, strict=True))
    return [query_len for query_len, _ in pairs], [seq_len for _, seq_len in pairs]


def prefill_masks(metadata: AttentionMetadata) -> list[Tensor]:
    """What the reference masks with, of each request that is no decode."""
    query_lens = metadata.query_start_loc.diff().tolist()
    return [
        visibility_mask(query_len, seq_len, causal=metadata.causal)
        for query_len, seq_len in zip(query_lens, metadata.seq_lens.tolist(), strict=True)
    ][metadata.num_decodes :]


def assert_prefills_see_what_the_reference_says(metadata: AttentionMetadata) -> None:
    masks = prefill_masks(metadata)
    if not masks:
        return
    expected = torch.block_diag(*masks).bool()
    bias = prefill_bias(metadata, CPU)
    assert torch.equal(bias.materialize(expected.shape) == 0, expected)


def assert_decodes_see_what_the_reference_says(metadata: AttentionMetadata) -> None:
    """Each decode sees the slots of its keys, wherever they lie, and no other."""
    count, columns = metadata.num_decodes, metadata.block_table.shape[1]
    if not count:
        return
    bias = decode_bias(metadata, CHUNKS_PER_PAGE)
    seen = bias.materialize((count, count * columns * BLOCK_SIZE)) == 0
    expected = torch.zeros_like(seen)
    for decode in range(count):
        visible = visibility_mask(1, int(metadata.seq_lens[decode]), causal=metadata.causal)[0]
        positions = visible.nonzero().flatten()
        pages = metadata.block_table[decode, positions // BLOCK_SIZE] * CHUNKS_PER_PAGE
        expected[decode, pages * BLOCK_SIZE + positions % BLOCK_SIZE] = True
    # The null page is dealt out to who has nothing to see, and fills the ends of all tables.
    assert torch.equal(seen[:, BLOCK_SIZE:], expected[:, BLOCK_SIZE:])


@given(LENGTHS)
@settings(max_examples=examples(50))
def test_encoders_see_their_own_sequence_whole(lengths: list[int]):
    metadata = step(sorted(lengths), sorted(lengths), causal=False)
    assert_prefills_see_what_the_reference_says(metadata)
    assert all(mask.all() and mask.shape[0] == mask.shape[1] for mask in prefill_masks(metadata))


@given(LENGTHS, st.data())
@settings(max_examples=examples(50))
def test_decoders_see_what_lies_before(query_lens: list[int], data: st.DataObject):
    seq_lens = [length + data.draw(st.integers(0, 20)) for length in query_lens]
    metadata = step(*decodes_first(query_lens, seq_lens), causal=True)
    assert_prefills_see_what_the_reference_says(metadata)
    assert_decodes_see_what_the_reference_says(metadata)


@given(LENGTHS, st.data())
@settings(max_examples=examples(50))
def test_cross_attention_sees_rectangles(query_lens: list[int], data: st.DataObject):
    seq_lens = [data.draw(st.integers(0, 30)) for _ in query_lens]
    metadata, blind = with_a_key_for_all(step(*decodes_first(query_lens, seq_lens), causal=False))
    assert_prefills_see_what_the_reference_says(metadata)
    assert_decodes_see_what_the_reference_says(metadata)
    owners = metadata.query_start_loc.diff()
    if blind is None:
        assert all(seq_lens)
    else:
        sees_nothing = torch.tensor(decodes_first(query_lens, seq_lens)[1]) == 0
        assert torch.equal(blind.flatten(), sees_nothing.repeat_interleave(owners))


def test_cross_attention_reads_pages_though_it_has_as_many_queries_as_keys():
    metadata = step([3, 6], [3, 6], causal=False)
    slots = prefill_slots(metadata)
    assert slots is not None
    assert torch.equal(slots, metadata.slot_mapping)
    assert prefill_slots(step([3, 6], [3, 6], causal=True)) is None

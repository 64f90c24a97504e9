"""Where chunks of a prefill end when states are to be kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prefix_cache.layer_types.coordinator import ChunkStops


def chunks(stops: ChunkStops, total: int, budget: int, start: int = 0) -> list[int]:
    ends = []
    while start < total:
        start += stops.clip(start, min(budget, total - start), total)
        ends.append(start)
    return ends


def test_the_example():
    # Blocks of 4, 20 tokens, a shared prefix of 12, ten tokens a step.
    assert chunks(ChunkStops(4, (12, 16)), 20, 10) == [8, 12, 16, 20]


def test_a_budget_below_a_block_ends_anywhere_but_not_beyond_a_stop():
    assert chunks(ChunkStops(4, (8,)), 11, 3) == [3, 4, 7, 8, 11]


def test_decodes_are_left_alone():
    stops = ChunkStops(4, (8, 12))
    assert [stops.clip(start, 1, start + 1) for start in (8, 11, 12, 40)] == [1, 1, 1, 1]


@given(
    block_size=st.integers(1, 6),
    stop_blocks=st.sets(st.integers(1, 12), max_size=3),
    start=st.integers(0, 60),
    num_tokens=st.integers(1, 40),
    behind=st.integers(0, 40),
)
def test_a_chunk_has_a_token_passes_no_stop_and_ends_with_a_block_if_it_can(
    block_size, stop_blocks, start, num_tokens, behind
):
    ends = tuple(sorted(block_size * index for index in stop_blocks))
    total = start + num_tokens + behind
    count = ChunkStops(block_size, ends).clip(start, num_tokens, total)
    assert 1 <= count <= num_tokens
    end = start + count
    assert not any(start < stop < end for stop in ends)
    if end % block_size and end < total:
        # No block boundary could have been reached.
        assert end == start + num_tokens and start // block_size == end // block_size
    elif end < start + num_tokens and end not in ends:
        assert end + block_size > start + num_tokens, "no more than the partial block is cut off"


@given(total=st.integers(1, 80), budget=st.integers(1, 30), stop_blocks=st.sets(st.integers(1, 19)))
def test_every_stop_inside_of_a_prefill_is_the_end_of_a_chunk(total, budget, stop_blocks):
    ends = tuple(sorted(4 * index for index in stop_blocks))
    reached = chunks(ChunkStops(4, ends), total, budget)
    assert reached[-1] == total
    assert {end for end in ends if end < total} <= set(reached)

"""Rows that accompany tokens: known as far as received, and hashed by content only."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.requests.encoder_input import PromptPositions, StreamedRows, position_spans

ROWS = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
FILLER = torch.tensor([7.0, 8.0, 9.0])
NUM_REPLACED = 4


def grown(sizes: Sequence[int], *, rows: Tensor = ROWS, complete: bool = True) -> StreamedRows:
    streamed_rows = StreamedRows(rows[: sizes[0]], NUM_REPLACED)
    done = sizes[0]
    for size in sizes[1:]:
        streamed_rows.extend(rows[done : done + size])
        done += size
    if complete:
        streamed_rows.extend(rows[done:])
        streamed_rows.complete(FILLER)
    return streamed_rows


@given(st.lists(st.integers(0, 7), min_size=1, max_size=6), st.data())
def test_results_do_not_depend_on_how_rows_arrive(sizes: list[int], data: st.DataObject) -> None:
    streamed_rows, whole = grown(sizes), grown([len(ROWS)])
    start = data.draw(st.integers(0, 30))
    stop = data.draw(st.integers(start, 40))
    block_size = data.draw(st.integers(1, 6))
    expected = torch.cat([ROWS, FILLER.expand(20, -1)])
    assert torch.equal(streamed_rows.cut(start, stop), expected[start:stop])
    start_of_block = start // block_size * block_size
    spans = streamed_rows.spans(start_of_block, stop, block_size)
    assert spans == whole.spans(start_of_block, stop, block_size)
    embeds = torch.randn(stop - start, 3)
    inputs = embeds.clone()
    streamed_rows.apply(inputs, start)
    expected[NUM_REPLACED:stop] += torch.cat([torch.zeros(start, 3), embeds])[NUM_REPLACED:stop]
    torch.testing.assert_close(inputs, expected[start:stop], atol=0, rtol=0)


def test_rows_not_received_are_not_known() -> None:
    streamed_rows = grown([5, 3], complete=False)
    assert not streamed_rows.is_complete
    assert [streamed_rows.num_known(limit) for limit in (2, 8, 9)] == [2, 8, 8]
    with pytest.raises(ValueError, match="8 are known"):
        streamed_rows.cut(7, 9)
    streamed_rows.complete(FILLER)
    assert streamed_rows.num_known(1000) == 1000


def test_completed_rows_cannot_be_extended() -> None:
    streamed_rows = grown([5])
    with pytest.raises(ValueError, match="ended"):
        streamed_rows.extend(ROWS[:1])
    with pytest.raises(ValueError, match="ended already"):
        streamed_rows.complete(FILLER)


def test_rows_are_copied() -> None:
    rows = ROWS.clone()
    streamed_rows = StreamedRows(rows, NUM_REPLACED)
    rows.zero_()
    assert torch.equal(streamed_rows.cut(0, 20), ROWS)


def test_spans_distinguish_rows_and_their_use() -> None:
    changed = ROWS.clone()
    changed[6] += 1
    spans, others = grown([20]).spans(0, 20, 2), grown([20], rows=changed).spans(0, 20, 2)
    assert [a == b for a, b in zip(spans, others, strict=True)] == [i != 3 for i in range(10)]
    same = StreamedRows(ROWS[:1].expand(6, -1), NUM_REPLACED).spans(3, 5, 3)
    assert same[0].content_hash == same[1].content_hash and same[0].kind != same[1].kind


def test_later_rows_do_not_change_the_spans_of_a_block() -> None:
    whole = grown([20])
    for stop in (4, 12, 16, 24):
        spans = [span for span in whole.spans(0, 32, 4) if span.offset < stop]
        assert list(whole.spans(0, stop, 4)) == spans


@given(st.lists(st.integers(1, 3), max_size=4), st.integers(0, 5), st.integers(1, 6))
def test_keys_replace_the_content_of_keyed_rows(
    sizes: list[int], num_unkeyed: int, block_size: int
) -> None:
    """Different rows with equal keys count as equal; other rows, keyed or not, do not."""
    ids = [key for key, size in enumerate(sizes, 1) for _ in range(size)] + [0] * num_unkeyed
    keys, rows = torch.tensor(ids).reshape(-1, 1).repeat(1, 6), torch.randn(len(ids) + 2, 3)
    changed, num_keyed = rows + torch.tensor([[1.0]]), sum(sizes)
    changed[num_keyed:] = rows[num_keyed:]
    spans = StreamedRows(rows, len(ids), keys).spans(0, len(ids), block_size)
    assert StreamedRows(changed, len(ids), keys).spans(0, len(ids), block_size) == spans
    assert sum(span.length for span in spans) == len(ids)
    if ids:
        assert StreamedRows(rows + 1, len(ids)).spans(0, len(ids), block_size) != spans
    if num_keyed:
        assert StreamedRows(rows, len(ids), 2 * keys).spans(0, len(ids), block_size) != spans


def test_positions_equal_to_indices_have_no_span() -> None:
    table = torch.arange(12).repeat(3, 1)
    table[1, 5:] += 2
    moved, same = PromptPositions.of(table), PromptPositions.of(table[:, :4])
    assert [span.offset for span in position_spans(moved, 4)] == [4, 8]
    assert position_spans(same, 4) == ()
    table = table.clone()
    table[1, 9] += 1
    pairs = zip(position_spans(moved, 4), position_spans(PromptPositions.of(table), 4), strict=True)
    assert [a == b for a, b in pairs] == [True, False]

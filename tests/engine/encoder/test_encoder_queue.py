"""Batches are full but not wasteful, and nobody starves."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.encoder.encoder_engine import EncoderQueue, EncoderRequest
from prefix_cache import whole_input_hash

MAX_SEQS = 3
BUDGET = 24


def request(index: int, length: int, priority: int = 0, embeds: bool = False) -> EncoderRequest:
    return EncoderRequest(
        request_id=f"r{index}",
        content=torch.zeros(length, 2) if embeds else torch.zeros(length, dtype=torch.int64),
        input_hash=whole_input_hash([length, int(embeds)]),
        priority=priority,
        arrival_index=index,
    )


def queue_of(*requests: EncoderRequest) -> EncoderQueue:
    queue = EncoderQueue(MAX_SEQS, BUDGET)
    for item in requests:
        queue.add(item)
    return queue


def ids(batch: list[EncoderRequest]) -> list[str]:
    return [item.request_id for item in batch]


@given(
    st.lists(
        st.tuples(st.integers(1, BUDGET), st.integers(0, 2), st.booleans()), min_size=1, max_size=20
    )
)
def test_every_batch_keeps_the_limits_and_starts_with_the_first_in_the_order(specs):
    requests = [request(i, *spec) for i, spec in enumerate(specs)]
    queue = queue_of(*requests)
    order = sorted(requests, key=lambda r: (r.priority, r.arrival_index))
    while queue.waiting():
        batch = queue.next_batch(share=False)
        assert batch[0] is order[0]
        cells = max(r.num_tokens for r in batch) * len(batch)
        assert cells <= BUDGET and len(batch) <= MAX_SEQS
        assert cells <= 2 * sum(r.num_tokens for r in batch)
        assert len({r.is_embeds for r in batch}) == 1
        for item in batch:
            queue.remove(item)
            order.remove(item)
    assert not order


def test_mates_are_those_nearest_in_length():
    queue = queue_of(request(0, 6), request(1, 3), request(2, 7), request(3, 6))
    assert ids(queue.next_batch(share=False)) == ["r0", "r3", "r2"]


def test_a_mate_of_higher_priority_goes_before_a_nearer_one():
    queue = queue_of(request(0, 6), request(1, 6, 2), request(2, 6, 2), request(3, 8, 1))
    assert ids(queue.next_batch(share=False)) == ["r0", "r3", "r1"]


def test_equal_inputs_share_only_where_they_may():
    queue = queue_of(request(0, 6), request(1, 6), request(2, 5))
    assert ids(queue.next_batch(share=True)) == ["r0", "r2"]
    assert ids(queue.next_batch(share=False)) == ["r0", "r1", "r2"]


def test_an_empty_queue_gives_no_batch():
    assert queue_of().next_batch(share=True) == []

"""Which ids may not be chosen, position by position."""

from __future__ import annotations

import pytest

from engine import SamplingParams
from engine.sampling.sampler import SamplingState


def masked(params: SamplingParams, begin: list[int], positions: int) -> list[set[int]]:
    state = SamplingState(params, (), 0, [2], 10, begin_suppress_token_ids=begin)
    found = []
    for _ in range(positions):
        found.append(set() if state.masked_ids is None else set(state.masked_ids.tolist()))
        state.append(5)
    return found


def test_begin_suppressed_ids_are_masked_at_the_first_position_only() -> None:
    assert masked(SamplingParams(), [2, 7], 3) == [{2, 7}, set(), set()]


def test_they_come_on_top_of_all_other_masks() -> None:
    params = SamplingParams(suppress_token_ids=(1,), stop_token_ids=(3,), min_tokens=2)
    assert masked(params, [7], 4) == [{1, 2, 3, 7}, {1, 2, 3}, {1}, {1}]


def test_ids_that_the_head_does_not_know_are_left_out() -> None:
    assert masked(SamplingParams(), [7, 10, 99], 2) == [{7}, set()]


def test_a_position_with_a_mask_is_not_plain_and_the_next_one_is() -> None:
    greedy = SamplingParams(temperature=0.0)
    state = SamplingState(greedy, (), 0, [2], 10, begin_suppress_token_ids=[7])
    assert not state.is_plain
    state.append(5)
    assert state.is_plain


def test_a_position_with_a_bias_is_not_plain() -> None:
    params = SamplingParams(temperature=0.0, logit_bias={5: 1.0})
    state = SamplingState(params, (), 0, [2], 10)
    other = state.with_seed(1)
    state.append(5)
    assert not state.is_plain and not other.is_plain
    assert state.bias is not None and other.bias is state.bias


def test_something_must_be_left_for_the_first_position() -> None:
    with pytest.raises(ValueError, match="no token is left to choose"):
        masked(SamplingParams(suppress_token_ids=tuple(range(9))), [9], 1)

"""Filters and penalties keep what transformers' logits processors keep."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine import SamplingParams
from engine.sampling.sampler import (
    SamplingState,
    apply_biases,
    apply_masks,
    apply_penalties,
    shape_distribution,
)
from tests.support.examples import examples

EOS = 3


def processors(params: SamplingParams, prompt_length: int) -> LogitsProcessorList:
    chosen: list[LogitsProcessor] = []
    if params.logit_bias:
        biases = {(token_id,): value for token_id, value in params.logit_bias.items()}
        chosen.append(SequenceBiasLogitsProcessor(biases))
    if params.suppress_token_ids:
        chosen.append(SuppressTokensLogitsProcessor(list(params.suppress_token_ids)))
    if params.min_tokens:
        chosen.append(MinNewTokensLengthLogitsProcessor(prompt_length, params.min_tokens, EOS))
    chosen.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    chosen.append(TemperatureLogitsWarper(params.temperature))
    if params.min_p:
        chosen.append(MinPLogitsWarper(params.min_p))
    if params.top_k:
        chosen.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        chosen.append(TopPLogitsWarper(params.top_p))
    return LogitsProcessorList(chosen)


def make_state(
    params: SamplingParams, prompt: list[int], output: list[int], vocab_size: int
) -> SamplingState:
    state = SamplingState(params, prompt, 0, {EOS}, vocab_size)
    for token_id in output:
        state.append(token_id)
    return state


def ours(logits: Tensor, states: list[SamplingState]) -> Tensor:
    adjusted = logits.clone()
    apply_biases(adjusted, states)
    apply_masks(adjusted, states)
    apply_penalties(adjusted, states)
    return shape_distribution(adjusted, [state.params for state in states]).softmax(-1)


params_of_row = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 5.0),
    top_k=st.sampled_from([0, 1, 2, 10, 10_000]),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    repetition_penalty=st.floats(0.5, 2.0),
    min_tokens=st.sampled_from([0, 2]),
    suppress_token_ids=st.sets(st.integers(4, 20), max_size=5).map(tuple),
    logit_bias=st.dictionaries(
        st.integers(0, 40), st.one_of(st.floats(-100, 100), st.floats(-5, 5)), max_size=5
    ),
)
history = st.tuples(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.lists(st.integers(0, 40), max_size=6),
)


@settings(max_examples=examples(150))
@given(
    rows=st.lists(st.tuples(params_of_row, history), min_size=1, max_size=5),
    vocab_size=st.sampled_from([41, 300, 2500]),
    seed=st.integers(0, 10_000),
)
def test_kept_tokens_and_probabilities_are_those_of_transformers(rows, vocab_size: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), vocab_size, generator=generator) * 4
    states = [make_state(p, prompt, output, vocab_size) for p, (prompt, output) in rows]
    found = ours(logits, states)
    for row, (params, (prompt, output)) in enumerate(rows):
        ids = torch.tensor([prompt + output])
        scores = processors(params, len(prompt))(ids, logits[row : row + 1].double())
        expected = scores.softmax(-1)[0]
        assert torch.equal(found[row] > 0, expected > 0)
        torch.testing.assert_close(found[row], expected, rtol=0, atol=1e-6)


@given(
    rows=st.lists(
        st.tuples(st.floats(-2.0, 2.0), st.floats(-2.0, 2.0), history), min_size=1, max_size=4
    )
)
def test_frequency_and_presence_count_the_output_only(rows):
    vocab_size = 41
    logits = torch.randn(len(rows), vocab_size, generator=torch.Generator().manual_seed(1))
    adjusted = logits.clone()
    states = []
    for frequency, presence, (prompt, output) in rows:
        params = SamplingParams(frequency_penalty=frequency, presence_penalty=presence)
        states.append(make_state(params, prompt, output, vocab_size))
    apply_penalties(adjusted, states)
    expected = logits.clone()
    for row, (frequency, presence, (_, output)) in enumerate(rows):
        for token_id, times in Counter(output).items():
            expected[row, token_id] -= frequency * times + presence
    torch.testing.assert_close(adjusted, expected, rtol=0, atol=1e-5)


def test_counts_grow_with_long_outputs():
    vocab_size = 5000
    output = [i % 700 for i in range(1500)]
    params = SamplingParams(frequency_penalty=0.5)
    adjusted = torch.zeros(1, vocab_size)
    apply_penalties(adjusted, [make_state(params, [4000], output, vocab_size)])
    counts = torch.bincount(torch.tensor(output), minlength=vocab_size)
    torch.testing.assert_close(adjusted[0], -0.5 * counts.float())


@pytest.mark.parametrize("vocab_size", [1500, 5000])
def test_top_p_of_a_flat_distribution_looks_past_the_first_thousand(vocab_size: int):
    logits = torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(2)) * 0.01
    flat, plain = SamplingParams(top_p=0.9), SamplingParams()
    found = shape_distribution(logits, [flat, plain])
    expected = TopPLogitsWarper(0.9)(torch.empty(2, 0), logits.double())
    assert torch.equal(found[0].isfinite(), expected[0].isfinite())
    assert 0.85 * vocab_size < int(found[0].isfinite().sum()) < 0.95 * vocab_size
    assert bool(found[1].isfinite().all())


@pytest.mark.parametrize("params", [SamplingParams(top_k=2), SamplingParams(top_p=0.5)])
def test_equal_logits_stay_or_go_together(params: SamplingParams):
    logits = torch.tensor([[3.0, 1.0, 3.0, 0.0, 3.0]])
    kept = shape_distribution(logits, [params]).isfinite()[0]
    assert kept.tolist() == [True, False, True, False, True]

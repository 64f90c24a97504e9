"""Timestamps come where transformers' own rule has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from engine import SamplingParams
from engine.models.whisper.whisper import TimestampRule
from engine.sampling.sampler import Sampler, SamplingState

VOCAB, END, WITHOUT = 40, 20, 24


def reference(generated: list[int], logits: torch.Tensor, max_first: int | None) -> torch.Tensor:
    config: Any = GenerationConfig(eos_token_id=END, bos_token_id=END)
    config.no_timestamps_token_id = WITHOUT
    config.max_initial_timestamp_index = max_first
    prompt = [21, 22]
    processor = WhisperTimeStampLogitsProcessor(config, begin_index=len(prompt))
    return processor(torch.tensor([prompt + generated]), logits[None])[0]


@given(
    generated=st.lists(st.one_of(st.integers(0, END), st.integers(WITHOUT + 1, VOCAB - 1))),
    seed=st.integers(0, 10**6),
    lift=st.floats(-4, 4),
    max_first=st.none() | st.integers(0, 9),
)
def test_the_same_is_masked_as_by_transformers(
    generated: list[int], seed: int, lift: float, max_first: int | None
) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    logits[WITHOUT + 1 :] += lift
    expected = reference(generated, logits, max_first)
    found = logits.clone()
    TimestampRule(WITHOUT, END, max_first).apply(found, generated)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_sampler_keeps_to_the_rule_of_each_row(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=0)
    ruled = SamplingState(
        params, (), 0, [END], VOCAB, logits_processor=TimestampRule(WITHOUT, END, 3)
    )
    free = SamplingState(params, (), 0, [END], VOCAB)
    logits = torch.zeros(2, VOCAB)
    logits[:, 5] = 30.0
    time, text = Sampler().sample(logits, [ruled, free]).token_ids
    assert time in range(WITHOUT + 1, WITHOUT + 1 + 3 + 1)
    assert text == 5
    ruled.append(time)
    assert Sampler().sample(logits, [ruled, free]).token_ids == [5, 5]
    ruled.append(5)
    logits[:, -1] = 40.0
    assert Sampler().sample(logits, [ruled, free]).token_ids == [VOCAB - 1] * 2

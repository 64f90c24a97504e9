"""Whisper finds out which language is spoken, as it does in transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import WhisperForConditionalGeneration

from engine import (
    AudioPrompt,
    EngineConfig,
    LLMEngine,
    RequestOutput,
    SamplingParams,
)
from tests.support.encoder_decoder_requests import Case, Oracle, tone

NUM_TOKENS = 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SOUNDS = [
    tone(0.3 + 0.2 * number, 150.0 * (number + 1), seed=number) * (0.2 if number % 2 else 1.0)
    for number in range(8)
]


@dataclass(frozen=True)
class Heard:
    """What transformers makes of a sound whose language nobody names."""

    samples: NDArray[np.float32]
    prompt: tuple[int, ...]
    token_ids: list[int]

    @property
    def language_id(self) -> int:
        return self.prompt[1]


@pytest.fixture(scope="module")
def folder(seeded: Callable[[str], str]) -> str:
    return seeded("whisper")


@pytest.fixture(scope="module")
def known(folder: str) -> Any:
    return WhisperForConditionalGeneration.from_pretrained(folder).generation_config


@pytest.fixture(scope="module")
def heard(folder: str) -> list[Heard]:
    oracle = Oracle(folder)
    model = oracle.reference.model
    own = model.generation_config
    found = []
    for samples in SOUNDS:
        entry = oracle.read(Case(samples, (), ""))
        assert entry is not None
        features = entry.features["input_features"][None]
        (language,) = model.detect_language(features).tolist()
        transcribe, without = own.task_to_id["transcribe"], own.no_timestamps_token_id
        prompt = (own.decoder_start_token_id, language, transcribe, without)
        answer = oracle.answer(Case(samples, prompt, ""), NUM_TOKENS)
        found.append(Heard(samples, prompt, answer.token_ids))
    assert len({each.language_id for each in found}) > 1, "the sounds tell nothing apart"
    return found


def build(folder: str, **settings: Any) -> LLMEngine:
    chosen: dict[str, Any] = {
        "block_size": 4,
        "num_blocks": 256,
        "max_model_len": 32,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
    }
    return LLMEngine(EngineConfig(model=folder, **chosen | settings))


def unnamed(each: Heard) -> AudioPrompt:
    return AudioPrompt(each.samples, task="transcribe")


def named(each: Heard, known: Any) -> AudioPrompt:
    (token,) = (name for name, id_ in known.lang_to_id.items() if id_ == each.language_id)
    return AudioPrompt(each.samples, language=token, task="transcribe")


def assert_same(found: RequestOutput, expected: RequestOutput) -> None:
    assert found.error is None
    assert found.prompt_token_ids == expected.prompt_token_ids
    assert found.num_prompt_tokens == expected.num_prompt_tokens
    for one, other in zip(found.outputs, expected.outputs, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        assert one.tensors.keys() == other.tensors.keys()
        for name, rows in one.tensors.items():
            # The encoder rounds by its batch, and named requests come in other batches.
            torch.testing.assert_close(rows, other.tensors[name], atol=5e-5, rtol=0)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 2, "max_num_seqs": 2},
        {"block_size": 1, "max_num_seqs": 1},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_the_language_and_the_tokens_are_those_of_transformers(
    folder: str, heard: list[Heard], settings: dict[str, Any]
) -> None:
    engine = build(folder, **settings)
    for _ in range(2):  # the second time the encoder's outputs are known
        outputs = engine.generate([unnamed(each) for each in heard], GREEDY)
        for output, each in zip(outputs, heard, strict=True):
            assert output.prompt_token_ids == each.prompt
            assert output.num_prompt_tokens == 4
            assert list(output.outputs[0].token_ids) == each.token_ids
    engine.check_integrity()


SAMPLING = {
    "drawn": SamplingParams(temperature=0.9, seed=3, max_tokens=NUM_TOKENS),
    "penalties": SamplingParams(
        temperature=0.0, max_tokens=NUM_TOKENS, repetition_penalty=1.7, presence_penalty=0.3
    ),
    "first tokens suppressed": SamplingParams(
        temperature=0.0, max_tokens=NUM_TOKENS, min_tokens=3, suppress_token_ids=(40, 41)
    ),
    "log-probabilities": SamplingParams(temperature=0.0, max_tokens=4, logprobs=2),
    "several": SamplingParams(temperature=0.9, seed=3, max_tokens=4, n=3),
    "nothing to generate": SamplingParams(max_tokens=0),
    "stop": SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, stop=("a", "e")),
}


@pytest.mark.parametrize("name", SAMPLING)
def test_a_detected_language_gives_what_the_named_one_gives(
    folder: str, heard: list[Heard], known: Any, name: str
) -> None:
    params = SAMPLING[name]
    found = build(folder).generate([unnamed(each) for each in heard], params)
    expected = build(folder).generate([named(each, known) for each in heard], params)
    for one, other, each in zip(found, expected, heard, strict=True):
        assert one.prompt_token_ids[1] == each.language_id
        assert_same(one, other)
        for mine, theirs in zip(one.outputs, other.outputs, strict=True):
            assert (mine.logprobs is None) == (theirs.logprobs is None)
            for left, right in zip(mine.logprobs or (), theirs.logprobs or (), strict=True):
                assert left.logprob == pytest.approx(right.logprob, abs=1e-4)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preemption_changes_nothing(
    folder: str, heard: list[Heard], known: Any, preemption: str
) -> None:
    longer = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    roomy = build(folder, max_model_len=48).generate([named(e, known) for e in heard], longer)
    settings = {"block_size": 1, "num_blocks": 240, "max_model_len": 48, "max_num_seqs": 8}
    engine = build(folder, preemption=preemption, **settings)
    mixed = [unnamed(e) if i % 3 else named(e, known) for i, e in enumerate(heard)]
    for output, expected in zip(engine.generate(mixed, longer), roomy, strict=True):
        assert_same(output, expected)
    assert engine.stats().num_preemptions
    engine.check_integrity()


def test_a_step_that_fails_while_it_detects_changes_nothing(
    folder: str, heard: list[Heard], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [unnamed(each) for each in heard[:3]]
    expected = build(folder).generate(prompts, GREEDY)
    engine, failures = build(folder), iter([True])
    sample = engine._runner._sample

    def fail_once(*arguments: Any) -> Any:
        if next(failures, False):
            raise RuntimeError("once")
        return sample(*arguments)

    monkeypatch.setattr(engine._runner, "_sample", fail_once)
    for output, other in zip(engine.generate(prompts, GREEDY), expected, strict=True):
        assert_same(output, other)
    assert not list(failures)
    engine.check_integrity()


def test_nothing_is_put_out_before_the_language_is_known(folder: str, heard: list[Heard]) -> None:
    engine = build(folder)
    engine.add_request("a", unnamed(heard[0]), GREEDY)
    assert engine.step() == []
    (output,) = engine.step()
    assert output.num_prompt_tokens == 4
    assert len(output.outputs[0].token_ids) == 1
    assert engine.stats().prompt_tokens == 4


def test_an_abort_before_the_language_is_known_leaves_nothing(
    folder: str, heard: list[Heard]
) -> None:
    engine = build(folder)
    for num_steps in range(3):
        engine.add_request("a", unnamed(heard[0]), GREEDY)
        for _ in range(num_steps):
            engine.step()
        engine.abort("a")
        assert not engine.has_unfinished_requests
        engine.check_integrity()


def test_room_is_counted_for_the_tokens_that_are_still_to_come(
    folder: str, heard: list[Heard]
) -> None:
    engine = build(folder, max_model_len=4)
    engine.generate(unnamed(heard[0]), SamplingParams(max_tokens=0))
    with pytest.raises(ValueError, match="the prompt has 4 tokens, and 1 to generate"):
        engine.generate(unnamed(heard[0]), SamplingParams(max_tokens=1))

"""``deterministic``: the same bits, whatever a request runs beside and however it is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from engine import (
    CompletionOutput,
    EmbedsPrompt,
    EncoderEngine,
    EngineConfig,
    LLMEngine,
    Prompt,
    SamplingParams,
    TokensPrompt,
)
from tests.support.gguf_files import write_gguf
from tests.support.native_kernels import needs_kernels

pytestmark = needs_kernels

# Longer than torch's prefills, several parts of attention, and less than a block.
LENGTHS = (5, 40, 300, 150, 330)
PROMPTS = [TokensPrompt(tuple((i * 7 * n + i * i + n) % 90 + 4 for i in range(n))) for n in LENGTHS]
FAMILIES = ("qwen2", "qwen3", "mistral-sliding", "gemma2", "gemma3", "qwen3_moe")


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def sampling(index: int, max_tokens: int) -> SamplingParams:
    """Greedy and drawn requests by turns."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.8 * (index % 2),
        seed=index,
        logprobs=2,
        ignore_eos=True,
    )


def answers(
    folder: str,
    prompts: Sequence[Prompt] = PROMPTS,
    *,
    alone: bool = False,
    times: int = 1,
    num_threads: int = 2,
    max_tokens: int = 6,
    **settings: Any,
) -> list[CompletionOutput]:
    """What an engine answers to all prompts, one by one or together; the last of some times."""
    standard = {"max_num_seqs": 8, "max_model_len": 512, "num_blocks": 300}
    with threads(num_threads):
        engine = LLMEngine(EngineConfig(model=folder, deterministic=True, **standard | settings))
        params = [sampling(index, max_tokens) for index in range(len(prompts))]
        for _ in range(times):
            if alone:
                pairs = zip(prompts, params, strict=True)
                outputs = [engine.generate(prompt, each)[0] for prompt, each in pairs]
            else:
                outputs = engine.generate(prompts, params)
        assert (engine.stats().num_preemptions > 0) == ("preemption" in settings)
        if times > 1:
            assert all(output.num_cached_tokens > 0 for output in outputs[1:])
        return [output.outputs[0] for output in outputs]


def assert_same_bits(some: list[CompletionOutput], others: list[CompletionOutput]) -> None:
    for one, other in zip(some, others, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs
        hidden = one.tensors["hidden_states"], other.tensors["hidden_states"]
        assert torch.equal(*hidden)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_gets_the_same_bits_however_it_runs(
    seeded: Callable[[str], str], family: str
) -> None:
    folder = seeded(family)
    alone = answers(folder, alone=True, enable_prefix_caching=False)
    ways: dict[str, dict[str, Any]] = {
        "beside others": {},
        "in chunks, in blocks of 4": {
            "max_num_batched_tokens": 45,
            "block_size": 4,
            "num_blocks": 1200,
        },
        "cached": {"times": 2},
        "alone, by one thread": {"alone": True, "num_threads": 1},
        "by three threads": {"num_threads": 3},
    }
    for way in ways.values():
        assert_same_bits(answers(folder, **way), alone)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preemption_changes_no_bit(qwen2_checkpoint: str, preemption: str) -> None:
    alone = answers(qwen2_checkpoint, alone=True, max_tokens=60)
    few = {"block_size": 4, "num_blocks": 212}
    assert_same_bits(answers(qwen2_checkpoint, preemption=preemption, max_tokens=60, **few), alone)


@pytest.mark.parametrize(
    "options",
    [{"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "bfloat16"}],
    ids=str,
)
def test_formats_of_weights_change_nothing_about_it(
    qwen2_checkpoint: str, options: dict[str, Any]
) -> None:
    alone = answers(qwen2_checkpoint, alone=True, **options)
    assert_same_bits(answers(qwen2_checkpoint, max_num_batched_tokens=45, **options), alone)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_blocks_of_a_gguf_file_change_nothing_about_it(
    seeded: Callable[[str], str], kind: str, tmp_path: Path
) -> None:
    stored = GGMLQuantizationType[kind]
    file = str(write_gguf(seeded("llama"), tmp_path / "m.gguf", lambda name: stored))
    alone = answers(file, alone=True)
    assert_same_bits(answers(file, max_num_batched_tokens=45), alone)


def test_prompts_of_embeddings_get_the_same_bits(qwen2_checkpoint: str) -> None:
    width = LLMEngine(EngineConfig(model=qwen2_checkpoint, num_blocks=4)).hidden_size
    random = torch.Generator().manual_seed(0)
    prompts = [EmbedsPrompt(torch.randn(length, width, generator=random)) for length in LENGTHS]
    alone = answers(qwen2_checkpoint, prompts, alone=True, enable_prefix_caching=False)
    for way in ({}, {"max_num_batched_tokens": 45}, {"times": 2}):
        assert_same_bits(answers(qwen2_checkpoint, prompts, **way), alone)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("jamba", "scans of recurrent layers"), ("bart", "an encoder"), ("llava", "a tower")],
)
def test_a_model_that_cannot_is_refused(
    seeded: Callable[[str], str], name: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=f"deterministic: this model has {reason}"):
        LLMEngine(EngineConfig(model=seeded(name), deterministic=True))


def test_an_encoder_is_refused(bert_checkpoint: str) -> None:
    with pytest.raises(ValueError, match="padded batches"):
        EncoderEngine(EngineConfig(model=bert_checkpoint, deterministic=True))


def test_torchs_attention_is_refused(qwen2_checkpoint: str) -> None:
    with pytest.raises(ValueError, match="needs the C kernels"):
        LLMEngine(
            EngineConfig(model=qwen2_checkpoint, deterministic=True, attention_backend="torch")
        )

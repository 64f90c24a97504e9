"""``deterministic``: the same bits, whatever the batch, chunks, blocks, cache and threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from engine import (
    CodecPrompt,
    CompletionOutput,
    EmbedsPrompt,
    EncoderEngine,
    EngineConfig,
    GenerationParams,
    GeneratorConfig,
    GeneratorEngine,
    LLMEngine,
    Prompt,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from engine.layers.delta_rule import delta_step
from engine.layers.layer_ops import NativeLayerOps
from engine.native import load_kernels
from tests.support.encoder_decoder_requests import cases
from tests.support.gguf_files import write_gguf
from tests.support.native_kernels import needs_kernels
from tests.support.pictures import PLACEHOLDER, picture
from tests.support.vocoder_reference import random_codes

pytestmark = needs_kernels

# Longer than torch's prefills, several parts of attention, and shorter than a block.
LENGTHS = (5, 40, 300, 150, 330)
PROMPTS = [TokensPrompt(tuple((i * 7 * n + i * i + n) % 90 + 4 for i in range(n))) for n in LENGTHS]
FAMILIES = (
    *("qwen2", "qwen3", "mistral-sliding", "gemma2", "gemma3", "qwen3_moe"),
    *("jamba", "bamba", "qwen3_next", "qwen3_5"),
)


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def sampling(index: int, max_tokens: int) -> SamplingParams:
    """Return greedy and random sampling in turn."""
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
    """Return answers to all prompts, one by one or together, of the last of several runs."""
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
            assert any(output.num_cached_tokens > 0 for output in outputs[1:])
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
def test_quantized_weights_get_the_same_bits(
    qwen2_checkpoint: str, options: dict[str, Any]
) -> None:
    alone = answers(qwen2_checkpoint, alone=True, **options)
    assert_same_bits(answers(qwen2_checkpoint, max_num_batched_tokens=45, **options), alone)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_blocks_of_a_gguf_file_get_the_same_bits(
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


@pytest.mark.parametrize("family", ["bart", "t5", "whisper", "mllama"])
def test_encoder_decoders_get_the_same_bits(seeded: Callable[[str], str], family: str) -> None:
    folder = seeded(family)
    prompts = [case.prompt for case in cases(family, folder)]
    short = {"max_model_len": 64, "block_size": 2}
    alone = answers(folder, prompts, alone=True, enable_prefix_caching=False, **short)
    for way in ({}, {"max_num_batched_tokens": 9}, {"times": 2}):
        assert_same_bits(answers(folder, prompts, **short | way), alone)


@pytest.mark.parametrize("family", sorted(PLACEHOLDER))
def test_prompts_with_images_get_the_same_bits(seeded: Callable[[str], str], family: str) -> None:
    folder, shown = seeded(family), PLACEHOLDER[family]
    pictures = [{"image": [picture(n), picture(n + 1)]} for n in range(3)]
    prompts = [
        TextPrompt("so " * n + f"{shown} and {shown}", multi_modal_data=each)
        for n, each in enumerate(pictures)
    ]
    small: dict[str, Any] = {"block_size": 4, "num_blocks": 900}
    alone = answers(folder, prompts, alone=True, enable_prefix_caching=False, **small)
    for way in ({}, {"max_num_batched_tokens": 19}, {"times": 2}):
        assert_same_bits(answers(folder, prompts, **small | way), alone)


@pytest.mark.parametrize(
    ("name", "part", "drawn"), [("csm", "backbone", "codes"), ("pocket_tts", None, "latents")]
)
def test_codes_and_latents_get_the_same_bits(
    seeded: Callable[[str], str], name: str, part: str | None, drawn: str
) -> None:
    opening = "[0]" if name == "csm" else ""
    prompts = [TextPrompt(opening + "word " * n) for n in (3, 9, 20)]
    settings = {"part": part, "max_model_len": 128}
    alone = answers(seeded(name), prompts, alone=True, enable_prefix_caching=False, **settings)
    for way in ({}, {"max_num_batched_tokens": 9}):
        together = answers(seeded(name), prompts, **settings | way)
        assert_same_bits(together, alone)
        for one, other in zip(together, alone, strict=True):
            assert torch.equal(one.tensors[drawn], other.tensors[drawn])


@pytest.mark.parametrize("widths", [(96, 100), (16, 32)], ids=str)
def test_a_state_moves_on_by_the_same_bits_on_any_number_of_threads(
    widths: tuple[int, int],
) -> None:
    keys, values = widths
    random = torch.Generator().manual_seed(0)

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(2, 8, *shape, generator=random)

    given = rows(keys), rows(keys), rows(values), -rows().abs(), rows().sigmoid()
    states, made = rows(keys, values), []
    for number in (1, 2, 3, 48):
        with threads(number):
            moved = states.clone()
            ops = NativeLayerOps(load_kernels(), deterministic=True)
            made.append((delta_step(ops, given, moved), moved))
    for y, moved in made[1:]:
        assert torch.equal(y, made[0][0]) and torch.equal(moved, made[0][1])


def test_inputs_of_an_encoder_get_the_same_bits(bert_checkpoint: str) -> None:
    settings = {"model": bert_checkpoint, "deterministic": True, "enable_prefix_caching": False}
    engine = EncoderEngine(EngineConfig.model_validate(settings))
    prompts = [TokensPrompt(tuple(range(30, 30 + n))) for n in (5, 9, 8, 20, 13)]

    def rows(ids: Sequence[int]) -> list[Any]:
        for n in ids:
            engine.add_request(str(n), prompts[n])
        outputs: dict[str, Any] = {}
        while engine.has_unfinished_requests:
            outputs |= {output.request_id: output.tensors for output in engine.step()}
        return [outputs[str(n)] for n in ids]

    for n, together in enumerate(rows(range(5))):
        (alone,) = rows([n])
        assert together.keys() == alone.keys()
        assert all(torch.equal(together[name], alone[name]) for name in alone)


def test_sound_gets_the_same_bits(seeded: Callable[[str], str]) -> None:
    settings = {"model": seeded("qwen2_5_omni"), "part": "code2wav", "device": "cpu"}
    flow = GenerationParams(num_steps=2)
    engine = GeneratorEngine(
        GeneratorConfig.model_validate({**settings, "generation": flow, "deterministic": True})
    )

    def sounds(names: Sequence[str]) -> list[torch.Tensor]:
        for name in names:
            engine.add_request(name, CodecPrompt(random_codes(12, seed=int(name))))
        outputs: dict[str, torch.Tensor] = {}
        while engine.has_unfinished_requests:
            done = (output for output in engine.step() if output.finished)
            outputs |= {output.request_id: output.waveform.samples for output in done}
        return [outputs[name] for name in names]

    for name, together in zip("123", sounds("123"), strict=True):
        assert torch.equal(together, *sounds([name]))


def test_torchs_attention_is_refused(qwen2_checkpoint: str) -> None:
    with pytest.raises(ValueError, match="needs the C kernels"):
        LLMEngine(
            EngineConfig(model=qwen2_checkpoint, deterministic=True, attention_backend="torch")
        )

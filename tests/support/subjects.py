"""Engines of every kind, with requests that share, wait and are preempted, for disturbed runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import AutoTokenizer

from engine import (
    CodecPrompt,
    EncoderEngine,
    Engine,
    EngineConfig,
    ExplicitEncoderDecoderPrompt,
    GenerationParams,
    GeneratorConfig,
    GeneratorEngine,
    LLMEngine,
    Prompt,
    StreamWindow,
    TokensPrompt,
)
from tests.support.disturbed_run import Subject
from tests.support.request_stream import BLOCK_SIZE, Alone, Ask, alone_with, assert_same
from tests.support.thinker_asks import KINDS, PLACEHOLDERS, ThinkerAsk
from tests.support.vocoder_reference import random_codes

_NUM_BLOCKS = {"qwen2": 13, "qwen2 swapping": 12, "jamba": 6, "bart": 21}
"""Number of blocks with which two or three of four requests run at once, and one is preempted."""
SUBJECTS = (*_NUM_BLOCKS, "qwen2_5_omni thinker", "bert", "qwen2_5_omni vocoder")
_ASKS = tuple(Ask(n % 2, 14, n, 6 + n, False, n == 2, 0, None) for n in range(4))
_INPUTS = tuple(tuple(range(30, 30 + length)) for length in (5, 9, 9, 4, 12))
_VOCODER = GenerationParams(num_steps=2, window=StreamWindow(first_blocks=1, chunk_blocks=2))


class _PairAsk(Ask):
    """The same tokens for a decoder whose encoder reads inputs that others share."""

    @property
    def prompt(self) -> Prompt:
        decoder = super().prompt
        assert isinstance(decoder, TokensPrompt)
        source = TokensPrompt(_INPUTS[self.family])
        return ExplicitEncoderDecoderPrompt(source, decoder)


def subject_of(name: str, seeded: Callable[[str], str]) -> Subject:
    """Return one of :data:`SUBJECTS`; ``seeded`` returns the folder of a seeded checkpoint."""
    if name in _NUM_BLOCKS:
        return _decoder(name, seeded(name.split()[0]))
    if name == "qwen2_5_omni thinker":
        return _thinker(name, seeded("qwen2_5_omni"))
    if name == "bert":
        return _encoder(name, seeded("bert"))
    if name == "qwen2_5_omni vocoder":
        return _vocoder(name, seeded("qwen2_5_omni"))
    raise ValueError(f"unknown subject {name!r}; known are {', '.join(SUBJECTS)}")


def _decoder(name: str, checkpoint: str) -> Subject:
    config = EngineConfig(
        model=checkpoint,
        block_size=BLOCK_SIZE,
        num_blocks=_NUM_BLOCKS[name],
        max_num_seqs=3,
        max_num_batched_tokens=16,
        max_model_len=28,
        preemption="swap" if "swapping" in name else "recompute",
    )
    asks = [_PairAsk(**vars(ask)) for ask in _ASKS] if name == "bart" else _ASKS
    return _llm(name, config, asks, alone_with(checkpoint))


def _thinker(name: str, checkpoint: str) -> Subject:
    config = EngineConfig(
        model=checkpoint,
        part="thinker",
        block_size=BLOCK_SIZE,
        num_blocks=16,
        max_num_seqs=3,
        max_num_batched_tokens=16,
        max_model_len=28,
    )
    alone = alone_with(checkpoint, part="thinker", atol=2e-5)
    vocabulary = AutoTokenizer.from_pretrained(checkpoint).get_vocab()
    placeholders = tuple(vocabulary[PLACEHOLDERS[kind]] for kind in KINDS)
    asks = tuple(
        ThinkerAsk(
            **vars(ask) | {"length": 8},
            placeholders=placeholders,
            kinds=KINDS,
            shown=((2, n % 2, 0),),
        )
        for n, ask in enumerate(_ASKS)
    )
    return _llm(name, config, asks, alone)


def _llm(name: str, config: EngineConfig, asks: Sequence[Ask], alone: Alone) -> Subject:
    def add(engine: Engine[Any], prefix: str) -> None:
        for number, ask in enumerate(asks):
            engine.add_request(
                f"{prefix}{number}",
                ask.prompt,
                ask.params,
                priority=ask.priority,
                cache_salt=ask.salt,
            )

    def check(number: int, outputs: Sequence[Any]) -> None:
        last = outputs[-1]
        assert "".join(each.outputs[0].delta for each in outputs) == last.outputs[0].text
        assert_same(last, alone.answer(asks[number]), alone.atol)

    return Subject(name, partial(LLMEngine, config), add, check, len(asks))


def _encoder(name: str, checkpoint: str) -> Subject:
    config = EngineConfig(
        model=checkpoint,
        block_size=BLOCK_SIZE,
        num_blocks=8,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        max_model_len=24,
    )

    def add(engine: Engine[Any], prefix: str) -> None:
        for number, ids in enumerate(_INPUTS):
            engine.add_request(f"{prefix}{number}", TokensPrompt(ids))

    alone = EncoderEngine(config.model_copy(update={"enable_prefix_caching": False}))
    expected: list[Any] = []
    for ids in _INPUTS:
        alone.add_request("alone", TokensPrompt(ids))
        expected += alone.step()

    def check(number: int, outputs: Sequence[Any]) -> None:
        (output,) = outputs
        assert output.tensors.keys() == expected[number].tensors.keys()
        for key, tensor in expected[number].tensors.items():
            torch.testing.assert_close(output.tensors[key], tensor, atol=1e-5, rtol=0)

    return Subject(name, partial(EncoderEngine, config), add, check, len(_INPUTS))


def _vocoder(name: str, checkpoint: str) -> Subject:
    config = GeneratorConfig(
        model=checkpoint, part="code2wav", device="cpu", generation=_VOCODER, max_batch_size=2
    )
    codes = [random_codes(length) for length in (5, 17, 5)]

    def add(engine: Engine[Any], prefix: str) -> None:
        for number, each in enumerate(codes):
            whole = number % 2 == 0
            first = each if whole else each[:13]
            engine.add_request(f"{prefix}{number}", CodecPrompt(first, is_last=whole))
            if not whole:
                engine.extend_request(f"{prefix}{number}", CodecPrompt(each[13:]))

    alone = GeneratorEngine(config.model_copy(update={"max_batch_size": 1}))
    add(alone, "alone")
    expected: dict[str, Any] = {}
    while alone.has_unfinished_requests:
        expected |= {output.request_id: output for output in alone.step() if output.finished}

    def check(number: int, outputs: Sequence[Any]) -> None:
        waveform = outputs[-1].waveform.samples
        assert torch.equal(torch.cat([output.delta.samples for output in outputs]), waveform)
        wanted = expected[f"alone{number}"].waveform.samples
        torch.testing.assert_close(waveform, wanted, atol=1e-5, rtol=0)

    return Subject(name, partial(GeneratorEngine, config), add, check, len(codes))

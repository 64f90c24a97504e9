"""Outputs of encoders, towers and vocoders that are not finite: not cached, and no one else's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import (
    CodecPrompt,
    EncoderEngine,
    EncoderOutput,
    EngineConfig,
    GenerationParams,
    GeneratorConfig,
    GeneratorEngine,
    GeneratorOutput,
    LLMEngine,
    RequestOutput,
    SamplingParams,
    StreamWindow,
    TokensPrompt,
)
from engine.interface.engine import NewRequest
from tests.support.pictures import picture
from tests.support.vocoder_reference import random_codes

IMAGE = 8


def run_encoder(
    engine: EncoderEngine, prompts: dict[str, TokensPrompt]
) -> dict[str, EncoderOutput]:
    for name, prompt in prompts.items():
        engine.add_request(name, prompt)
    done: dict[str, EncoderOutput] = {}
    while engine.has_unfinished_requests:
        done |= {output.request_id: output for output in engine.step()}
        engine.check_integrity()
    return done


@pytest.mark.parametrize("names", [None, ("pooled",)], ids=["all", "pooled alone"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_an_input_whose_rows_are_not_finite_fails_alone_and_is_not_cached(
    bert_checkpoint: str,
    names: tuple[str, ...] | None,
    number: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = EncoderEngine(EngineConfig(model=bert_checkpoint, block_size=4), output_names=names)
    prompts = {
        name: TokensPrompt(tuple(range(10 * place + 10, 10 * place + 16)))
        for place, name in enumerate(("a", "ill", "b"))
    }
    expected = run_encoder(engine, prompts)
    engine.reset_prefix_cache()
    plain = engine._model.forward
    batches: list[int] = []

    def spoilt(batch: Sequence[Tensor]) -> dict[str, Tensor]:
        batches.append(len(batch))
        rows = {name: tensor.clone() for name, tensor in plain(batch).items()}
        start = 0
        for entry in batch:
            if int(entry[0]) == 20:
                rows["hidden_states"][start + len(entry) - 1, 2] = number
            start += len(entry)
        return rows

    with monkeypatch.context() as patch:
        patch.setattr(engine._model, "forward", spoilt)
        done = run_encoder(engine, prompts)
    assert batches == [3], "the three were meant to run together"
    ill = done.pop("ill")
    assert ill.error is not None and "hidden_states are NaN or infinite" in ill.error
    assert not ill.tensors
    for name, output in done.items():
        assert output.error is None
        for key, tensor in expected[name].tensors.items():
            torch.testing.assert_close(output.tensors[key], tensor)
    again = run_encoder(engine, prompts)
    cached = {name: output.num_cached_tokens for name, output in again.items()}
    assert cached == {"a": 6, "ill": 0, "b": 6}
    for name, output in again.items():
        for key, tensor in expected[name].tensors.items():
            torch.testing.assert_close(output.tensors[key], tensor)


def test_a_token_whose_embedding_is_nan_reaches_no_neighbour_of_a_padded_batch(
    bert_checkpoint: str,
) -> None:
    engine = EncoderEngine(EngineConfig(model=bert_checkpoint, block_size=4))
    prompts = {
        "a": TokensPrompt(tuple(range(10, 14))),
        "ill": TokensPrompt((20, 21, 700, 23, 24)),
        "b": TokensPrompt(tuple(range(30, 36))),
    }
    expected = run_encoder(engine, prompts)
    engine.reset_prefix_cache()
    module: Any = engine._model._module
    module.get_input_embeddings().weight.data[700] = torch.nan
    done = run_encoder(engine, prompts)
    assert done["ill"].error is not None and "NaN or infinite" in done["ill"].error
    for name in ("a", "b"):
        for key, tensor in expected[name].tensors.items():
            torch.testing.assert_close(done[name].tensors[key], tensor)


def test_a_pooled_row_that_is_not_finite_fails_a_hit_too(
    bert_checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = EncoderEngine(EngineConfig(model=bert_checkpoint, block_size=4))
    prompts = {"a": TokensPrompt((10, 11, 12))}
    expected = run_encoder(engine, prompts)["a"]
    pooler: Any = engine._model.pooler
    with monkeypatch.context() as patch:
        patch.setattr(pooler, "forward", lambda rows: torch.full_like(rows[:, 0], torch.nan))
        ill = run_encoder(engine, prompts)["a"]
    assert ill.error is not None and "pooled are NaN or infinite" in ill.error
    again = run_encoder(engine, prompts)["a"]
    assert again.num_cached_tokens == 3
    torch.testing.assert_close(again.tensors["pooled"], expected.tensors["pooled"])


@pytest.mark.parametrize("is_lasting", [True, False], ids=["always", "once"])
def test_an_image_whose_rows_are_nan_is_not_cached_and_fails_nobody_else(
    seeded: Callable[[str], str], is_lasting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LLMEngine(
        EngineConfig(
            model=seeded("qwen2_5_omni"),
            part="thinker",
            block_size=4,
            num_blocks=64,
            max_num_seqs=4,
            max_model_len=60,
        )
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    prompts = {
        name: TokensPrompt((30, 31, IMAGE, 32, 33), {"image": [picture(number)]})
        for number, name in enumerate(("a", "ill", "b"))
    }
    expected = {
        name: engine.generate(prompt, greedy)[0].outputs[0] for name, prompt in prompts.items()
    }
    engine.reset_prefix_cache()
    model: Any = engine._runner._model
    encode = model.encode_multimodal
    new = NewRequest("probe", prompts["ill"])
    (request,) = engine._inputs.process(new)
    mark = request.multimodal_inputs[0].content_hash
    spoilings: list[bytes] = []

    def spoilt(items: Sequence[Any]) -> list[Tensor]:
        rows = [each.clone() for each in encode(items)]
        for item, each in zip(items, rows, strict=True):
            if item.content_hash == mark and (is_lasting or not spoilings):
                spoilings.append(mark)
                # Towers may run items as one sequence, in which NaN spreads.
                for other in rows:
                    other[-1, 0] = torch.nan
                each[0] = torch.nan
        return rows

    with monkeypatch.context() as patch:
        patch.setattr(model, "encode_multimodal", spoilt)
        for name, prompt in prompts.items():
            engine.add_request(name, prompt, greedy)
        done: dict[str, RequestOutput] = {}
        while engine.has_unfinished_requests:
            done |= {output.request_id: output for output in engine.step() if output.finished}
            engine.check_integrity()
    assert spoilings
    if is_lasting:
        error = done.pop("ill").error
        assert error is not None and "the tower gave rows of image that are NaN" in error
    for name, output in done.items():
        assert output.error is None
        assert output.outputs[0].token_ids == expected[name].token_ids
    healed = engine.generate(prompts["ill"], greedy)[0]
    assert healed.outputs[0].token_ids == expected["ill"].token_ids


def test_a_waveform_that_is_not_finite_fails_its_utterance_alone(
    seeded: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = GenerationParams(num_steps=2, window=StreamWindow(first_blocks=2, chunk_blocks=2))
    engine = GeneratorEngine(
        GeneratorConfig(
            model=seeded("qwen2_5_omni"), part="code2wav", device="cpu", generation=params
        )
    )
    codes = {name: random_codes(9, seed) for seed, name in enumerate(("a", "ill", "b"))}

    def run() -> dict[str, GeneratorOutput]:
        for name, each in codes.items():
            engine.add_request(name, CodecPrompt(tuple(each)))
        done: dict[str, GeneratorOutput] = {}
        while engine.has_unfinished_requests:
            done |= {output.request_id: output for output in engine.step() if output.finished}
            engine.check_integrity()
        return done

    expected = run()
    model: Any = engine._model
    generate = model.generate

    def spoilt(chunks: Sequence[Any], params: Any) -> tuple[Tensor, Sequence[Any]]:
        samples, states = generate(chunks, params)
        for row, chunk in zip(samples, chunks, strict=True):
            if chunk.codes.tolist() == list(codes["ill"]):
                row[-1] = torch.nan
        return samples, states

    with monkeypatch.context() as patch:
        patch.setattr(model, "generate", spoilt)
        done = run()
    ill = done.pop("ill")
    assert ill.error is not None and "not finite" in ill.error and ill.waveform is None
    for name, output in done.items():
        assert output.waveform is not None and expected[name].waveform is not None
        torch.testing.assert_close(
            output.waveform.samples, expected[name].waveform.samples, atol=1e-6, rtol=0
        )

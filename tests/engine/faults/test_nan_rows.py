"""A request fails alone if its rows, or those of its tower or vocoder, are not finite."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import (
    CodecPrompt,
    EncoderEngine,
    EncoderOutput,
    EngineConfig,
    ExplicitEncoderDecoderPrompt,
    FinishReason,
    GenerationParams,
    GeneratorConfig,
    GeneratorEngine,
    GeneratorOutput,
    LLMEngine,
    Prompt,
    RequestOutput,
    SamplingParams,
    StreamWindow,
    TokensPrompt,
)
from engine.interface.engine import NewRequest
from tests.support.idle_engine import finish
from tests.support.native_kernels import needs_kernels
from tests.support.pictures import picture
from tests.support.poisoned_tokens import (
    POISON,
    poison_embeddings,
    spoil_attention_once,
    spoil_state_once,
)
from tests.support.request_stream import assert_same
from tests.support.vocoder_reference import random_codes

BLOCK_SIZE = 4
ATOL = 2e-5
SOURCE = tuple(range(100, 111))


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=2)


def prompt_of(ids: tuple[int, ...], has_encoder: bool) -> Prompt:
    if not has_encoder:
        return TokensPrompt(ids)
    return ExplicitEncoderDecoderPrompt(TokensPrompt(SOURCE), TokensPrompt(ids))


@dataclass(frozen=True)
class Rig:
    """An engine, and uncached answers to single prompts of ids and ``max_tokens``."""

    engine: LLMEngine
    alone: Callable[[tuple[int, ...], int], RequestOutput]
    has_encoder: bool

    def prompt(self, ids: tuple[int, ...]) -> Prompt:
        return prompt_of(ids, self.has_encoder)

    def run(self, asks: dict[str, tuple[tuple[int, ...], int]]) -> dict[str, RequestOutput]:
        for name, (ids, max_tokens) in asks.items():
            self.engine.add_request(name, self.prompt(ids), greedy(max_tokens))
        return finish(self.engine)

    def one(self, ids: tuple[int, ...], max_tokens: int = 3) -> RequestOutput:
        return self.run({"one": (ids, max_tokens)})["one"]


def engine_of(checkpoint: str, **settings: Any) -> LLMEngine:
    usual = {"block_size": BLOCK_SIZE, "num_blocks": 200, "max_num_seqs": 8, "max_model_len": 128}
    names = settings.pop("output_names", None)
    return LLMEngine(EngineConfig(model=checkpoint, **usual | settings), output_names=names)


RIGS = [
    ("qwen2", "torch"),
    pytest.param(("qwen2", "native"), marks=needs_kernels),
    ("gemma2", "torch"),
    pytest.param(("gemma2", "native"), marks=needs_kernels),
    ("jamba", "auto"),
    ("bamba", "auto"),
    ("bart", "torch"),
    pytest.param(("bart", "native"), marks=needs_kernels),
]


@pytest.fixture(scope="module", params=RIGS, ids="-".join)
def module_rig(request: pytest.FixtureRequest, seeded: Callable[[str], str]) -> Rig:
    name, backend = request.param
    # Jamba and Bamba have one page per state, in which many tokens fit.
    settings = {"attention_backend": backend, "max_num_batched_tokens": 128}
    uncached = engine_of(seeded(name), **settings, enable_prefix_caching=False, max_num_seqs=1)
    has_encoder = name == "bart"

    @cache  # many faults use the same requests
    def alone(ids: tuple[int, ...], max_tokens: int) -> RequestOutput:
        return uncached.generate(prompt_of(ids, has_encoder), greedy(max_tokens))[0]

    return Rig(engine_of(seeded(name), **settings), alone, has_encoder)


@pytest.fixture
def rig(module_rig: Rig) -> Rig:
    module_rig.engine.reset_prefix_cache()
    return module_rig


def assert_failed(output: RequestOutput) -> None:
    assert output.error is not None and "NaN or infinite" in output.error, output.error
    assert all(each.finish_reason is FinishReason.ERROR for each in output.outputs)
    assert all(not each.tensors for each in output.outputs)


def ids_of(seed: int, length: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(10, 700, (length,), generator=generator).tolist())


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_nan_late_in_a_prompt_leaves_the_prefix_to_others(
    rig: Rig, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt is computed in one step: its first blocks are full before the NaN."""
    prefix = ids_of(1, 70)
    with monkeypatch.context() as patch:
        poison_embeddings(rig.engine, patch)
        done = rig.run({"ill": ((*prefix, POISON, 5), max_tokens), "other": (ids_of(2, 9), 3)})
        assert_failed(done["ill"])
        assert_same(done["other"], rig.alone(ids_of(2, 9), 3), ATOL)
        well = rig.one((*prefix, 6))
        assert_same(well, rig.alone((*prefix, 6), 3), ATOL)
        assert_failed(rig.one((*prefix, POISON, 5), max_tokens))
    # Without the poisoned embedding, the prompt runs as if it had never failed.
    healed = rig.one((*prefix, POISON, 5))
    assert_same(healed, rig.alone((*prefix, POISON, 5), 3), ATOL)
    assert healed.num_cached_tokens <= 70


def test_in_random_batches_only_poisoned_requests_fail(
    module_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, draw = module_rig, random.Random(16)
    scheduler: Any = rig.engine._scheduler
    poison_embeddings(rig.engine, monkeypatch)
    families = [ids_of(family, 60) for family in range(2)]
    for max_num_batched_tokens in (16, 128, 16, 128):
        monkeypatch.setattr(scheduler, "_max_num_batched_tokens", max_num_batched_tokens)
        asks: dict[str, tuple[tuple[int, ...], int]] = {}
        for number in range(6):
            prompt = list(draw.choice(families)[: draw.randint(2, 60)])
            if draw.random() < 0.4:
                prompt.insert(draw.randint(len(prompt) // 2, len(prompt)), POISON)
            asks[f"r{number}"] = tuple(prompt), draw.randint(0, 4)
        if draw.random() < 0.5:
            rig.engine.reset_prefix_cache()
        for name, output in rig.run(asks).items():
            ids, max_tokens = asks[name]
            if POISON in ids:
                assert_failed(output)
            else:
                assert_same(output, rig.alone(ids, max_tokens), ATOL)


FAULTS = [
    *(("key", 0, float("nan")), ("value", 7, float("nan")), ("value", -1, float("nan"))),
    # An infinite key need not show in a row: it may have no weight.
    *(("key", -1, float("inf")), ("key", 7, float("-inf"))),
]


@pytest.mark.parametrize(("part", "place", "number"), FAULTS)
def test_a_fault_of_one_step_does_not_outlive_its_request(
    rig: Rig, part: str, place: int, number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        happened = spoil_attention_once(rig.engine, patch, part, place, number)
        assert_failed(rig.one(ids_of(3, 70)))
        assert happened
    assert_as_if_never_tried(rig, ids_of(3, 70))


@pytest.mark.parametrize(
    "module_rig", [("jamba", "auto"), ("bamba", "auto")], indirect=True, ids="-".join
)
def test_a_nan_state_does_not_outlive_its_request(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        happened = spoil_state_once(rig.engine, patch, place=1)
        done = rig.run({f"r{seed}": (ids_of(seed, 30 + seed), 4) for seed in range(3)})
        assert happened
    assert sum(output.error is not None for output in done.values()) == 1
    for seed in range(3):
        if done[f"r{seed}"].error is None:
            assert_same(done[f"r{seed}"], rig.alone(ids_of(seed, 30 + seed), 4), ATOL)
        else:
            assert_failed(done[f"r{seed}"])
            assert_as_if_never_tried(rig, ids_of(seed, 30 + seed))


def assert_as_if_never_tried(rig: Rig, ids: tuple[int, ...]) -> None:
    again = rig.one(ids)
    assert_same(again, rig.alone(ids, 3), ATOL)
    assert again.num_cached_tokens == 0


def test_a_fault_while_it_decodes_keeps_what_came_before(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt's blocks were found finite in an earlier step, and can still be hit."""
    ids = ids_of(4, 40)
    rig.engine.add_request("r", rig.prompt(ids), greedy(20))
    for _ in range(3):
        rig.engine.step()
    with monkeypatch.context() as patch:
        model: Any = rig.engine._runner._model
        forward = model.forward

        def spoilt(*inputs: Any) -> dict[str, Tensor]:
            tensors: dict[str, Tensor] = forward(*inputs)
            tensors["hidden_states"][0, 3] = -torch.inf
            return tensors

        patch.setattr(model, "forward", spoilt)
        (output,) = rig.engine.step()
    assert_failed(output)
    rig.engine.check_integrity()
    again = rig.one(ids, 20)
    assert_same(again, rig.alone(ids, 20), ATOL)
    assert again.num_cached_tokens


@pytest.fixture
def qwen2(qwen2_checkpoint: str) -> LLMEngine:
    return engine_of(qwen2_checkpoint)


@pytest.mark.parametrize("names", [None, ("hidden_states",)], ids=["mirrored", "not mirrored"])
def test_only_a_mirrored_output_that_is_not_finite_is_an_error(
    qwen2_checkpoint: str, names: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(qwen2_checkpoint, output_names=names)
    model: Any = engine._runner._model
    forward = model.forward

    def with_k(embeds: Tensor, *inputs: Any) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = forward(embeds, *inputs)
        k = tensors["hidden_states"][:, :3].clone()
        k[-1, 1] = torch.nan
        return tensors | {"k": k, "count": torch.ones(len(embeds), dtype=torch.int64)}

    monkeypatch.setattr(model, "forward", with_k)
    output = engine.generate(TokensPrompt(ids_of(5, 9)), greedy(0))[0]
    if names is None:
        assert_failed(output)
        assert output.error is not None and "the model's k are" in output.error
    else:
        assert output.error is None
    engine.check_integrity()


def test_every_completion_of_a_poisoned_prompt_ends(
    qwen2: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_embeddings(qwen2, monkeypatch)
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=4)
    ids = (*ids_of(6, 8), POISON)
    output = qwen2.generate(TokensPrompt(ids), params)[0]
    assert len(output.outputs) == 3
    assert_failed(output)
    qwen2.check_integrity()
    kv = qwen2.stats().kv
    assert kv is not None and kv.held == 0 and kv.cached == 0


def test_an_encoder_that_gives_nan_fails_its_request_alone_and_is_not_kept(
    seeded: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(seeded("bart"))
    prompts = {
        name: ExplicitEncoderDecoderPrompt(TokensPrompt(source), TokensPrompt((2, 20, 21)))
        for name, source in {"a": SOURCE, "ill": (*SOURCE, POISON), "b": SOURCE[:5]}.items()
    }
    expected = {name: engine.generate(prompt, greedy(4))[0] for name, prompt in prompts.items()}
    engine.reset_prefix_cache()
    with monkeypatch.context() as patch:
        poison_embeddings(engine, patch)
        for name, prompt in prompts.items():
            engine.add_request(name, prompt, greedy(4))
        done = finish(engine)
    assert_failed(done.pop("ill"))
    for name, output in done.items():
        assert_same(output, expected[name], ATOL)
    healed = engine.generate(prompts["ill"], greedy(4))[0]
    assert_same(healed, expected["ill"], ATOL)


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
def test_an_image_whose_rows_are_nan_is_not_cached_and_fails_alone(
    seeded: Callable[[str], str], is_lasting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(seeded("qwen2_5_omni"), part="thinker")
    prompts = {
        name: TokensPrompt((30, 31, IMAGE, 32, 33), {"image": [picture(number)]})
        for number, name in enumerate(("a", "ill", "b"))
    }
    expected = {
        name: engine.generate(prompt, greedy(5))[0].outputs[0] for name, prompt in prompts.items()
    }
    engine.reset_prefix_cache()
    model: Any = engine._runner._model
    encode = model.encode_multimodal
    (request,) = engine._inputs.process(NewRequest("probe", prompts["ill"]))
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
            engine.add_request(name, prompt, greedy(5))
        done = finish(engine)
    assert spoilings
    if is_lasting:
        error = done.pop("ill").error
        assert error is not None and "the tower gave rows of image that are NaN" in error
    for name, output in done.items():
        assert output.error is None
        assert output.outputs[0].token_ids == expected[name].token_ids
    healed = engine.generate(prompts["ill"], greedy(5))[0]
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
        return finish(engine)

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

"""A request whose rows are not finite fails alone, and nothing of it is left for others to hit."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import (
    EngineConfig,
    ExplicitEncoderDecoderPrompt,
    FinishReason,
    LLMEngine,
    Prompt,
    RequestOutput,
    SamplingParams,
    TokensPrompt,
)
from tests.support.native_kernels import needs_kernels
from tests.support.poisoned_tokens import (
    POISON,
    poison_embeddings,
    spoil_attention_once,
    spoil_state_once,
)
from tests.support.request_stream import assert_same

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
    """An engine, and what one without cache says to ids alone, for so many tokens."""

    engine: LLMEngine
    alone: Callable[[tuple[int, ...], int], RequestOutput]
    has_encoder: bool

    def prompt(self, ids: tuple[int, ...]) -> Prompt:
        return prompt_of(ids, self.has_encoder)

    def run(self, asks: dict[str, tuple[tuple[int, ...], int]]) -> dict[str, RequestOutput]:
        for name, (ids, max_tokens) in asks.items():
            self.engine.add_request(name, self.prompt(ids), greedy(max_tokens))
        done: dict[str, RequestOutput] = {}
        while self.engine.has_unfinished_requests:
            done |= {output.request_id: output for output in self.engine.step() if output.finished}
            self.engine.check_integrity()
        return done

    def one(self, ids: tuple[int, ...], max_tokens: int = 3) -> RequestOutput:
        return self.run({"one": (ids, max_tokens)})["one"]


def engine_of(checkpoint: str, **settings: Any) -> LLMEngine:
    usual = {"block_size": BLOCK_SIZE, "num_blocks": 200, "max_num_seqs": 8, "max_model_len": 128}
    names = settings.pop("output_names", None)
    return LLMEngine(EngineConfig(model=checkpoint, **usual | settings), output_names=names)


RIGS = [
    ("qwen2", "reference"),
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
    # Jamba and Bamba have one page for a state, in which many tokens fit.
    settings = {"attention_backend": backend, "max_num_batched_tokens": 128}
    uncached = engine_of(seeded(name), **settings, enable_prefix_caching=False, max_num_seqs=1)
    has_encoder = name == "bart"

    @cache  # many faults hurt the same requests
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
    """The prompt is computed in one step: its first blocks are full before the NaN comes."""
    prefix = ids_of(1, 70)
    with monkeypatch.context() as patch:
        poison_embeddings(rig.engine, patch)
        done = rig.run(
            {
                "ill": ((*prefix, POISON, 5), max_tokens),
                "other": (ids_of(2, 9), 3),
            }
        )
        assert_failed(done["ill"])
        assert_same(done["other"], rig.alone(ids_of(2, 9), 3), ATOL)
        well = rig.one((*prefix, 6))
        assert_same(well, rig.alone((*prefix, 6), 3), ATOL)
        assert_failed(rig.one((*prefix, POISON, 5), max_tokens))
    # It was the token's fault, and is over: the whole prompt is as if it had never been tried.
    healed = rig.one((*prefix, POISON, 5))
    assert_same(healed, rig.alone((*prefix, POISON, 5), 3), ATOL)
    assert healed.num_cached_tokens <= 70


@pytest.mark.parametrize("max_num_batched_tokens", [16, 128])
def test_random_batches_lose_nobody_but_who_is_poisoned(
    module_rig: Rig, max_num_batched_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, draw = module_rig, random.Random(max_num_batched_tokens)
    scheduler: Any = rig.engine._scheduler
    monkeypatch.setattr(scheduler, "_max_num_batched_tokens", max_num_batched_tokens)
    poison_embeddings(rig.engine, monkeypatch)
    families = [ids_of(family, 60) for family in range(2)]
    for _ in range(4):
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
    *((part, place, float("nan")) for part in ("key", "value") for place in (0, 7, -1)),
    # No key that is infinite has to show in a row: it may have no weight.
    *(("key", 7, number) for number in (float("inf"), float("-inf"))),
]


@pytest.mark.parametrize(("part", "place", "number"), FAULTS)
def test_a_fault_of_one_step_is_forgotten_with_the_request_that_met_it(
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
def test_a_state_that_is_nan_is_forgotten_with_its_request(
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
    """The prompt's blocks were found finite in their own step, and can still be hit."""
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
def test_a_mirrored_output_that_is_not_finite_is_an_error_and_another_is_nobodys_matter(
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
        done: dict[str, RequestOutput] = {}
        while engine.has_unfinished_requests:
            done |= {output.request_id: output for output in engine.step() if output.finished}
            engine.check_integrity()
    assert_failed(done.pop("ill"))
    for name, output in done.items():
        assert_same(output, expected[name], ATOL)
    healed = engine.generate(prompts["ill"], greedy(4))[0]
    assert_same(healed, expected["ill"], ATOL)

"""The engine says what transformers says: token ids and hidden states, for every family."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import EmbedsPrompt, EngineConfig, LLMEngine, SamplingParams, TokensPrompt
from omni.seeded.language_models import build_causal_lm
from tests.support.greedy_reference import GreedyAnswer, GreedyReference, assert_greedy
from tests.support.native_kernels import needs_kernels

FAMILIES = ["llama", "qwen2", "qwen3", "mistral"]
PROMPT_LENGTHS = (1, 5, 17, 40, 16, 33)
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)

Family = Callable[[str, bool], tuple[str, list[list[int]], list[GreedyAnswer]]]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Checkpoint, prompts and reference answers of a family; built once."""

    @cache
    def build(architecture: str, tied: bool) -> tuple[str, list[list[int]], list[GreedyAnswer]]:
        folder: Path = tmp_path_factory.mktemp("family") / architecture
        checkpoint = str(build_causal_lm(folder, architecture, tied=tied, seed=0))
        generator = torch.Generator().manual_seed(11)
        prompts = [
            torch.randint(10, 700, (length,), generator=generator).tolist()
            for length in PROMPT_LENGTHS
        ]
        reference = GreedyReference(checkpoint)
        return checkpoint, prompts, [reference.from_ids(p, NUM_TOKENS) for p in prompts]

    return build


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("budget", [8, 64, 4096])
def test_tokens_and_hidden_states_equal_transformers(
    family: Family, architecture: str, tied: bool, block_size: int, budget: int
) -> None:
    checkpoint, prompts, answers = family(architecture, tied)
    engine = LLMEngine(
        EngineConfig(
            model=checkpoint,
            block_size=block_size,
            max_num_batched_tokens=budget,
            max_num_seqs=4,
            max_model_len=64,
        )
    )
    outputs = engine.generate([TokensPrompt(tuple(p)) for p in prompts], GREEDY)
    for output, answer in zip(outputs, answers, strict=True):
        completion = output.outputs[0]
        if assert_greedy(answer, completion.token_ids):
            torch.testing.assert_close(
                completion.tensors["hidden_states"], answer.hidden_states, atol=1e-4, rtol=0
            )
    engine.check_integrity()


def test_the_references_depend_on_their_prompts(family: Family) -> None:
    """Else the parity above would prove nothing."""
    for architecture in FAMILIES:
        _, _, answers = family(architecture, True)
        assert len({tuple(answer.token_ids) for answer in answers}) == len(answers)
        assert len({token for answer in answers for token in answer.token_ids}) > 20


@pytest.mark.parametrize(
    "backend", ["reference", "torch", pytest.param("native", marks=needs_kernels)]
)
def test_backends_agree(family: Family, backend: str) -> None:
    checkpoint, prompts, answers = family("qwen3", True)
    engine = LLMEngine(
        EngineConfig.model_validate(
            {"model": checkpoint, "attention_backend": backend, "block_size": 4}
        )
    )
    for output, answer in zip(
        engine.generate([TokensPrompt(tuple(p)) for p in prompts], GREEDY), answers, strict=True
    ):
        assert_greedy(answer, output.outputs[0].token_ids)


@pytest.mark.parametrize("budget", [8, 64])
def test_embeddings_and_token_ids_share_a_batch(family: Family, budget: int) -> None:
    """One batch mixes both kinds; the embeddings are not the table's, so ids could not do it."""
    checkpoint, prompts, answers = family("llama", False)
    reference = GreedyReference(checkpoint)
    generator = torch.Generator().manual_seed(5)
    embeds = [torch.randn(n, 64, generator=generator) for n in (1, 30, 9)]
    expected = [reference.from_embeds(e, NUM_TOKENS) for e in embeds]
    engine = LLMEngine(
        EngineConfig(model=checkpoint, block_size=4, max_num_batched_tokens=budget, max_num_seqs=8)
    )
    mixed = [
        TokensPrompt(tuple(prompts[1])),
        EmbedsPrompt(embeds[0]),
        EmbedsPrompt(embeds[1]),
        TokensPrompt(tuple(prompts[3])),
        EmbedsPrompt(embeds[2]),
    ]
    wanted = [answers[1], expected[0], expected[1], answers[3], expected[2]]
    for repetition in range(2):
        for output, answer in zip(engine.generate(mixed, GREEDY), wanted, strict=True):
            completion = output.outputs[0]
            assert_greedy(answer, completion.token_ids)
            torch.testing.assert_close(
                completion.tensors["hidden_states"], answer.hidden_states, atol=1e-4, rtol=0
            )
            if repetition:
                assert output.num_cached_tokens == (output.num_prompt_tokens - 1) // 4 * 4


def test_biased_and_penalised_tokens_of_one_batch_are_those_of_transformers(
    family: Family,
) -> None:
    checkpoint, prompts, plain = family("qwen2", True)
    reference = GreedyReference(checkpoint)
    choices = [(0.0, 1.0), (2.0, 1.0), (0.5, 1.5), (0.0, 1.3), (100.0, 0.8), (5.0, 2.0)]
    params, answers = [], []
    for prompt, unbiased, (strength, penalty) in zip(prompts, plain, choices, strict=True):
        # On what was said, up and down: so the penalty meets it.
        ids = unbiased.token_ids
        bias = {token_id: strength * (-1) ** place for place, token_id in enumerate(ids)}
        changes = {"repetition_penalty": penalty, "logit_bias": bias if strength else {}}
        params.append(SamplingParams(**GREEDY.model_dump() | changes))
        options: dict[str, Any] = {"repetition_penalty": penalty}
        if strength:
            options["sequence_bias"] = {(token_id,): value for token_id, value in bias.items()}
        answers.append(reference.from_ids(prompt, NUM_TOKENS, **options))
    assert [each.token_ids for each in answers[1:]] != [each.token_ids for each in plain[1:]]
    engine = LLMEngine(EngineConfig(model=checkpoint, max_num_seqs=6, max_model_len=64))
    outputs = engine.generate([TokensPrompt(tuple(p)) for p in prompts], params)
    for output, answer in zip(outputs, answers, strict=True):
        assert_greedy(answer, output.outputs[0].token_ids)

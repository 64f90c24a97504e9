"""The engine says what transformers says, for families whose layers keep different things.

Prompts of up to six windows, chunked, in mixed batches: token ids and hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from engine import EngineConfig, LLMEngine, SamplingParams, TokensPrompt
from tests.support.greedy_reference import GreedyAnswer, GreedyReference, assert_greedy
from tests.support.native_kernels import needs_kernels

FAMILIES = (
    "mistral-sliding",
    "qwen2-sliding",
    "ministral",
    "gemma2",
    "gemma3",
    "jamba",
    "bamba",
)
PROMPT_LENGTHS = (1, 15, 16, 17, 50, 95)
NUM_TOKENS = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)

Family = Callable[[str], tuple[str, list[list[int]], list[GreedyAnswer]]]


@pytest.fixture(scope="module")
def family(seeded: Callable[[str], str]) -> Family:
    """Checkpoint, prompts and reference answers of a family; computed once."""

    @cache
    def build(name: str) -> tuple[str, list[list[int]], list[GreedyAnswer]]:
        generator = torch.Generator().manual_seed(12)
        prompts = [
            torch.randint(10, 700, (length,), generator=generator).tolist()
            for length in PROMPT_LENGTHS
        ]
        reference = GreedyReference(seeded(name))
        return seeded(name), prompts, [reference.from_ids(p, NUM_TOKENS) for p in prompts]

    return build


def engine_of(checkpoint: str, **settings: object) -> LLMEngine:
    return LLMEngine(
        EngineConfig.model_validate(
            {"model": checkpoint, "max_num_seqs": 4, "max_model_len": 128} | settings
        )
    )


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("budget", [9, 64, 4096])
def test_tokens_and_hidden_states_equal_transformers(
    family: Family, name: str, block_size: int, budget: int
) -> None:
    checkpoint, prompts, answers = family(name)
    engine = engine_of(
        checkpoint, block_size=block_size, max_num_batched_tokens=budget, num_blocks=400
    )
    for _ in range(2):  # the second time from the cache
        outputs = engine.generate([TokensPrompt(tuple(p)) for p in prompts], GREEDY)
        for output, answer in zip(outputs, answers, strict=True):
            completion = output.outputs[0]
            if assert_greedy(answer, completion.token_ids):
                torch.testing.assert_close(
                    completion.tensors["hidden_states"], answer.hidden_states, atol=1e-4, rtol=0
                )
        engine.check_integrity()
    assert outputs[-1].num_cached_tokens == 94 // block_size * block_size


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "backend", ["reference", "torch", pytest.param("native", marks=needs_kernels)]
)
def test_backends_agree(family: Family, name: str, backend: str) -> None:
    checkpoint, prompts, answers = family(name)
    engine = engine_of(
        checkpoint, block_size=4, max_num_batched_tokens=48, attention_backend=backend
    )
    outputs = engine.generate([TokensPrompt(tuple(p)) for p in prompts], GREEDY)
    for output, answer in zip(outputs, answers, strict=True):
        assert_greedy(answer, output.outputs[0].token_ids)


def test_the_references_depend_on_their_prompts(family: Family) -> None:
    """Else the parity above would prove nothing."""
    for name in FAMILIES:
        _, _, answers = family(name)
        assert len({tuple(answer.token_ids) for answer in answers}) == len(answers)
        assert len({token for answer in answers for token in answer.token_ids}) > 20

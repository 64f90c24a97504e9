"""The encoder stage selects the engine; both engines equal transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel

from engine import EncoderEngine, EngineConfig, LLMEngine, TokensPrompt
from stages import EncoderStage, StageOutput, StageRequest
from tests.support.settled_stages import run_stage

PROMPT = TokensPrompt(tuple(range(30, 43)))
LONGER = TokensPrompt((*range(30, 43), 90, 91))


@pytest.fixture(scope="module")
def make(seeded: Callable[[str], str]) -> Callable[..., EncoderStage]:
    def build(model: str, **options: Any) -> EncoderStage:
        config = EngineConfig(
            model=seeded(model), num_blocks=32, block_size=4, max_model_len=64, max_num_seqs=4
        )
        return EncoderStage("s", config, **options)

    return build


def run(stage: EncoderStage, *prompts: Any) -> list[StageOutput]:
    requests = [StageRequest(str(index), prompt) for index, prompt in enumerate(prompts)]
    last = run_stage(stage, *requests)
    return [last[request.request_id] for request in requests]


def reference(stage: EncoderStage, prompt: TokensPrompt) -> Tensor:
    model = AutoModel.from_pretrained(stage.engine.config.model, dtype=torch.float32).eval()
    with torch.no_grad():
        output: Tensor = model(torch.tensor([prompt.prompt_token_ids])).last_hidden_state[0]
    return output


@pytest.mark.parametrize(
    ("model", "engine", "longer_hit", "again_hit"),
    [
        ("bert", EncoderEngine, 0, 13),
        # The longer prompt also copies a partial block; a repeated prompt must run its last token.
        ("qwen2", LLMEngine, 13, 12),
        ("qwen2-headless", LLMEngine, 13, 12),
    ],
)
def test_rows_equal_transformers_and_hits_are_by_prefix_or_by_whole_input(
    make: Callable[..., EncoderStage], model: str, engine: type, longer_hit: int, again_hit: int
) -> None:
    stage = make(model)
    assert isinstance(stage.engine, engine)
    expected = [reference(stage, prompt) for prompt in (PROMPT, LONGER)]
    for _ in range(2):
        for rows, output in zip(expected, run(stage, PROMPT, LONGER), strict=True):
            torch.testing.assert_close(output.tensors["hidden_states"], rows, atol=1e-4, rtol=0)
            assert output.tensors["pooled"].shape == (stage.hidden_size,)
            assert (output.stage, output.finished, output.error) == ("s", True, None)
            assert output.text is None
    stage.reset_prefix_cache()
    hits = [run(stage, prompt)[0].num_cached_tokens for prompt in (PROMPT, LONGER, PROMPT)]
    assert hits == [0, longer_hit, again_hit]


@pytest.mark.parametrize(
    ("model", "pooling", "pooled"),
    [
        ("qwen2", "auto", lambda rows: rows[-1]),
        ("qwen2", "last", lambda rows: rows[-1]),
        ("qwen2", "mean", lambda rows: rows.mean(0)),
        ("qwen2", "cls", lambda rows: rows[0]),
        ("bert", "mean", lambda rows: rows.mean(0)),
        ("bert", "cls", lambda rows: rows[0]),
        ("bert", "last", lambda rows: rows[-1]),
    ],
)
def test_pooled_equals_the_pooling_of_the_rows(
    make: Callable[..., EncoderStage], model: str, pooling: Any, pooled: Callable[[Tensor], Tensor]
) -> None:
    stage = make(model, pooling=pooling)
    for _ in range(2):
        (output,) = run(stage, PROMPT)
        expected = pooled(reference(stage, PROMPT))
        torch.testing.assert_close(output.tensors["pooled"], expected, atol=1e-4, rtol=0)


def test_a_causal_model_has_no_pooler(make: Callable[..., EncoderStage]) -> None:
    with pytest.raises(ValueError, match=r"'pooler' needs .*take 'mean', 'cls' or 'last'"):
        make("qwen2", pooling="pooler")
    with pytest.raises(ValueError, match="unknown pooling 'max'"):
        make("qwen2", pooling="max")


@pytest.mark.parametrize("model", ["bert", "qwen2"])
@pytest.mark.parametrize("outputs", [("pooled",), ("hidden_states",), ("hidden_states", "pooled")])
def test_only_requested_outputs_are_returned(
    make: Callable[..., EncoderStage], model: str, outputs: tuple[str, ...]
) -> None:
    stage = make(model, outputs=outputs)
    for _ in range(2):
        assert set(run(stage, PROMPT)[0].tensors) == set(outputs)


def test_an_encoder_refuses_sampling_and_describes_itself(
    make: Callable[..., EncoderStage],
) -> None:
    stage = make("bert")
    assert stage.sampling is None
    with pytest.raises(ValueError, match="generates no tokens"):
        stage.check_sampling(stage.merge_sampling({"max_tokens": 1}))
    stage.check_sampling(stage.merge_sampling({"truncate_prompt_tokens": 5}))
    described = stage.describe()
    assert described["engine"] == "EncoderEngine"
    assert stage.dtype == torch.float32
    stage.close()

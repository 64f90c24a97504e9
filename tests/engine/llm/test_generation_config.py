"""A checkpoint's ``generation_config.json`` has the defaults of sampling, as in transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import (
    EngineConfig,
    LLMEngine,
    SamplingParams,
    TokensPrompt,
)
from engine.interface.outputs import FinishReason
from omni.commands.explanation import describe_config, describe_memory
from omni.pipelines.pipeline import Pipeline
from omni.pipelines.pipeline_config import PipelineConfig

PROMPT = (31, 32, 33, 34, 35)
NUM_TOKENS = 24
STATED = {"temperature": 0.6, "top_k": 9, "top_p": 0.8, "repetition_penalty": 1.2}


@pytest.fixture
def stating(seeded: Callable[[str], str], tmp_path: Path) -> Callable[..., str]:
    """Makes a copy of a checkpoint whose generation config states something more."""

    def copy(name: str = "qwen2", **stated: Any) -> str:
        folder = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(seeded(name), folder)
        file = folder / "generation_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | stated))
        return str(folder)

    return copy


def build(folder: str, **settings: Any) -> LLMEngine:
    chosen = {"num_blocks": 64, "block_size": 4, "max_model_len": 64, "dtype": "float32"}
    return LLMEngine(EngineConfig(model=folder, **chosen | settings))


def tokens(engine: LLMEngine, **params: Any) -> list[int]:
    (output,) = engine.generate(TokensPrompt(PROMPT), SamplingParams(**params))
    assert output.error is None
    engine.check_integrity()
    return list(output.outputs[0].token_ids)


def of_transformers(folder: str) -> list[int]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, pad_token_id=0
        )
    return [int(each) for each in found[0, len(PROMPT) :]]


def test_tokens_are_those_of_transformers(stating: Callable[..., str]) -> None:
    plain = of_transformers(stating(do_sample=False))
    words = [plain[3:5], [PROMPT[-1], plain[0]], [plain[10]], plain[15:18]]
    for stated in (
        {"repetition_penalty": 1.7},
        {"suppress_tokens": plain[2:6]},
        {"begin_suppress_tokens": plain[:1]},
        {"bad_words_ids": words},
        {"bad_words_ids": words, "suppress_tokens": plain[:1], "repetition_penalty": 1.3},
        {"eos_token_id": [2, plain[4], plain[7]]},
    ):
        folder = stating(do_sample=False, **stated)
        expected = of_transformers(folder)
        assert expected != plain, f"{stated} changes nothing"
        engine = build(folder)
        assert tokens(engine, max_tokens=NUM_TOKENS) == expected
        assert tokens(engine, max_tokens=NUM_TOKENS) == expected, "where the prompt is cached"
        ignoring = build(folder, generation_config="ignore")
        assert tokens(ignoring, max_tokens=NUM_TOKENS, temperature=0.0) == plain


def test_what_a_request_sets_counts_and_what_it_leaves_out_is_the_checkpoint_s(
    stating: Callable[..., str],
) -> None:
    folder = stating(**STATED, max_new_tokens=11, min_new_tokens=3)
    stated, plain = build(folder), build(folder, generation_config="ignore")
    own = STATED | {"max_tokens": 11, "min_tokens": 3}
    for given in ({"seed": 5}, {"seed": 5, "temperature": 1.5}, {"seed": 6, "max_tokens": 20}):
        assert tokens(stated, **given) == tokens(plain, **own | given)
    assert stated.sampling_defaults == own
    assert not plain.sampling_defaults
    assert len(tokens(stated, seed=5, ignore_eos=True)) == 11


@pytest.mark.parametrize("kind", ["inline", "processes"])
def test_a_stage_s_own_parameters_lie_over_the_checkpoint_s(
    stating: Callable[..., str], kind: str
) -> None:
    stage = {
        "kind": "autoregressive",
        "model": stating(**STATED),
        "engine": {"num_blocks": 64, "dtype": "float32", "device": "cpu"},
        "sampling": {"max_tokens": 5, "temperature": 0.9},
        "final_output": "text",
    }
    data = {"name": "stating", "stages": {"writer": stage}}
    config = PipelineConfig.model_validate(data)
    expected = STATED | {"max_tokens": 5, "temperature": 0.9}
    if kind == "processes":  # which builds a stage of the text of its settings
        text = config.resolved("writer").model_dump_json(by_alias=True)
        config = PipelineConfig.model_validate(data | {"stages": {"writer": json.loads(text)}})
    pipeline = Pipeline.from_config(config)
    try:
        own = pipeline.stages["writer"].sampling
        assert own is not None and own.model_dump() == expected
        (merged,) = pipeline.merge_sampling({"writer": {"top_p": 0.5}}).values()
        assert merged.model_dump() == expected | {"top_p": 0.5}
    finally:
        pipeline.close()


def test_explain_tells_where_each_parameter_comes_from(stating: Callable[..., str]) -> None:
    stage = {
        "kind": "autoregressive",
        "model": stating(**STATED),
        "sampling": {"max_tokens": 5, "top_p": 0.9},
        "final_output": "text",
    }
    config = PipelineConfig.model_validate({"name": "told", "stages": {"writer": stage}})
    told = describe_memory(config)
    for line in (
        "max_tokens: 5 (pipeline)",
        "top_p: 0.9 (pipeline)",
        "temperature: 0.6 (generation_config.json)",
        "top_k: 9 (generation_config.json)",
        "min_p: 0.0 (default)",
        "n: 1 (default)",
    ):
        assert f"      {line}" in told.splitlines()
    settings = describe_config(config)
    assert "temperature 1.0" in settings and "      temperature: " not in settings


def test_explain_tells_which_tokens_the_checkpoint_ends_and_forbids(
    stating: Callable[..., str],
) -> None:
    stated = {
        "eos_token_id": [2, 5],
        "suppress_tokens": [345],
        "begin_suppress_tokens": [7],
        "bad_words_ids": [[8], [9, 10]],
    }
    stage = {"kind": "autoregressive", "model": stating(**stated), "final_output": "text"}
    data = {"name": "told", "stages": {"writer": stage}}
    told = describe_memory(PipelineConfig.model_validate(data)).splitlines()
    for line in (
        "suppress_token_ids: () (default) and [345, 8] (generation_config.json)",
        "eos_token_ids: [2, 5] (generation_config.json)",
        "begin_suppress_token_ids: [7] (generation_config.json)",
        "bad_words_ids: [[8], [9, 10]] (generation_config.json)",
    ):
        assert f"      {line}" in told
    ignoring = {"writer": stage | {"engine": {"generation_config": "ignore"}}}
    told = describe_memory(PipelineConfig.model_validate(data | {"stages": ignoring})).splitlines()
    assert "      suppress_token_ids: () (default)" in told
    assert not any("generation_config.json" in line for line in told)


def test_without_max_tokens_a_text_fills_the_context(stating: Callable[..., str]) -> None:
    engine = build(stating())
    (output,) = engine.generate(TokensPrompt(PROMPT), SamplingParams(ignore_eos=True, seed=1))
    completion = output.outputs[0]
    assert len(PROMPT) + len(completion.token_ids) == engine.config.max_model_len
    assert completion.finish_reason is FinishReason.LENGTH
    engine.check_integrity()


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": "most"}, "top_p"),
        ({"max_new_tokens": -3}, "max_tokens"),
        ({"bad_words_ids": [[]]}, "bad_words_ids cannot be .* a list of lists of token ids"),
        ({"bad_words_ids": [["word"]]}, "bad_words_ids cannot be"),
    ],
)
def test_values_that_cannot_be_are_errors(
    stating: Callable[..., str], stated: dict[str, Any], message: str
) -> None:
    folder = stating(**stated)
    with pytest.raises(ValueError, match=rf"generation_config\.json.*{message}"):
        build(folder)


def test_what_is_not_supported_is_ignored_with_a_warning(
    stating: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    engine = build(stating(num_beams=4, no_repeat_ngram_size=3, do_sample=False, typical_p=1.0))
    assert "sets num_beams, no_repeat_ngram_size: not supported, and ignored" in caplog.text
    assert len(tokens(engine, max_tokens=4)) == 4

"""The decoder stage returns what the model computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import (
    EmbedsPrompt,
    EngineConfig,
    FinishReason,
    LLMEngine,
    SamplingParams,
    TokensPrompt,
)
from stages import AutoregressiveStage, StageRequest
from stages.autoregressive import AutoregressiveStageConfig
from tests.support.settled_stages import run_stage

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PROMPT = TokensPrompt(tuple(range(30, 43)))


@pytest.fixture(scope="module")
def config(seeded: Callable[[str], str]) -> EngineConfig:
    return EngineConfig(model=seeded("qwen2"), num_blocks=32, block_size=4, max_model_len=64)


def test_outputs_equal_transformers_and_the_stage_describes_itself(config: EngineConfig) -> None:
    stage = AutoregressiveStage("s", config, sampling=GREEDY)
    output = run_stage(stage, StageRequest("r", PROMPT))["r"]
    # transformers annotates `generate` for models of its own protocol only.
    model: Any = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32)
    prompt = torch.tensor([PROMPT.prompt_token_ids])
    expected = model.generate(
        prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0
    )
    assert output.token_ids == tuple(expected[0, 13:].tolist())
    with torch.no_grad():
        hidden = model(expected[:, :-1], output_hidden_states=True).hidden_states[-1][0]
    torch.testing.assert_close(output.tensors["hidden_states"], hidden, atol=1e-4, rtol=0)
    assert (output.stage, output.finish_reason) == ("s", FinishReason.LENGTH)
    assert (output.num_prompt_tokens, output.num_cached_tokens) == (13, 0)
    assert output.text == stage.engine.tokenizer.decode(output.token_ids)
    assert output.metrics.total_s is not None
    assert stage.gives_chunks
    described = stage.describe()
    assert described["engine"] == "LLMEngine"
    assert (described["hidden_size"], described["dtype"]) == (64, "float32")
    assert any("KV cache" in line for line in described["memory"])


def test_outputs_select_the_returned_tensors(config: EngineConfig) -> None:
    for outputs, names in ((None, ["hidden_states"]), ((), []), (["hidden_states"],) * 2):
        stage = AutoregressiveStage("s", config, sampling=GREEDY, outputs=outputs)
        assert list(run_stage(stage, StageRequest("r", PROMPT))["r"].tensors) == names


def test_outputs_that_the_model_does_not_emit_are_refused(config: EngineConfig) -> None:
    with pytest.raises(ValueError, match="'mel'; it emits hidden_states"):
        AutoregressiveStage("s", config, sampling=GREEDY, outputs=["mel"])
    with pytest.raises(ValueError, match=r"final_output cannot be \['audio'\]; .*makes is text"):
        AutoregressiveStage("s", config, final_output=("audio",))


def test_a_request_may_have_its_own_sampling_and_embeddings(config: EngineConfig) -> None:
    stage = AutoregressiveStage("s", config, sampling=GREEDY)
    sampling = stage.merge_sampling({"max_tokens": 2, "n": 3})
    assert sampling == GREEDY.model_copy(update={"max_tokens": 2, "n": 3})
    embeds = EmbedsPrompt(torch.randn(5, stage.hidden_size))
    outputs = run_stage(
        stage, StageRequest("own", PROMPT, sampling=sampling), StageRequest("embeds", embeds)
    )
    assert len(outputs["own"].token_ids) == 2
    assert [len(each.token_ids) for each in outputs["own"].completions] == [2, 2, 2]
    for output in outputs.values():
        first = output.completions[0]
        assert (first.text, first.token_ids, first.finish_reason) == (
            *(output.text, output.token_ids, output.finish_reason),
        )
    assert len(outputs["embeds"].completions) == 1
    assert outputs["embeds"].tensors["hidden_states"].shape == (8, stage.hidden_size)


def test_a_stage_closes_only_an_engine_that_it_built(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[LLMEngine] = []
    monkeypatch.setattr(LLMEngine, "close", lambda self: closed.append(self))
    engine = LLMEngine(config)
    stage = AutoregressiveStage("s", engine)
    assert stage.engine is engine
    stage.close()
    assert closed == []
    owner = AutoregressiveStage("s", config)
    owner.close()
    assert closed == [owner.engine]


@pytest.mark.parametrize("model", ["bart", "whisper", "mllama"])
def test_encoder_decoders_return_their_outputs_whole(
    model: str, seeded: Callable[[str], str]
) -> None:
    """Rows of encoder tokens belong to no chunk of the decoder."""
    pair = EngineConfig(model=seeded(model), block_size=16, num_blocks=64, max_model_len=32)
    stage = AutoregressiveStage("s", pair, sampling=GREEDY)
    assert not stage.gives_chunks
    with pytest.raises(ValueError, match="it hands on its outputs whole, not in chunks"):
        stage.partial_tensors("r", 0)


def test_the_config_loads_the_engines_chat_template(
    seeded: Callable[[str], str],
) -> None:
    """This family's folder has no template, and a server loads the tokenizer separately."""
    model = seeded("voxtral")
    config = AutoregressiveStageConfig.model_validate({"kind": "autoregressive", "model": model})
    tokenizer = config.load_tokenizer()
    engine = LLMEngine(EngineConfig(model=model, num_blocks=32, block_size=4, max_model_len=64))
    assert tokenizer is not None and engine.tokenizer is not None
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template == engine.tokenizer.chat_template

"""Cheap checks of every family: streaming, and weights and pages in every format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import cache
from typing import Any

import pytest
from torch import Tensor

from engine import EngineConfig, LLMEngine, RequestOutput, SamplingParams
from tests.support.model_trial import TRIALS, Trial

FAMILIES: Mapping[str, Trial] = {
    **{name: trial for name, trial in TRIALS.items() if trial.seeded == name and name != "bert"},
    "gemma3_vision": Trial("gemma3_vision", prompt=TRIALS["llava"].prompt),
    "qwen2_5_omni": TRIALS["thinker"],
    "qwen3_omni": TRIALS["qwen3 thinker"],
}
# Maximum relative error of all hidden states against float32: small random models amplify
# rounding more than trained ones do.
FORMATS: Mapping[str, tuple[dict[str, Any], float]] = {
    "bfloat16": ({"dtype": "bfloat16"}, 0.1),
    "int8": ({"quantization": "int8"}, 0.1),
    "int4": ({"quantization": "int4"}, 0.7),
}
ENCODERS = (
    *("bart", "t5", "whisper", "mllama", "llava", "qwen2_5_vl", "qwen3_vl", "qwen3_5_vision"),
    *("gemma3_vision", "qwen3_asr", "voxtral", "qwen2_5_omni", "qwen3_omni"),
)
"""Families with an encoder or towers."""
ENCODER_FORMATS: Mapping[str, float] = {"int8": 0.1, "int4": 0.8}
ONE = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0)
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.0)


def engine_of(trial: Trial, folder: str, **form: Any) -> LLMEngine:
    sized = {"num_blocks": 64, "block_size": 8, "max_num_seqs": 2, "dtype": "float32"}
    return LLMEngine(EngineConfig(model=folder, part=trial.part, **(sized | form)))


def answer(engine: LLMEngine, trial: Trial, params: SamplingParams = GREEDY) -> RequestOutput:
    assert trial.prompt is not None
    (output,) = engine.generate([trial.prompt()], params)
    assert output.error is None
    return output


def steps(engine: LLMEngine, trial: Trial) -> Iterator[RequestOutput]:
    assert trial.prompt is not None
    engine.add_request("streamed", trial.prompt(), GREEDY)
    while engine.has_unfinished_requests:
        yield from engine.step()


@pytest.fixture(scope="module")
def exact(seeded: Callable[[str], str]) -> Callable[[str], RequestOutput]:
    """Return a family's answer in float32, after checking that it is streamed equally."""

    @cache
    def make(name: str) -> RequestOutput:
        trial = FAMILIES[name]
        with closing(engine_of(trial, seeded(trial.seeded))) as engine:
            whole = answer(engine, trial)
            streamed = list(steps(engine, trial))
        text = ""
        for output in streamed:
            text += output.outputs[0].delta
            assert text == output.outputs[0].text == whole.outputs[0].text[: len(text)]
        assert len(streamed) > 1 and text == whole.outputs[0].text
        assert streamed[-1].outputs[0].token_ids == whole.outputs[0].token_ids
        return whole

    return make


@pytest.mark.shows("streaming")
@pytest.mark.parametrize("name", FAMILIES)
def test_streamed_outputs_add_up_to_the_whole(
    name: str, exact: Callable[[str], RequestOutput]
) -> None:
    assert exact(name).outputs[0].token_ids


def rows(output: RequestOutput) -> Tensor:
    """Return the prompt's hidden states: generated tokens may differ."""
    found = output.outputs[0].tensors["hidden_states"]
    return found[: len(output.prompt_token_ids)].float()


@pytest.mark.shows("formats")
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", FAMILIES)
def test_hidden_states_are_near_in_every_format(
    name: str, form: str, exact: Callable[[str], RequestOutput], seeded: Callable[[str], str]
) -> None:
    trial, (settings, near) = FAMILIES[name], FORMATS[form]
    expected = rows(exact(name))
    with closing(engine_of(trial, seeded(trial.seeded), **settings)) as engine:
        error = float((rows(answer(engine, trial, ONE)) - expected).norm() / expected.norm())
    assert 0 < error < near, "as rounding has it, and not none"


@pytest.mark.shows("formats")
@pytest.mark.parametrize("form", ENCODER_FORMATS)
@pytest.mark.parametrize("name", ENCODERS)
def test_hidden_states_are_near_with_quantized_encoders(
    name: str, form: str, exact: Callable[[str], RequestOutput], seeded: Callable[[str], str]
) -> None:
    trial, expected = FAMILIES[name], rows(exact(name))
    with closing(engine_of(trial, seeded(trial.seeded), encoder_quantization=form)) as engine:
        first, second = (rows(answer(engine, trial, ONE)) for _ in range(2))
    error = float((first - expected).norm() / expected.norm())
    assert 0 < error < ENCODER_FORMATS[form], "as rounding has it, and not none"
    assert float((second - first).norm() / first.norm()) < 1e-4, "a hit changes nothing"

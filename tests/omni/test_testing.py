"""A user's test of a pipeline passes if caching changes nothing, and only if it was used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine import EngineConfig, SamplingParams, TokensPrompt
from omni import AutoregressiveStage, Omni, OmniRequest, Pipeline, PipelineConfig, verify
from omni.testing import assert_cached_equals_uncached
from omni.verification.verify import Difference
from tests.support.fake_stage import FakeStage

PROMPTS = [OmniRequest(TokensPrompt((*range(20, 40), last))) for last in (7, 8)]


@pytest.fixture
def config(seeded: Callable[[str], str]) -> PipelineConfig:
    writer = {
        "kind": "autoregressive",
        "model": seeded("qwen2"),
        "engine": {"num_blocks": 32, "block_size": 4, "max_model_len": 64},
        "sampling": {"temperature": 0.0, "max_tokens": 4},
        "final_output": "text",
    }
    return PipelineConfig.model_validate({"name": "one", "stages": {"writer": writer}})


def test_a_sound_pipeline_passes_and_what_was_made_for_it_is_closed(
    config: PipelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Omni] = []
    plain = Omni.close

    def close(self: Omni) -> None:
        closed.append(self)
        plain(self)

    monkeypatch.setattr(Omni, "close", close)
    report = assert_cached_equals_uncached(config, PROMPTS)
    assert report.equal and report.stages[0].warm_hit_tokens > 0
    assert len(closed) == 1


def test_an_omni_that_is_given_stays_open(seeded: Callable[[str], str]) -> None:
    engine = EngineConfig(model=seeded("qwen2"), num_blocks=32, block_size=4, max_model_len=64)
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    with Omni(Pipeline([AutoregressiveStage("writer", engine, sampling=greedy)])) as omni:
        assert_cached_equals_uncached(omni, "a prompt of some blocks")
        assert omni.generate("x")[0].error is None


def test_without_a_hit_the_test_fails() -> None:
    with pytest.raises(AssertionError, match="NOTHING WAS PROVEN"):
        assert_cached_equals_uncached(Pipeline([FakeStage("a")]), "x")


def test_a_request_that_fails_fails_the_test(config: PipelineConfig) -> None:
    bad = OmniRequest("x", "bad", sampling={"nowhere": {}})
    with pytest.raises(AssertionError, match="request 'bad': sampling for stage 'nowhere'"):
        assert_cached_equals_uncached(config, [*PROMPTS, bad])


def test_a_difference_fails_the_test(
    config: PipelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differing(*arguments: Any, **options: Any) -> Any:
        found = Difference("r", "writer", "warm", "tokens", "generated token 1 is 7")
        return replace(verify(*arguments, **options), differences=(found,))

    monkeypatch.setattr("omni.testing.verify", differing)
    with pytest.raises(AssertionError, match="DIFFERS from uncached in 1 ") as failure:
        assert_cached_equals_uncached(config, PROMPTS)
    assert "generated token 1 is 7" in str(failure.value)

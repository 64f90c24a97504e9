"""A verification says whether it proved anything, and takes requests in every form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from engine import EngineConfig, SamplingParams, TokensPrompt
from omni import AutoregressiveStage, Omni, OmniRequest, Pipeline, StageInputs
from omni.verification.verify import verify
from omni.verification.verify_report import StageVerification, VerifyReport
from tests.support.fake_stage import FakeStage

REQUESTS = [OmniRequest(TokensPrompt((*range(20, 40), last))) for last in (50, 60)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


@pytest.fixture
def omni(seeded: Callable[[str], str]) -> Iterator[Omni]:
    """writer -> reader."""
    engine = EngineConfig(model=seeded("qwen2"), num_blocks=64, block_size=4, max_model_len=64)
    edge = StageInputs(("writer",), "hidden_states_as_prompt_embeds")
    writer = AutoregressiveStage("writer", engine, sampling=GREEDY, final_output=())
    reader = AutoregressiveStage("reader", engine, sampling=GREEDY, inputs=edge)
    with Omni(Pipeline([writer, reader])) as made:
        yield made


def test_without_a_hit_nothing_was_proven(seeded: Callable[[str], str]) -> None:
    engine = EngineConfig(model=seeded("qwen2"), num_blocks=32, block_size=16, max_model_len=64)
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    less_than_a_block = OmniRequest(TokensPrompt((7, 8)))
    with Omni(Pipeline([AutoregressiveStage("writer", engine, sampling=greedy)])) as omni:
        report = verify(omni, less_than_a_block)
    assert report.equal and not report.failures and not report.has_hits
    assert report.lines()[0].startswith("NOTHING WAS PROVEN: no request used anything that was")
    told = [line for line in report.lines() if line.startswith("stage ")]
    assert all(line.endswith("nothing was proven of this stage") for line in told)


def test_a_stage_that_is_not_hit_is_told_beside_one_that_is(omni: Omni) -> None:
    report = verify(omni, REQUESTS)
    assert report.has_hits
    assert not any("nothing was proven" in line.lower() for line in report.lines())
    first, *others = report.stages
    unhit = replace(first, cold_hit_tokens=0, warm_hit_tokens=0)
    lines = replace(report, stages=(unhit, *others)).lines()
    assert sum("nothing was proven of this stage" in line for line in lines) == 1


def test_a_stage_whose_caching_is_off_is_not_tested_and_the_report_says_so(omni: Omni) -> None:
    omni.pipeline.stages["reader"].enable_prefix_caching = False
    report = verify(omni, REQUESTS)
    writer, reader = report.stages
    assert writer.has_hits and not reader.has_hits and report.has_hits
    told = [line for line in report.lines() if "caching is off in its settings" in line]
    assert len(told) == 1 and told[0].startswith("stage 'reader'")
    omni.pipeline.stages["writer"].enable_prefix_caching = False
    report = verify(omni, REQUESTS)
    assert not report.has_hits
    assert report.lines()[0].endswith("no stage has a cache that its settings turn on")


def test_encodings_that_were_found_are_hits() -> None:
    """Short prompts before an image or a sound have no full block, and yet something is cached."""
    stage = StageVerification("s", 3, 0, 0, (), 1.0, 1.0, 1.0, encoder_hits=2)
    report = VerifyReport(1, (stage,), (), (), ())
    assert report.has_hits
    assert "hits 0 cold and 0 warm, 2 encodings found" in report.lines()[1]


@pytest.mark.parametrize("requests", ["once upon a time", ["once upon a time"]])
def test_plain_strings_are_requests(omni: Omni, requests: Any) -> None:
    report = verify(omni, requests)
    assert report.equal and report.num_requests == 1 and report.has_hits


@pytest.mark.parametrize(
    ("omni", "requests", "message"),
    [
        ("two_step", ["x"], "verify runs requests over an Omni, got 'two_step'"),
        (None, {"prompt": "x"}, "requests must be a prompt"),
        (None, 3, "requests must be a prompt"),
    ],
)
def test_what_is_no_omni_or_no_request_is_told(omni: Any, requests: Any, message: str) -> None:
    with Omni(Pipeline([FakeStage("a")])) as own, pytest.raises(ValueError, match=message):
        verify(own if omni is None else omni, requests)

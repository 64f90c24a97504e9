"""Outputs report when a request was in which stage, wherever the stages run."""

from __future__ import annotations

import time
from typing import Any

import pytest

from engine import RequestMetrics
from omni import Omni, OmniRequest
from omni.pipelines.pipeline_config import PipelineConfig
from omni.requests.output_writer import describe_stage
from omni.requests.request import OmniOutput, StageTime
from omni.server.serving.meters import RequestRecord
from stages import StageOutput

HIDDEN_WRITER: dict[str, Any] = {"stages.writer.final_output": []}


def run(omni: Omni, request: OmniRequest) -> list[OmniOutput]:
    return list(omni.stream(request))


@pytest.mark.parametrize("runtime", ["inline", "processes"])
@pytest.mark.usefixtures("checkpoint_cache")
def test_every_stage_is_reported_also_one_without_output_for_the_user(runtime: str) -> None:
    config = PipelineConfig.load("two_step", HIDDEN_WRITER)
    before = time.monotonic()
    with Omni(config, runtime=runtime) as omni:
        outputs = run(omni, OmniRequest("Once upon a time", sampling={"reader": {"max_tokens": 5}}))
    writer, reader = outputs[-1].timeline
    assert (writer.stage, reader.stage) == ("writer", "reader")
    assert writer.ended_s is not None and reader.ended_s is not None
    assert before <= writer.entered_s < writer.ended_s <= reader.entered_s < reader.ended_s
    assert writer.ended_s <= time.monotonic()
    assert (reader.num_tokens, writer.num_tokens) == (5, 32)
    for stay in (writer, reader):
        assert stay.queue_s is not None and stay.first_token_s is not None
        assert 0 <= stay.queue_s <= stay.first_token_s
    # Sent when it has changed, not with every token.
    assert sum(bool(each.timeline) for each in outputs) <= 3
    if runtime == "inline":  # news of processes may be merged
        assert len(outputs) >= 5


@pytest.mark.usefixtures("checkpoint_cache")
def test_a_failed_request_reports_how_far_it_came() -> None:
    with Omni("two_step") as omni:
        # The writer's limit, with an output too long for the reader.
        request = OmniRequest("x", request_id="gone", sampling={"writer": {"max_tokens": 400}})
        stream = omni.stream(request)
        next(stream)
        omni.abort("gone")
        *_, last = stream
    (stay,) = last.timeline
    assert last.error and stay.stage == "writer" and stay.ended_s is None


BEGIN = "Once upon a time, in a house by the sea, a clock told all the time. "


def test_a_stage_output_and_a_timeline_say_why_no_more_was_hit():
    with Omni("two_step") as omni:

        def miss(prompt: str, **options: str) -> str | None:
            (output,) = omni.generate(OmniRequest(prompt, **options))
            assert output.error is None
            word = output.stages["writer"].metrics.prefix_miss
            (timed,) = [each for each in output.timeline if each.stage == "writer"]
            assert timed.prefix_miss == word
            return word

        assert miss(BEGIN + "One") == "unseen"
        assert miss("no") == "short"
        assert miss(BEGIN + "One") in (None, "last_token")
        assert miss(BEGIN * 2) == "unseen"
        # It is not reported whether others have cached the same.
        assert miss(BEGIN + "One", cache_salt="a key") == "salt"
        assert miss("x" + BEGIN, cache_salt="a key") == "salt"
        assert miss(BEGIN + "One", cache_salt="a key") in (None, "last_token")
        assert miss(BEGIN * 2, cache_salt="a key") == "unseen"


def test_a_record_of_a_request_says_why():
    record = RequestRecord("two_step", "r", None, arrived_s=1.0, began_s=2.0, ended_s=3.0)
    record.stages["writer"] = StageTime("writer", 2.0, 3.0, prefix_miss="evicted")
    assert record.to_object()["stages"][0]["prefix_miss"] == "evicted"


def test_a_line_of_outputs_says_why():
    metrics = RequestMetrics(queue_s=0.12345678, num_preemptions=1, prefix_miss="unseen")
    output = StageOutput("r", "writer", finished=True, text="x", metrics=metrics)
    line = describe_stage(output, ["text"], tensor=lambda name, _: name, sound=lambda _: "")
    assert line["metrics"] == {"queue_s": 0.123457, "num_preemptions": 1, "prefix_miss": "unseen"}

"""When a request was in which stage is told with its outputs, wherever the stages run."""

from __future__ import annotations

import time
from typing import Any

import pytest

from omni import Omni, OmniRequest
from omni.pipelines.pipeline_config import PipelineConfig
from omni.requests.request import OmniOutput

HIDDEN_WRITER: dict[str, Any] = {"stages.writer.final_output": []}


def run(omni: Omni, request: OmniRequest) -> list[OmniOutput]:
    return list(omni.stream(request))


@pytest.mark.parametrize("runtime", ["inline", "processes"])
@pytest.mark.usefixtures("checkpoint_cache")
def test_every_stage_is_told_also_one_that_the_user_gets_nothing_of(runtime: str) -> None:
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
    # Told when it has changed, not with every token.
    assert sum(bool(each.timeline) for each in outputs) <= 3
    if runtime == "inline":  # news of processes may come several at once
        assert len(outputs) >= 5


@pytest.mark.usefixtures("checkpoint_cache")
def test_a_request_that_fails_tells_how_far_it_came() -> None:
    with Omni("two_step") as omni:
        # As long as the writer may take, with what it writes too long for the reader.
        request = OmniRequest("x", request_id="gone", sampling={"writer": {"max_tokens": 400}})
        stream = omni.stream(request)
        next(stream)
        omni.abort("gone")
        *_, last = stream
    (stay,) = last.timeline
    assert last.error and stay.stage == "writer" and stay.ended_s is None

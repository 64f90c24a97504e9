"""The list of last requests and the lines of outputs say why no more of a prompt was hit."""

from __future__ import annotations

from engine import RequestMetrics
from omni.requests.output_writer import describe_stage
from omni.requests.request import StageTime
from omni.server.serving.request_records import RequestRecord
from stages import StageOutput


def test_a_record_of_a_request_says_why():
    record = RequestRecord("two_step", "r", None, arrived_s=1.0, began_s=2.0, ended_s=3.0)
    record.stages["writer"] = StageTime("writer", 2.0, 3.0, prefix_miss="evicted")
    assert record.to_object()["stages"][0]["prefix_miss"] == "evicted"


def test_a_line_of_outputs_says_why():
    metrics = RequestMetrics(queue_s=0.12345678, num_preemptions=1, prefix_miss="unseen")
    output = StageOutput("r", "writer", finished=True, text="x", metrics=metrics)
    line = describe_stage(output, ["text"], tensor=lambda name, _: name, sound=lambda _: "")
    assert line["metrics"] == {"queue_s": 0.123457, "num_preemptions": 1, "prefix_miss": "unseen"}

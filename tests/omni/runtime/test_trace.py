"""A trace shows where every request spent its time, in a file that viewers open, at no other cost
to a run."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from omni.pipelines.pipeline import Pipeline
from omni.requests.request import OmniRequest
from omni.runtime import trace as trace_module
from omni.runtime.omni import Omni
from omni.runtime.orchestrator import streamed_edges
from omni.runtime.trace import Trace, TraceError
from stages import Stage
from stages.remote import supervisor
from stages.remote.messages import StageSpec
from stages.trace_events import StageEvent, Traced, this_clock
from stages.worker.stage_tracer import TracedWorker
from tests.support.fake_speech import FakeSpeechStage
from tests.support.fake_stage import FakeStage
from tests.support.import_graph import ROOT
from tests.support.remote_stages import one_stage, remote_stage
from tests.support.speech_pipeline import PROMPTS, drain, run, speech_stages, text_and_sound, until
from tests.support.thread_workers import ThreadWorkers
from tests.support.trace_file import check_trace, names_of, read_prefix, read_trace
from tests.support.whole_orchestrator import WholeOrchestrator

SLOW_VOCODER = {"code2wav": {"steps_per_token": 3}}


def traced(path: Path, stages: Any, requests: Any = PROMPTS) -> dict[str, Any]:
    """Run requests with a trace; return the last outputs."""
    pipeline = Pipeline(stages)
    with closing(Trace(path, pipeline.order)) as trace:
        orchestrator = WholeOrchestrator(pipeline, trace=trace)
        for request_id, prompt in requests.items():
            orchestrator.add_request(OmniRequest(prompt, request_id))
        outputs = drain(orchestrator)
    return {request_id: of_request[-1] for request_id, of_request in outputs.items()}


def test_a_trace_changes_nothing_that_comes_out(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    plain = run(speech_stages(**SLOW_VOCODER))
    watched = traced(file, speech_stages(**SLOW_VOCODER))
    assert {each: text_and_sound(plain[each]) for each in plain} == {
        each: text_and_sound(watched[each]) for each in watched
    }
    read_trace(file)
    assert not list(tmp_path.glob("*.partial*")), "it was moved, not copied"


def test_stages_are_processes_and_requests_are_tracks(tmp_path: Path) -> None:
    traced(tmp_path / "out.json", speech_stages(**SLOW_VOCODER))
    events = read_trace(tmp_path / "out.json")
    for stage in ("thinker", "talker", "code2wav"):
        assert set(names_of(events, stage, None)) == {"step"}
        for request_id in PROMPTS:
            assert "step" in names_of(events, stage, request_id)
    order = {
        each["pid"]: each["args"]["sort_index"]
        for each in events
        if each["name"] == "process_sort_index"
    }
    assert sorted(order.values()) == [0, 1_000, 2_000]


def test_pauses_and_waits_for_input_are_recorded(tmp_path: Path) -> None:
    """A slow vocoder pauses the talker; a slow talker keeps it waiting."""
    traced(tmp_path / "slow.json", speech_stages(**SLOW_VOCODER))
    events = read_trace(tmp_path / "slow.json")
    assert "resting" in names_of(events, "talker", "z")
    traced(tmp_path / "fast.json", speech_stages(talker={"steps_per_token": 5}))
    events = read_trace(tmp_path / "fast.json")
    of_vocoder = names_of(events, "code2wav", "z")
    assert "waiting for input" in of_vocoder
    assert of_vocoder.index("make prompt") < of_vocoder.index("step")
    assert of_vocoder.count("take chunk") > 1
    assert "resting" not in names_of(events, "talker", "z")
    assert "resting" in names_of(events, "thinker", "z")


def test_transfers_between_stages_are_recorded_with_their_bytes(tmp_path: Path) -> None:
    outputs = traced(tmp_path / "out.json", [FakeStage("a"), FakeStage("b", ("a",))], {"x": "hi"})
    transfers = [each for each in read_trace(tmp_path / "out.json") if each["name"] == "transfer"]
    begin, end = transfers
    rows = outputs["x"].stages["a"].text
    assert begin["args"] == {"request": "x", "from": "a", "bytes": 2 * 4 * len(rows)}
    assert begin["ts"] <= end["ts"]


def test_every_chunk_of_a_streamed_edge_is_a_transfer(tmp_path: Path) -> None:
    stages = speech_stages()
    traced(tmp_path / "out.json", stages, {"x": "hello there"})
    events = read_trace(tmp_path / "out.json")
    for consumer in stages[1:]:
        chunks = names_of(events, consumer.name, "x")
        taken = chunks.count("make prompt") + chunks.count("take chunk")
        assert taken == len(consumer.received["x"])
    transfers = [each for each in events if each["ph"] == "b"]
    assert len(transfers) == sum(len(stage.received["x"]) for stage in stages[1:])


@pytest.mark.usefixtures("checkpoint_cache")
def test_a_hit_is_recorded_where_it_happened(tmp_path: Path) -> None:
    prompt = "Once upon a time, in a house by the sea, a clock told all the time"
    file = tmp_path / "out.json"
    with Omni("two_step", trace=file) as omni:
        for request_id in ("cold", "warm"):
            omni.generate(OmniRequest(prompt, request_id))
        assert not file.exists(), "it is complete when the pipeline is closed"
    events = read_trace(file)
    assert "hit" not in names_of(events, "writer", "cold")
    assert "hit" in names_of(events, "writer", "warm")
    (hit,) = (each for each in events if each["name"] == "hit" and each["pid"] == 1)
    assert 0 < hit["args"]["tokens"] < hit["args"]["of"]
    steps = [each for each in events if each["cat" if "cat" in each else "name"] == "worker"]
    assert sum(each["args"].get("hit tokens", 0) for each in steps) >= hit["args"]["tokens"]
    assert any(each["args"].get("generated tokens") for each in steps)


def test_a_request_that_fails_or_is_aborted_leaves_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    pipeline = Pipeline(
        [FakeStage("a", fail=("broken",), refuse=("no",), steps=4), FakeStage("b", ("a",))]
    )
    trace = Trace(file, pipeline.order)
    orchestrator = WholeOrchestrator(pipeline, trace=trace)
    for request_id in ("well", "broken", "gone"):
        orchestrator.add_request(OmniRequest(request_id, request_id))
    orchestrator.add_request(OmniRequest("no", "no"))
    assert [each.request_id for each in orchestrator.step() if each.refused] == ["no"]
    orchestrator.step()
    orchestrator.abort("gone")
    drain(orchestrator)
    trace.close()
    events = read_trace(file)
    assert names_of(events, "a", "gone")[-1] == "aborted"
    assert names_of(events, "a", "no") == ["failed"]
    assert names_of(events, "b", "well")[-1] == "step"
    assert not any(each.sent or each.given for each in trace._requests.values())
    for link in orchestrator._links.values():
        assert isinstance(link, TracedWorker)
        assert not link._tracks


def events_of(*names: str, request_id: str = "x", start_s: float) -> tuple[StageEvent, ...]:
    return tuple(
        StageEvent(name, start_s + place, start_s + place + 0.5, request_id)
        for place, name in enumerate(names)
    )


def test_the_clock_of_another_machine_is_set_by_its_messages(tmp_path: Path) -> None:
    """It is an hour ahead there; the fastest message gives the best estimate."""
    file, ahead_s, delays_s = tmp_path / "out.json", 3600.0, (0.75, 0.25, 0.5)
    with closing(Trace(file, ["a"])) as trace:
        began_s = trace._start_s
        for number, delay_s in enumerate(delays_s):
            there_s = time.monotonic() + ahead_s + 10 * number - delay_s
            began = events_of("step", request_id=f"r{number}", start_s=there_s - 0.5)
            trace.take("a", Traced(began, 0, "elsewhere", there_s))
        assert trace._offsets == {"elsewhere": pytest.approx(-ahead_s - 20, abs=5)}
    steps = [each for each in read_trace(file) if each["name"] == "step"]
    assert all(each["ts"] / 1e6 < time.monotonic() - began_s + 30 for each in steps)


def test_clocks_that_disagree_a_little_do_not_disorder_a_track(tmp_path: Path) -> None:
    file, now_s = tmp_path / "out.json", time.monotonic()
    with closing(Trace(file, ["a"])) as trace:
        trace.take("a", Traced(events_of("step", start_s=now_s), 0, "one", now_s + 1))
        trace.take("a", Traced(events_of("step", start_s=now_s + 0.1), 0, "one", now_s + 9))
    read_trace(file)


def test_replicas_are_processes_of_their_own(tmp_path: Path) -> None:
    file, now_s = tmp_path / "out.json", time.monotonic()
    with closing(Trace(file, ["a"])) as trace:
        for replica in (1, 0):
            told_by = Traced(events_of("step", start_s=now_s), replica, this_clock(), now_s)
            trace.take("a", told_by)
    events = read_trace(file)
    assert names_of(events, "a", "x") == names_of(events, "a (replica 1)", "x") == ["step"]


def test_the_death_of_a_worker_and_retries_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The talker dies when it has taken a chunk; all of them are sent to its next worker."""
    monkeypatch.setattr(supervisor, "_FIRST_DELAY_S", 0.0)
    made: list[FakeSpeechStage] = []

    def build(spec: StageSpec) -> tuple[Stage, Any]:
        (stage,) = (each for each in speech_stages() if each.name == spec.name)
        made.append(stage)
        return stage, plain.transforms.get(spec.name)

    shapes = speech_stages()
    plain = Pipeline(shapes)
    edges, workers = streamed_edges(plain.stages), ThreadWorkers(build)
    stages = [
        remote_stage(
            shape, [one_stage(shape.name, edges[shape.name], is_traced=True)], workers.connect
        )
        for shape in shapes
    ]
    pipeline, file = Pipeline(stages), tmp_path / "out.json"
    (talker,) = (stage for stage in made if stage.name == "talker")
    with closing(Trace(file, pipeline.order)) as trace:
        orchestrator = WholeOrchestrator(pipeline, trace=trace)
        orchestrator.add_request(OmniRequest(PROMPTS["z"], "z"))
        until(orchestrator, lambda: len(talker.received.get("z", ())) > 1)
        workers.kill("talker")
        assert drain(orchestrator)["z"][-1].error is None
    for stage in stages:
        stage.close()
    workers.join()

    events = read_trace(file)
    about_worker = [each for each in names_of(events, "talker", None) if each != "step"]
    assert about_worker == ["worker ended", "worker started"]
    (ended,) = (each for each in events if each["name"] == "worker ended")
    assert ended["args"] == {"reason": "was killed by a test"}
    of_request = names_of(events, "talker", "z")
    again = of_request.index("run again")
    assert of_request[again:].count("make prompt") == 1
    taken = of_request.count("make prompt") + of_request.count("take chunk")
    sent = [each for each in events if each["ph"] == "b" and each["args"]["from"] == "thinker"]
    assert len(sent) == taken


def test_no_more_requests_are_remembered_than_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_module, "_MAX_REQUESTS", 10)
    file = tmp_path / "out.json"
    stages = [FakeStage("a"), FakeStage("b", ("a",))]
    requests = {f"r{number}": "hi" for number in range(40)}
    pipeline = Pipeline(stages)
    with closing(Trace(file, pipeline.order)) as trace:
        orchestrator = WholeOrchestrator(pipeline, trace=trace)
        for request_id, prompt in requests.items():
            orchestrator.add_request(OmniRequest(prompt, request_id))
            drain(orchestrator)
        assert len(trace._requests) == 10
        assert not any(request.sent for request in trace._requests.values())
    read_trace(file)


KILLED = """\
import sys, time
from omni.runtime.trace import Trace
from stages.trace_events import StageEvent, Traced, this_clock
trace = Trace(sys.argv[1], ["a"])
number = 0
while True:
    now = time.monotonic()
    event = StageEvent("step", now, now + 1e-6, f"request {number % 7}")
    trace.take("a", Traced((event,), 0, this_clock(), now))
    number += 1
    if number == 5000:
        print("go", flush=True)
"""


def test_a_run_that_is_killed_leaves_what_viewers_can_read(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(file)], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    with child:
        child.stdout.readline()
        child.send_signal(signal.SIGKILL)
    events = read_prefix((tmp_path / "out.partial.json").read_text("utf-8"))
    check_trace(events)
    assert len(events) > 1_000
    assert not file.exists()


class Full:
    """A file on a disk that runs full."""

    closed = False

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, content: bytes) -> int:
        written = min(self.room, len(content))
        self.room -= written
        if not written:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(trace_module, "_MAX_UNWRITTEN", 100)
    yield


@pytest.mark.usefixtures("small_buffer")
def test_a_full_disk_ends_the_trace_and_not_the_run(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    pipeline = Pipeline(speech_stages())
    trace = Trace(file, pipeline.order)
    trace._file.close()
    trace._file = Full(300)  # type: ignore[assignment]
    orchestrator = WholeOrchestrator(pipeline, trace=trace)
    orchestrator.add_request(OmniRequest("hello there", "x"))
    assert drain(orchestrator)["x"][-1].error is None
    for _ in range(2):
        with pytest.raises(TraceError, match="No space left on device"):
            trace.close()
    assert not file.exists()


def test_what_cannot_be_written_is_found_before_any_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Omni("two_step", trace=tmp_path / "no" / "out.json")
    with pytest.raises(OSError, match="no regular file"):
        Omni("two_step", trace=tmp_path)
    with pytest.raises(OSError, match="no regular file"):
        Omni("two_step", trace="/dev/null")
    with pytest.raises(ValueError, match="my-model"):
        Omni("two_step", overrides={"stages.writer.model": "./my-model"}, trace=tmp_path / "a.json")
    assert list(tmp_path.iterdir()) == []


def test_a_pipeline_that_cannot_be_built_leaves_no_trace(tmp_path: Path) -> None:
    pipeline = Pipeline([FakeStage("a")])
    with Omni(pipeline), pytest.raises(RuntimeError, match="another Omni"):
        Omni(pipeline, trace=tmp_path / "out.json")
    assert list(tmp_path.iterdir()) == []


def test_a_trace_is_json_for_any_request_id(tmp_path: Path) -> None:
    name = 'a "name"\n\\ \ud83d\ude00'.encode("utf-16", "surrogatepass").decode("utf-16")
    traced(tmp_path / "out.json", [FakeStage("a")], {name: "hi"})
    assert names_of(read_trace(tmp_path / "out.json"), "a", name)[-1] == "step"
    assert json.loads((tmp_path / "out.json").read_text("utf-8"))

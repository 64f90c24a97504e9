"""Workers that die under load: the server stays up, and `/health` reports the reason."""

from __future__ import annotations

import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import openai
import pytest

from omni.pipelines.pipeline_config import PipelineConfig
from omni.server.serving.pipeline_server import ServedPipeline
from stages.remote import supervisor
from stages.remote.remote_stage import RemoteStage
from stages.remote.supervisor import NoPlaceError
from tests.support.http_call import call
from tests.support.live_server import LiveServer
from tests.support.one_writer import one_writer
from tests.support.patience import PATIENCE_S, wait_for

PROMPTS = ["A quick brown fox", "A quick brown dog", "Hello", "Once upon a time"]


def served(max_retries: int, kind: str = "processes") -> PipelineConfig:
    runtime = {"kind": kind, "max_retries": max_retries}
    sampling = {"temperature": 0.0, "max_tokens": 100, "ignore_eos": True}
    return one_writer("chat", runtime=runtime, sampling=sampling)


@pytest.fixture(scope="module")
def unforgiving(checkpoint_cache: object) -> Iterator[LiveServer]:
    """A server without retries; the last test leaves it without a worker."""
    with LiveServer([served(max_retries=0)]) as running:
        yield running


def pieces(
    server: LiveServer, prompt: str, begun: threading.Semaphore, max_tokens: int = 100
) -> Iterator[str]:
    stream = server.client().completions.create(
        model="chat", prompt=prompt, stream=True, max_tokens=max_tokens
    )
    for number, chunk in enumerate(stream):
        if number == 1:
            begun.release()
        yield chunk.choices[0].text if chunk.choices else ""


def read(server: LiveServer, prompt: str, begun: threading.Semaphore) -> str:
    return "".join(pieces(server, prompt, begun))


def kill_worker(server: LiveServer) -> None:
    stage = server.omni().pipeline.stages["writer"]
    assert isinstance(stage, RemoteStage)
    (pid,) = (worker.pid for worker in stage.workers)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def health(server: LiveServer) -> tuple[int, Any]:
    status, _, message = call(f"{server.url}/health")
    return status, msgspec.json.decode(message)


def writer_of(message: Any) -> dict[str, Any]:
    (worker,) = message["pipelines"]["chat"]["workers"]["writer"]
    return dict(worker)


def refused(server: LiveServer, message: str) -> tuple[str | None, str | None]:
    """The error code of a refused request, and its Retry-After."""
    with pytest.raises(openai.InternalServerError, match=f"stage 'writer': .*{message}") as caught:
        server.client().completions.create(model="chat", prompt="Hello")
    assert (caught.value.status_code, caught.value.type) == (503, "server_error")
    return caught.value.code, caught.value.response.headers.get("retry-after")


@pytest.mark.parametrize(
    ("kind", "told_of"),
    # Inline is one worker for all stages, as ``omni serve`` runs them.
    [("inline", "was killed by"), ("processes", "was killed by SIGKILL"), ("ray", "died (")],
)
def test_streams_continue_after_their_worker_is_killed(
    kind: str, told_of: str, request: pytest.FixtureRequest
) -> None:
    if kind == "ray":  # one for all
        request.getfixturevalue("ray_cluster")
    with LiveServer([served(max_retries=1, kind=kind)], apart=True) as server:
        client = server.client()
        whole = [
            client.completions.create(model="chat", prompt=prompt, max_tokens=100).choices[0].text
            for prompt in PROMPTS
        ]
        assert writer_of(health(server)[1])["num_restarts"] == 0
        begun = threading.Semaphore(0)
        with ThreadPoolExecutor() as pool:
            streams = [pool.submit(read, server, each, begun) for each in PROMPTS]
            begun.acquire()
            kill_worker(server)
            assert [stream.result() for stream in streams] == whole
        # The worker may finish its answers before it dies. Then its death is noticed later, while
        # the next worker still starts; the pipeline is ready during that time.
        wait_for(lambda: writer_of(health(server)[1])["num_restarts"] == 1)
        wait_for(lambda: writer_of(health(server)[1])["state"] == "up")
        status, message = health(server)
        assert (status, message["status"]) == (200, "ready")
        worker = writer_of(message)
        assert worker["num_restarts"] == 1
        assert worker["last_end"].startswith(told_of) and worker["ended_at"] > 0
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=PATIENCE_S) as answer:
            metrics = answer.read().decode()
        labels = '{model="chat",replica="0",stage="writer"}'
        assert f"omni_stage_restarts_total{labels} 1.0" in metrics
        assert f"omni_stage_worker_up{labels} 1.0" in metrics
        server.check_nothing_is_left()


def test_without_retries_only_requests_of_the_killed_worker_fail(unforgiving: LiveServer) -> None:
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor() as pool:
        stream = pool.submit(lambda: list(pieces(unforgiving, PROMPTS[0], begun, 1800)))
        begun.acquire()
        kill_worker(unforgiving)
        message = "stage 'writer': its worker was killed by SIGKILL while it had this request"
        with pytest.raises(openai.APIError, match=message):
            stream.result()
    answer = unforgiving.client().completions.create(model="chat", prompt="Hello", max_tokens=3)
    assert answer.choices[0].text
    assert health(unforgiving)[0] == 200
    unforgiving.check_nothing_is_left()


def test_health_reports_a_stage_that_waits_for_a_node(
    unforgiving: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = unforgiving.omni().pipeline.stages["writer"]
    assert isinstance(stage, RemoteStage)
    (worker,) = stage.workers

    def no_place(*asked: object) -> Any:
        raise NoPlaceError("no node has what it needs")

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(worker, "_connect", no_place)
        meanwhile.setattr(supervisor, "MAX_STARTS", 2)
        kill_worker(unforgiving)
        wait_for(lambda: health(unforgiving)[0] == 503)
        _, message = health(unforgiving)
        error = "waiting for a place in the cluster: writer: could not be started: no node has what"
        assert message["pipelines"]["chat"]["error"].startswith(error)
        assert writer_of(message)["state"] == "waiting"
        expected = ("stage_waiting", "5")
        assert refused(unforgiving, "until there is a place for it") == expected
        # Also a request that was accepted before and is admitted now.
        meanwhile.setattr(ServedPipeline, "check_room", lambda *_: None)
        assert refused(unforgiving, "until there is a place for it") == expected
    wait_for(lambda: health(unforgiving)[0] == 200)
    answer = unforgiving.client().completions.create(model="chat", prompt="Hello", max_tokens=3)
    assert answer.choices[0].text


def test_health_reports_a_worker_until_it_has_restarted(
    unforgiving: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = unforgiving.omni().pipeline.stages["writer"]
    assert isinstance(stage, RemoteStage)
    (worker,) = stage.workers
    connect = worker._connect
    goes_on = threading.Event()

    def held_up(*asked: Any) -> Any:
        assert goes_on.wait(PATIENCE_S)
        return connect(*asked)

    assert health(unforgiving)[1]["pipelines"]["chat"]["error"] is None
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(worker, "_connect", held_up)
        kill_worker(unforgiving)
        try:
            wait_for(lambda: writer_of(health(unforgiving)[1])["state"] == "starting")
            status, message = health(unforgiving)
        finally:
            goes_on.set()
    assert (status, message["status"], message["pipelines"]["chat"]["status"]) == (
        200,
        *["ready"] * 2,
    )
    error = "being started again: writer: was killed by SIGKILL"
    assert message["pipelines"]["chat"]["error"] == error
    wait_for(lambda: writer_of(health(unforgiving)[1])["state"] == "up")
    assert health(unforgiving)[1]["pipelines"]["chat"]["error"] is None


def test_health_reports_a_stage_that_is_down(
    unforgiving: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "MAX_STARTS", 0)  # a finished request sets the count to 0
    kill_worker(unforgiving)
    wait_for(lambda: health(unforgiving)[0] == 503)
    _, message = health(unforgiving)
    assert message["status"] == message["pipelines"]["chat"]["status"] == "failed"
    assert message["pipelines"]["chat"]["error"] == "no worker is left of writer"
    assert writer_of(message)["state"] == "down"
    assert refused(unforgiving, "it cannot be used any more") == ("stage_down", None)

"""Errors have OpenAI's shape, and a client that disconnects cancels its request."""

from __future__ import annotations

import http.client
import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import openai
import pytest

from omni.pipelines.pipeline_config import PipelineConfig
from tests.support.gated_stage import GATES, GatedStage, gated_pipeline
from tests.support.http_call import call, connection, raw_post
from tests.support.live_server import LiveServer
from tests.support.patience import wait_for

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def gated() -> Iterator[LiveServer]:
    """A server whose pipeline continues only when its gate opens."""
    limits = {"max_running_requests": 2, "max_waiting_requests": 1}
    with LiveServer([gated_pipeline("gated")], **limits) as running:
        yield running
        GATES["gated"].open()
        if running.pipelines.status == "ready":
            running.check_nothing_is_left()


def held_by(server: LiveServer, name: str = "gated") -> dict[str, Any]:
    stage = server.omni(name).pipeline.stages[name]
    assert isinstance(stage, GatedStage)
    return stage.held


def ask(client: Any, prompt: str = "x", model: str = "gated", **more: Any) -> str:
    return client.completions.create(model=model, prompt=prompt, **more).choices[0].text


@pytest.mark.parametrize(
    ("wrong", "param", "message"),
    [
        ({"temperature": -1}, "temperature", "should be greater than or equal to 0, got -1"),
        ({"temperature": "hot"}, "temperature", "should be a valid number, got 'hot'"),
        ({"top_p": 0}, "top_p", "should be greater than 0"),
        ({"seed": -5}, "seed", "should be greater than or equal to 0"),
        ({"n": 0}, "n", "should be greater than or equal to 1"),
        ({"n": 4000}, "n", "n is 4000, but at most 128 completions"),
        ({"stop": [str(each) for each in range(100)]}, "stop", "stop has 100 strings"),
        ({"stop": ["x" * 2000]}, "stop", "the stop strings have 2000 characters"),
        (
            {"extra_body": {"suppress_token_ids": [10**6]}},
            "suppress_token_ids",
            "suppress_token_ids holds 1000000",
        ),
        (
            {"extra_body": {"stages": {"writer": {"stop_token_ids": [10**6]}}}},
            "stages.writer.stop_token_ids",
            "stop_token_ids holds 1000000",
        ),
        ({"stop": [""]}, "stop", "an empty stop string"),
        ({"n": 10**23}, "n", "less than"),
        ({"extra_body": {"priority": 10**23}}, "priority", "less than"),
        ({"max_completion_tokens": -2}, "max_completion_tokens", "greater than or equal to 0"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "give one of them"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs to be true"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "less than or equal to 20"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "logit_bias holds 99999, but the vocabulary"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "logit_bias.5: should be a number from -100"),
        ({"logit_bias": {"five": 1}}, "logit_bias", "should have token ids as keys"),
        ({"logit_bias": [5]}, "logit_bias", "should be a mapping"),
        ({"extra_body": {"functions": [{}]}}, "functions", "use tools, its newer form"),
        (
            {"extra_body": {"best_of": 2}},
            "best_of",
            "not supported, got 2: there is no beam",
        ),
        (
            {"extra_body": {"continue_final_message": True, "add_generation_prompt": True}},
            "continue_final_message",
            "needs add_generation_prompt to be false",
        ),
        ({"messages": []}, "messages", "must not be empty"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        ({"messages": [{"role": "poet", "content": "x"}]}, "messages[0].role", "should be"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "should be text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            "missing",
        ),
        ({"extra_body": {"temprature": 1}}, "temprature", "did you mean 'temperature'?"),
        (
            {"extra_body": {"stages": {"writer": {"top_k": -2}}}},
            "stages.writer.top_k",
            "greater than or equal to -1",
        ),
        ({"extra_body": {"stages": {"riter": {}}}}, "stages.riter", "did you mean 'writer'?"),
        ({"modalities": ["text", "audio"]}, "audio", "goes together"),
        ({"messages": [{"role": "user", "content": "x " * 40_000}]}, "messages", "characters"),
        ({"messages": [{"role": "user", "content": "x " * 4_000}]}, "messages", "writer"),
    ],
)
def test_a_mistake_is_reported_with_its_field(
    client: Any, wrong: dict[str, Any], param: str | None, message: str
):
    for stream in ({"stream": True}, {}) if "stream_options" not in wrong else ({},):
        with pytest.raises(openai.BadRequestError, match=".") as error:
            client.chat.completions.create(
                **{"model": "chat", "messages": HELLO, **stream, **wrong}
            )
        assert error.value.param == param
        body: Any = error.value.body
        assert message in body["message"] and body["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/v1/chat/completions", b'{"model": "chat", "messages": []}', 400, "messages:"),
        ("/v1/completions", b'{"model": "chat", "prompt": [1000000]}', 400, "1000000"),
        ("/v1/completions", b'{"model": "cat", "prompt": "x"}', 404, "'cat' does not exist"),
        ("/v1/completions", b'{"model": "chat", "prompt": "x", "a\\nb": 1}', 400, "b: unknown"),
        ("/v1/embeddings", b"no JSON", 400, "valid JSON"),
        ("/v1/embeddings", None, 405, "Method Not Allowed"),
        ("/v1/nowhere\n", None, 404, "Not Found"),
    ],
)
def test_a_refused_request_is_one_log_line_with_the_reason(
    server: LiveServer,
    caplog: pytest.LogCaptureFixture,
    path: str,
    body: bytes | None,
    status: int,
    reason: str,
):
    with caplog.at_level("WARNING", "omni"):
        found, headers, _ = call(server.url + quote(path), body)
        method = "GET" if body is None else "POST"
        start = f"{headers['x-request-id']} {method} {path!r}: {status}, "
        wait_for(lambda: any(line.startswith(start) for line in caplog.messages))
    assert found == status
    # Other requests may still be ending.
    (line,) = (each for each in caplog.messages if headers["x-request-id"] in each)
    assert reason in line and "\n" not in line


def test_a_null_is_reported_like_an_absent_key(client: Any):
    with pytest.raises(openai.BadRequestError, match=" - prompt: missing") as error:
        client.completions.create(model="chat", prompt=None)
    assert error.value.param == "prompt"


def test_fields_without_an_effect_are_accepted(client: Any):
    harmless = {"user": "me", "store": False, "tools": [], "logit_bias": {}, "tool_choice": "none"}
    first = client.chat.completions.create(model="chat", messages=HELLO)
    second = client.chat.completions.create(
        model="chat", messages=HELLO, response_format={"type": "text"}, **harmless
    )
    assert first.choices == second.choices


def test_an_unknown_model_is_reported_with_the_nearest_name(client: Any):
    with pytest.raises(openai.NotFoundError, match="did you mean 'chat'?") as error:
        client.chat.completions.create(model="chart", messages=HELLO)
    assert error.value.code == "model_not_found" and error.value.param == "model"


@pytest.mark.parametrize(
    ("body", "kind", "status", "message"),
    [
        (b"{", "application/json", 400, "not valid JSON"),
        (b"[1]", "application/json", 400, "must be a JSON object"),
        (b"\xff", "application/json", 400, "not valid JSON"),
        (b"[" * 100_000, "application/json", 400, "not valid JSON"),
        (b"{}", "application/json", 400, "missing"),
        (b"{}", "text/plain", 415, "must be application/json, got 'text/plain'"),
    ],
)
def test_an_invalid_body_is_refused(
    server: LiveServer, body: bytes, kind: str, status: int, message: str
):
    found, reported = post(server, body, kind)
    assert found == status and message in reported["error"]["message"]


def post(server: LiveServer, body: bytes, kind: str = "application/json") -> tuple[int, Any]:
    status, _, reported = call(f"{server.url}/v1/chat/completions", body, {"Content-Type": kind})
    return status, json.loads(reported)


@pytest.fixture(scope="module")
def narrow() -> Iterator[LiveServer]:
    """A server of small bodies."""
    with LiveServer([gated_pipeline("narrow")], max_body_bytes=2048) as running:
        yield running


def test_a_body_that_is_too_large_is_refused_whatever_its_header_says(narrow: LiveServer):
    assert post(narrow, b'{"a": "' + b"x" * 2000)[0] == 400
    status, reported = post(narrow, b'{"a": "' + b"x" * 3000 + b'"}')
    assert status == 413 and "larger than 2048 bytes" in reported["error"]["message"]
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connection(narrow.url) as client:
        client.sendall(head + b"%x\r\n" % 3000 + b"x" * 3000 + b"\r\n0\r\n\r\n")
        assert client.makefile("rb").readline().startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("path", "kind", "size", "status"),
    [
        ("/v1/completions", "application/json", 5000, 413),
        ("/v1/completions", "text/plain", 1500, 415),
        ("/v1/nothing", "application/json", 1500, 404),
    ],
)
def test_the_rest_of_a_refused_body_may_be_sent_after_the_answer(
    narrow: LiveServer, path: str, kind: str, size: int, status: int
):
    """Closing the connection at once would reset it, and the answer might be lost."""
    with connection(narrow.url) as client:
        more = "Connection: close\r\n"
        client.sendall(raw_post(length=size, path=path, kind=kind, more=more))
        answer = http.client.HTTPResponse(client)
        answer.begin()
        assert answer.status == status and "error" in json.loads(answer.read())
        for _ in range(2):
            client.sendall(b"x" * (size // 2))
        assert client.recv(1) == b"", "the connection ends without a reset"


def test_a_stalled_body_times_out():
    with (
        LiveServer([gated_pipeline("still")], body_timeout_s=0.1) as server,
        connection(server.url) as client,
    ):
        client.sendall(raw_post(b'{"prompt":', 100))
        answer = http.client.HTTPResponse(client)
        answer.begin()
        assert answer.status == 408 and answer.getheader("connection") == "close"
        assert "nothing of the body came" in json.loads(answer.read())["error"]["message"]


def test_a_request_above_the_limit_may_be_retried_later(gated: LiveServer):
    client = gated.client()
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(ask, client, prompt) for prompt in ("a", "b", "c")]
        queue = gated.pipelines.pipelines["gated"].queue
        wait_for(lambda: (queue.num_running, queue.num_waiting) == (2, 1))
        with pytest.raises(openai.RateLimitError, match="2 requests run and 1 wait") as error:
            ask(client, "d")
        assert int(error.value.response.headers["retry-after"]) >= 1
        assert error.value.code == "queue_full"
        with pytest.raises(openai.RateLimitError, match="2 requests run and 1 wait"):
            client.completions.create(model="gated", prompt=["e", "f"])
        GATES["gated"].open()
        assert [each.result() for each in answers] == ["gated(a)", "gated(b)", "gated(c)"]
    assert ask(client, "g") == "gated(g)"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_cancels_its_request(gated: LiveServer, stream: bool):
    body = json.dumps({"model": "gated", "prompt": ["x", "y", "z"], "stream": stream}).encode()
    queue = gated.pipelines.pipelines["gated"].queue
    with connection(gated.url) as client:
        client.sendall(raw_post(body))
        wait_for(lambda: len(held_by(gated)) == 2 and queue.num_waiting == 1)
    wait_for(lambda: not held_by(gated))
    assert (queue.num_running, queue.num_waiting) == (0, 0)


def test_a_disconnect_within_a_body_is_not_logged_as_an_error(
    gated: LiveServer, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO, "omni.server"):
        with connection(gated.url) as client:
            client.sendall(raw_post(b"{", 100))
        wait_for(lambda: "POST '/v1/completions'" in caplog.text)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_request_that_takes_too_long_is_aborted():
    with LiveServer([gated_pipeline("gated")], request_timeout_s=0.2) as server:
        client = server.client(max_retries=5)
        more: dict[str, Any]
        for more in ({}, {"stream": True}):
            with pytest.raises(openai.InternalServerError, match="not done after 0.2 s") as error:
                client.completions.create(model="gated", prompt="x", **more)
            assert error.value.status_code == 504 and error.value.type == "timeout_error"
        wait_for(lambda: not held_by(server))


def test_a_failure_of_a_stage_is_reported_and_the_next_request_runs():
    with LiveServer([gated_pipeline("failing", fails=True, steps=3)]) as server:
        client = server.client()
        GATES["failing"].open(3 + 1)
        with pytest.raises(openai.InternalServerError, match="stage 'failing': told to fail"):
            ask(client, model="failing")
        stream = client.completions.create(model="failing", prompt="xyz", stream=True)
        assert next(iter(stream)).choices[0].text
        GATES["failing"].open(2)
        with pytest.raises(openai.APIError, match="told to fail"):
            list(stream)
        server.check_nothing_is_left()


def test_running_requests_finish_when_the_server_stops(gated: LiveServer):
    client = gated.client()
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(ask, client, prompt) for prompt in ("a", "b", "c")]
        wait_for(lambda: len(held_by(gated)) == 2)
        queue = gated.pipelines.pipelines["gated"].queue
        wait_for(lambda: queue.num_waiting == 1)
        gated.stop()
        GATES["gated"].open()
        assert [each.result() for each in answers] == ["gated(a)", "gated(b)", "gated(c)"]
        gated.join()


def test_a_stopping_server_aborts_requests_after_its_timeout():
    with LiveServer([gated_pipeline("endless")], stop_timeout_s=1) as server:
        client = server.client()
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(ask, client, model="endless")
            wait_for(lambda: len(held_by(server, "endless")) == 1)
            server.stop()
            with pytest.raises(openai.APIError):
                answer.result()
            server.join()


def test_a_crashed_pipeline_is_reported_as_failed(monkeypatch: pytest.MonkeyPatch):
    with LiveServer([gated_pipeline("crashing")]) as server:
        orchestrator = server.omni()._driver._orchestrator  # type: ignore[attr-defined]

        def crash() -> None:
            raise SystemExit("all is lost")  # an Exception would only end the live requests

        monkeypatch.setattr(orchestrator, "step", crash)
        with pytest.raises(openai.InternalServerError, match="cannot go on") as error:
            ask(server.client(), model="crashing")
        assert error.value.status_code == 503
        assert server.pipelines.status == "failed"
        with pytest.raises(openai.InternalServerError, match="is failed") as error:
            ask(server.client(), model="crashing")
        assert error.value.status_code == 503


def test_keys_share_no_cached_tokens(checkpoint_cache: object):
    config = PipelineConfig.load("two_step")
    with LiveServer([config], api_keys=["first", "second"]) as server:
        prompt = "The clocks of this library are nobody else's business. " * 3
        cached = [
            server.client(key)
            .completions.create(model="two_step", prompt=prompt, max_tokens=2)
            .usage.prompt_tokens_details.cached_tokens
            for key in ("first", "second", "first", "second")
        ]
    assert cached[:2] == [0, 0] and min(cached[2:]) > 0

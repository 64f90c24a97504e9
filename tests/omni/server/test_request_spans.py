"""Requests and their stages as spans of OpenTelemetry."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openai
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from omni.server.serving.meters import RequestRecord, RequestSpans, spans_from_environment
from tests.support.http_call import call
from tests.support.import_graph import ROOT
from tests.support.live_server import LiveServer
from tests.support.patience import wait_for

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> Iterator[RequestSpans]:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield RequestSpans(provider.get_tracer("test"), provider.shutdown)
    provider.shutdown()


def by_name(exporter: InMemorySpanExporter) -> dict[str, Any]:
    return {span.name: span for span in exporter.get_finished_spans()}


@pytest.fixture(scope="module")
def running(checkpoint_cache: object) -> Iterator[LiveServer]:
    with LiveServer(["two_step"]) as running:
        yield running


@pytest.fixture
def server(running: LiveServer, spans: RequestSpans, monkeypatch: pytest.MonkeyPatch) -> LiveServer:
    monkeypatch.setattr(running.pipelines.meters, "spans", spans)
    return running


def test_a_request_is_a_span_with_one_for_every_stage(
    server: LiveServer, exporter: InMemorySpanExporter
) -> None:
    server.client().completions.create(model="two_step", prompt="Once upon a time", max_tokens=5)
    found = by_name(exporter)
    assert set(found) == {"request two_step", "stage writer", "stage reader"}
    request, reader = found["request two_step"], found["stage reader"]
    assert request.kind is SpanKind.SERVER and request.parent is None
    assert request.attributes["omni.status"] == "ok"
    assert [event.name for event in request.events] == ["turn", "first token"]
    assert reader.parent.span_id == request.context.span_id
    assert reader.attributes["omni.generated_tokens"] == 5
    assert reader.attributes["omni.is_whole"]
    assert [event.name for event in reader.events] == ["first step", "first token"]
    times = [
        request.start_time, found["stage writer"].start_time, found["stage writer"].end_time,
        reader.start_time, reader.end_time, request.end_time,
    ]  # fmt: skip
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("header", "is_followed"),
    [
        (f"00-{TRACE_ID}-00f067aa0ba902b7-01", True),
        ("00-no-trace-01", False),
        ("x" * 5000, False),
    ],
)
def test_a_request_belongs_to_the_trace_that_its_client_names(
    server: LiveServer, exporter: InMemorySpanExporter, header: str, is_followed: bool
) -> None:
    server.client().completions.create(
        model="two_step", prompt="x", max_tokens=1, extra_headers={"traceparent": header}
    )
    trace_id = by_name(exporter)["request two_step"].context.trace_id
    assert (f"{trace_id:032x}" == TRACE_ID) is is_followed


def test_a_refused_request_is_a_span(server: LiveServer, exporter: InMemorySpanExporter) -> None:
    with pytest.raises(openai.BadRequestError):
        server.client().completions.create(model="two_step", prompt=[[10**6]])
    (span,) = by_name(exporter).values()
    assert span.attributes["omni.status"] == "refused"
    assert span.status.status_code is StatusCode.UNSET, "it is not an error of the server"


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/v1/completions", b'{"model": "two_step", "prompt": 1}', 400, "invalid_request_error"),
        ("/v1/completions", b'{"model": "none", "prompt": "x"}', 404, "model_not_found"),
        ("/v1/embeddings", b'{"model": "two_step", "input": "x"}', 400, "invalid_request_error"),
        ("/v1/nowhere", b"{}", 404, "not_found_error"),
    ],
)
def test_a_request_that_reaches_no_pipeline_is_one_span(
    server: LiveServer,
    exporter: InMemorySpanExporter,
    path: str,
    body: bytes,
    status: int,
    reason: str,
) -> None:
    traceparent = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}
    found, headers, _ = call(server.url + path, body, traceparent)
    wait_for(lambda: bool(exporter.get_finished_spans()))
    (span,) = exporter.get_finished_spans()
    assert span.name == ("POST" if "nowhere" in path else f"POST {path}")
    assert span.kind is SpanKind.SERVER and f"{span.context.trace_id:032x}" == TRACE_ID
    assert span.attributes == {
        "omni.status": "refused",
        "omni.request_id": headers["x-request-id"],
        "http.response.status_code": status,
        "url.path": path,
        "error.type": reason,
    }
    assert found == status
    assert span.start_time is not None and span.end_time is not None
    assert span.start_time <= span.end_time


def test_a_request_without_a_model_is_no_span(
    server: LiveServer, exporter: InMemorySpanExporter
) -> None:
    assert call(f"{server.url}/favicon.ico")[0] == 404
    server.client().completions.create(model="two_step", prompt="x", max_tokens=1)
    assert set(by_name(exporter)) == {"request two_step", "stage writer", "stage reader"}


def test_a_failed_request_is_an_error(spans: RequestSpans, exporter: InMemorySpanExporter) -> None:
    spans.add(RequestRecord("m", "r", None, 1e9, 5.0, ended_s=6.5, status="failed"))
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert (span.start_time, span.end_time) == (10**18, 10**18 + 1_500_000_000)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_TRACES_EXPORTER": "console", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
    ],
)
def test_spans_are_exported_only_if_the_environment_asks_for_it(
    environment: dict[str, str],
) -> None:
    assert spans_from_environment(environment) is None


@pytest.mark.parametrize(
    "environment",
    [{"OTEL_TRACES_EXPORTER": "nowhere"}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}],
)
def test_a_missing_exporter_is_a_warning(
    environment: dict[str, str], caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "omni.server.serving.meters"
    monkeypatch.setattr(f"{module}.entry_points", lambda **_: ())
    found = spans_from_environment(environment)
    assert found is not None
    found.add(RequestRecord("m", "r", None, 1.0, 1.0, status="ok"))
    found.close()
    assert "no spans are sent to" in caplog.text and "opentelemetry-exporter-otlp" in caplog.text


@pytest.mark.parametrize(
    ("protocol", "named"), [("grpc", "'otlp_proto_grpc'"), ("http/json", "'otlp by http/json'")]
)
def test_the_exporter_of_the_requested_protocol_is_used(
    protocol: str, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    reported = {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": protocol}
    spans = spans_from_environment(reported)
    assert spans is not None
    spans.close()
    assert f"no spans are sent to {named}" in caplog.text, "it is not installed in the tests"


class Collector(BaseHTTPRequestHandler):
    """Receives the messages of OpenTelemetry's exporter."""

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            content = gzip.decompress(content)
        self.server.taken.append((self.path, ExportTraceServiceRequest.FromString(content)))  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def test_a_collector_gets_connected_spans(
    running: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        collector.taken = taken  # type: ignore[attr-defined]
        thread = threading.Thread(target=collector.serve_forever, daemon=True)
        thread.start()
        endpoint = f"http://127.0.0.1:{collector.server_port}"
        # Read by the exporter itself.
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "spoken")
        spans = spans_from_environment()
        assert spans is not None
        monkeypatch.setattr(running.pipelines.meters, "spans", spans)
        client = running.client(default_headers={"traceparent": f"00-{TRACE_ID}-{'1' * 16}-01"})
        client.completions.create(model="two_step", prompt="Once upon a time", max_tokens=5)
        running.check_nothing_is_left()
        spans.close()
        collector.shutdown()
        thread.join()
    assert {path for path, _ in taken} == {"/v1/traces"}
    resources = [each for _, message in taken for each in message.resource_spans]
    of_service = {
        each.value.string_value
        for resource in resources
        for each in resource.resource.attributes
        if each.key == "service.name"
    }
    assert of_service == {"spoken"}
    found = {
        span.name: span
        for resource in resources
        for scope in resource.scope_spans
        for span in scope.spans
    }
    assert set(found) == {"request two_step", "stage writer", "stage reader"}
    request = found["request two_step"]
    assert request.parent_span_id.hex() == "1" * 16 and request.kind == Span.SPAN_KIND_SERVER
    for span in found.values():
        assert span.trace_id.hex() == TRACE_ID
        assert request.start_time_unix_nano <= span.start_time_unix_nano
        assert span.start_time_unix_nano < span.end_time_unix_nano <= request.end_time_unix_nano
    stages = [found["stage writer"], found["stage reader"]]
    assert {span.parent_span_id for span in stages} == {request.span_id}
    counted = {each.key: each.value.int_value for each in found["stage reader"].attributes}
    assert counted["omni.generated_tokens"] == 5


def test_the_exporter_of_the_environment_gets_the_spans() -> None:
    code = (
        "import os, sys\n"
        "from omni.server.serving.meters import spans_from_environment\n"
        "from omni.server.serving.meters import RequestRecord\n"
        "assert not any(name.startswith('opentelemetry') for name in sys.modules)\n"
        "service = {'OTEL_SERVICE_NAME': 'spoken'}\n"
        "resource = {'OTEL_RESOURCE_ATTRIBUTES': 'service.name=written'}\n"
        "for variables in ({}, service, resource):\n"
        "    for name in (*service, *resource):\n"
        "        os.environ.pop(name, None)\n"
        "    os.environ.update(variables)\n"
        "    spans = spans_from_environment()\n"
        "    spans.add(RequestRecord('mine', 'r', None, 1.0, 1.0, ended_s=2.0, status='ok'))\n"
        "    spans.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT,
        env={**os.environ, "OTEL_TRACES_EXPORTER": "console"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.count('"name": "request mine"') == 3
    names = re.findall(r'"service.name": "(.*)"', done.stdout)
    assert names == ["omni-pipeline", "spoken", "written"]

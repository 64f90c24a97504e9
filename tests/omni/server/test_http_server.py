"""The HTTP server: loading, health, keys, origins, hosts, and errors."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omni import Omni
from omni.pipelines.pipeline_config import PipelineConfig
from omni.server.http_server import bind
from omni.server.serving.meters import Meters
from omni.server.serving.pipeline_server import PipelineServer, ServedPipeline
from omni.server.serving.settings import ServerLimits, ServerSettings
from tests.support.gated_stage import gated_pipeline
from tests.support.http_call import call
from tests.support.live_server import LiveServer
from tests.support.patience import PATIENCE_S, wait_for
from tests.support.tokenizing_kind import TOKENIZING


def get(url: str, headers: dict[str, str] | None = None) -> tuple[int, Any, Any]:
    """Status, headers and JSON."""
    status, answered, reported = call(url, headers=headers)
    return status, answered, json.loads(reported)


@pytest.fixture(scope="module")
def keyed() -> Iterator[LiveServer]:
    keys, origins = ["key-1", "key-2"], ["https://a.example"]
    with LiveServer([gated_pipeline("keyed")], api_keys=keys, allow_origins=origins) as server:
        yield server


def test_health_reports_loading_until_the_server_is_ready(monkeypatch: pytest.MonkeyPatch):
    may_load, load, is_told = threading.Event(), ServedPipeline.load, threading.Event()
    monkeypatch.setattr(
        ServedPipeline, "load", lambda self: (may_load.wait(PATIENCE_S), load(self))
    )
    with LiveServer([gated_pipeline("slow")], is_ready=False) as server:
        server.pipelines.on_loaded = is_told.set
        status, _, body = get(f"{server.url}/health")
        assert status == 503 and not is_told.is_set()
        assert body == {
            "status": "loading",
            "pipelines": {"slow": {"status": "loading", "error": None}},
        }
        (model,) = get(f"{server.url}/v1/models")[2]["data"]
        assert model["id"] == "slow" and model["modalities"]["input"] is model["voices"] is None
        assert get(f"{server.url}/v1/audio/voices")[2]["voices"] == []
        may_load.set()
        while body["status"] == "loading":
            status, _, body = get(f"{server.url}/health")
        assert (status, body["status"]) == (200, "ready")
        assert body["pipelines"] == {"slow": {"status": "ready", "error": None}}
        assert is_told.wait(PATIENCE_S)


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_error(tmp_path: Path):
    stage = {"kind": "autoregressive", "model": str(tmp_path), "final_output": ("text",)}
    (tmp_path / "config.json").write_text("{}")
    broken = PipelineConfig.model_validate({"name": "broken", "stages": {"a": stage}})
    server = LiveServer([broken, gated_pipeline("fine")], is_ready=False)
    with pytest.raises(ValueError, match="stage 'a': "), server:
        server.join()


def test_a_pipeline_that_is_loaded_too_late_is_closed(monkeypatch: pytest.MonkeyPatch):
    pipeline = ServedPipeline(gated_pipeline("late"), ServerLimits(), Meters(()))
    pipeline.close()
    closed: list[Omni] = []
    close = Omni.close

    def note(omni: Omni) -> None:
        closed.append(omni)
        close(omni)

    monkeypatch.setattr(Omni, "close", note)
    pipeline.load()
    assert len(closed) == 1 and pipeline.state == "stopped"


def test_an_unknown_host_is_an_error():
    with pytest.raises(ValueError, match="--host 'no host' cannot be found"):
        bind(ServerSettings(host="no host"))


@pytest.mark.parametrize("key", ["", "with space", "new\nline", "käse"])
def test_a_key_that_no_header_can_carry_is_refused(key: str):
    with pytest.raises(ValueError, match="an API key is sent in a header"):
        ServerSettings(api_keys=(key,))


@pytest.mark.parametrize("runtime", ["inline", "processes"])
def test_a_custom_kind_of_stage_may_have_a_tokenizer(
    seeded: Callable[[str], str], tmp_path: Path, runtime: str
):
    lexicon, plain = seeded("qwen2"), {"kind": "gated", "final_output": ["text"]}
    reported = {"kind": TOKENIZING, "lexicon": lexicon, "final_output": ["text"]}
    config = PipelineConfig.model_validate(
        {
            "name": "own",
            "runtime": {"kind": runtime},
            "stages": {"plain": plain, "reported": reported},
        }
    )
    pipeline = ServedPipeline(config, ServerLimits(), Meters(()))
    try:
        pipeline.load()
        tokenizer = pipeline.tokenizers["reported"]
        assert tokenizer is not None and tokenizer.decode(tokenizer.encode("Once")) == "Once"
        assert pipeline.tokenizers["plain"] is None
    finally:
        pipeline.close()


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Bearer ", 401),
        ("Basic key-1", 401),
        ("Bearer key-1x", 401),
        ("Bearer key-1", 200),
        ("bearer key-2", 200),
    ],
)
def test_a_valid_key_is_required(keyed: LiveServer, authorization: str | None, status: int):
    headers = {} if authorization is None else {"Authorization": authorization}
    found, _, body = get(f"{keyed.url}/v1/models", headers)
    assert found == status
    assert status == 200 or body["error"]["code"] == "invalid_api_key"
    assert get(f"{keyed.url}/health")[0] == 200, "health needs no key"
    assert get(f"{keyed.url}/openapi.json")[0] == 200, "nor does the description"


@pytest.mark.parametrize(
    ("origin", "status"),
    [(None, 200), ("https://a.example", 200), ("https://b.example", 403), ("null", 403)],
)
def test_web_pages_of_other_hosts_need_permission(
    keyed: LiveServer, origin: str | None, status: int
):
    headers = {"Authorization": "Bearer key-1", **({"Origin": origin} if origin else {})}
    found, answered, _ = get(f"{keyed.url}/v1/models", headers)
    assert found == status
    assert answered["access-control-allow-origin"] == (origin if status == 200 else None)


def test_a_preflight_request_returns_what_an_allowed_page_may_send(keyed: LiveServer):
    request = urllib.request.Request(
        f"{keyed.url}/v1/models",
        method="OPTIONS",
        headers={"Origin": "https://a.example", "Access-Control-Request-Method": "POST"},
    )
    with urllib.request.urlopen(request) as answer:
        assert answer.status == 204
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        assert "authorization" in answer.headers["access-control-allow-headers"]
        # Responses are deleted.
        assert answer.headers["access-control-allow-methods"] == "GET, POST, DELETE"


def test_a_server_without_keys_accepts_local_names_only():
    foreign = [{"Host": "[::1"}, {"Host": "[x]"}, {"Origin": "http://["}]
    with LiveServer([gated_pipeline("local")]) as server:
        for given in ({"Host": "rebound.example"}, *foreign):
            status, headers, body = get(f"{server.url}/v1/models", given)
            assert status == 403 and body["error"]["message"], given
            assert headers["x-request-id"]
            assert given in foreign or "local names only" in body["error"]["message"]
        assert get(f"{server.url}/v1/models", {"Host": "localhost:1"})[0] == 200


def test_every_answer_has_a_unique_id(keyed: LiveServer):
    ids = {get(f"{keyed.url}/health")[1]["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


def test_an_internal_error_is_answered_without_its_details(
    keyed: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken(*_: object) -> None:
        raise KeyError("a detail")

    monkeypatch.setattr(PipelineServer, "find", broken)
    with caplog.at_level("INFO", "omni"):
        status, headers, body = get(
            f"{keyed.url}/v1/models/keyed", {"Authorization": "Bearer key-1"}
        )
        wait_for(lambda: any(headers["x-request-id"] in each for each in caplog.messages))
    assert status == 500 and body["error"]["type"] == "server_error"
    assert "a detail" not in body["error"]["message"] and "a detail" in caplog.text


@pytest.mark.parametrize("path", ["/nowhere", "/v1/nowhere", "/v1/models/none"])
def test_an_unknown_address_has_an_error_in_openais_shape(keyed: LiveServer, path: str):
    status, _, body = get(f"{keyed.url}{path}", {"Authorization": "Bearer key-1"})
    assert status == 404
    assert set(body["error"]) == {"message", "type", "param", "code"}

"""``omni serve`` finds mistakes before it starts, and ends well."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest
from typer.testing import CliRunner

from omni.commands.cli import app
from omni.server.http_server import HttpServer
from tests.support.import_graph import ROOT
from tests.support.patience import PATIENCE_S


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[HttpServer]:
    """Servers that would have run."""
    would_run: list[HttpServer] = []

    def note(self: HttpServer) -> None:
        self.on_start()
        self.listener.close()
        would_run.append(self)

    monkeypatch.setattr(HttpServer, "run", note)
    return would_run


def invoke(*arguments: str, **env: str) -> Any:
    return CliRunner().invoke(app, ["serve", *arguments], env=env)


def test_a_message_is_printed_when_all_pipelines_are_loaded(
    served: list[HttpServer], capsys: pytest.CaptureFixture[str]
):
    assert invoke("two_step", "--port", "0").exit_code == 0
    served[0].pipelines.on_loaded()
    assert capsys.readouterr().err == "ready\n"


def test_a_mistake_in_any_pipeline_is_reported_before_anything_starts(
    served: list[HttpServer], tmp_path: Path
):
    (tmp_path / "wrong.yaml").write_text("name: wrong\nstages: {a: {knd: encoder}}\n")
    result = invoke("two_step", str(tmp_path / "wrong.yaml"), "--port", "0")
    assert result.exit_code == 2 and not served
    assert re.search(r"error: .*wrong.yaml:2: stages.a.kind: missing", result.stderr)


def test_the_same_pipeline_twice_is_refused(served: list[HttpServer]):
    result = invoke("two_step", "two_step", "--port", "0")
    assert result.exit_code == 2 and not served
    assert "error: two pipelines are named 'two_step'" in result.stderr


def test_a_port_in_use_is_a_clear_error(served: list[HttpServer]):
    with socket.create_server(("127.0.0.1", 0)) as other:
        result = invoke("two_step", "--port", str(other.getsockname()[1]))
    assert result.exit_code == 2 and not served
    assert "is in use by another program; choose one with --port" in result.stderr


def test_the_pipelines_and_the_address_are_printed(served: list[HttpServer]):
    result = invoke("two_step", "omni_speech", "--port", "0")
    assert result.exit_code == 0
    assert re.fullmatch(
        r"serving two_step, omni_speech at http://127\.0\.0\.1:\d+\n", result.stderr
    )
    (server,) = served
    assert list(server.pipelines.pipelines) == ["two_step", "omni_speech"]


def test_flags_become_settings(served: list[HttpServer]):
    flags = "--api-key a --api-key b --max-waiting-requests 3 --request-timeout 9 --max-body-mib 2"
    assert invoke("two_step", "--port", "0", *flags.split()).exit_code == 0
    settings = served[0].pipelines.settings
    assert [key.get_secret_value() for key in settings.api_keys] == ["a", "b"]
    limits = settings.limits
    assert limits.max_waiting_requests == 3 and limits.request_timeout_s == 9
    assert limits.max_body_bytes == 2 * 2**20 and limits.max_running_requests is None


@pytest.mark.parametrize(
    ("alias", "message"),
    [
        ("gpt-4o", "--alias is NAME=PIPELINE, such as gpt-4o=chat, got 'gpt-4o'"),
        ("=two_step", "--alias is NAME=PIPELINE, such as gpt-4o=chat, got '=two_step'"),
        ("gpt-4o=two_steps", "the pipeline of an alias 'two_steps' is none of the pipelines that"),
        ("a=b --alias a=c", "--alias a: b and c; choose one"),
        ("two_step=two_step", "the alias 'two_step' is the name of a pipeline that is served"),
    ],
)
def test_an_alias_of_an_unknown_pipeline_is_refused(
    served: list[HttpServer], alias: str, message: str
):
    result = invoke("two_step", "--port", "0", "--alias", *alias.split())
    assert result.exit_code == 2 and not served
    assert f"error: {message}" in result.stderr


def test_aliases_name_pipelines(served: list[HttpServer]):
    flags = ["--alias", "a=two_step", "--alias", "b=two_step"]
    assert invoke("two_step", "--port", "0", *flags).exit_code == 0
    pipelines = served[0].pipelines
    assert list(pipelines.names) == ["two_step", "a", "b"]
    assert pipelines.find("b") is pipelines.find("two_step")


@pytest.mark.parametrize(("given", "keys"), [("", []), ("a", ["a"]), ("a, b", ["a", "b"])])
def test_keys_may_come_from_the_environment(served: list[HttpServer], given: str, keys: list[str]):
    assert invoke("two_step", "--port", "0", OMNI_API_KEY=given).exit_code == 0
    found = served[0].pipelines.settings.api_keys
    assert [key.get_secret_value() for key in found] == keys


def test_an_invalid_key_is_reported_without_showing_it(served: list[HttpServer]):
    result = invoke("two_step", "--port", "0", "--api-key", "my secret")
    assert result.exit_code == 2 and not served
    assert "error: api_keys" in result.stderr and "my secret" not in result.stderr


def test_a_signal_stops_the_server_cleanly_even_while_it_loads():
    command = [sys.executable, "-m", "omni", "serve", "two_step", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("serving two_step at ")
        process.send_signal(signal.SIGTERM)
        reported = process.stderr.read()
        assert process.wait(PATIENCE_S) == 0, reported
        assert "Traceback" not in reported


def _status(url: str) -> int | None:
    """Of an answer; None if nobody answers any more."""
    try:
        with urlopen(url, timeout=PATIENCE_S) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code
    except (URLError, ConnectionError):
        return None


HALF_SAID = """\
import time
from typing import Literal
from stages import StageConfig


class HalfSaidConfig(StageConfig):
    kind: Literal["half_said"]

    def build_stage(self, name):
        from tests.support.fake_stage import FakeStage

        class HalfSaid(FakeStage):
            def step(self):
                time.sleep(0.01)
                outputs = super().step()
                self.endless = (*self.held,)
                return outputs

        return HalfSaid(name)
"""


def test_a_second_signal_aborts_running_requests_with_an_error(tmp_path: Path):
    (tmp_path / "half.py").write_text(HALF_SAID)
    stage = "{kind: 'half.py:HalfSaidConfig', final_output: text}"
    (tmp_path / "mine.yaml").write_text(f"name: mine\nstages:\n  speaker: {stage}\n")
    with subprocess.Popen(
        [sys.executable, "-m", "omni", "serve", "mine.yaml", "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stderr is not None
        try:
            url = process.stderr.readline().split()[-1]
            assert process.stderr.readline() == "ready\n"
            body = {"model": "mine", "stream": True, "prompt": "Once upon a time"}
            asked = Request(f"{url}/v1/completions", json.dumps(body).encode())
            asked.add_header("Content-Type", "application/json")
            with urlopen(asked, timeout=PATIENCE_S) as answer:
                assert b"speaker(" in next(answer)
                process.send_signal(signal.SIGINT)
                while _status(f"{url}/health") is not None:
                    time.sleep(0.05)
                process.send_signal(signal.SIGINT)
                *_, last = (line for line in answer if line.strip())
            reported = process.stderr.read()
            assert process.wait(PATIENCE_S) == 0, reported
        finally:
            process.kill()
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "stopping"
    assert "Traceback" not in reported

"""``omni bench`` on the command line: output, files, and errors."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from omni.commands.cli import app
from tests.support.fake_openai import FakeOpenAI, chat_piece, in_thread, usage_piece
from tests.support.import_graph import ROOT
from tests.support.marked_processes import heed_interrupts
from tests.support.patience import PATIENCE_S, wait_for
from tests.support.tables import rows

DONE = b"data: [DONE]\n\n"
NOWHERE = "http://127.0.0.1:1"


def bench(*arguments: str | Path, **options: Any) -> Result:
    given = ["bench", *map(str, arguments)]
    return CliRunner().invoke(app, given, catch_exceptions=False, **options)


async def hello(path: str, body: Any) -> AsyncIterator[Any]:
    """Answer in two pieces; a token per character of the prompt, half of them cached."""
    yield chat_piece("Hel")
    yield chat_piece("lo")
    length = len(json.dumps(body["messages"]))
    yield usage_piece(length, 2, cached=length // 2)
    yield DONE


def level_of(path: Path) -> Any:
    (level,) = json.loads(path.read_text())["levels"]
    return level


@pytest.mark.usefixtures("checkpoint_cache")
def test_a_pipeline_is_measured_in_process_with_its_hits(tmp_path: Path):
    flags = ("--endpoint", "completions", "--requests", "4", "--max-tokens", "3", "--ignore-eos")
    shape = ("--prompt-tokens", "64", "--shared-prefix-tokens", "48", "--turns", "2")
    files = ("-o", tmp_path / "out.json", "--plot", tmp_path / "out.svg")
    limits = ("--goodput", "end_to_end=1000,first_token=1000")
    result = bench("two_step", "--concurrency", "1,2", *flags, *shape, *files, *limits)
    assert result.exit_code == 0, result.stderr
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["target"] == "two_step, in process" and written["is_complete"]
    assert written["settings"]["concurrency"] == "1,2" and "json" not in written["settings"]
    assert [level["concurrency"] for level in written["levels"]] == [1, 2]
    for level in written["levels"]:
        assert level["requests"]["ok"] == 4 and level["num_good"] == 4
        assert level["tokens"]["output"] == 12 and not level["tokens"]["are_pieces"]
        assert level["latencies"]["end_to_end"]["count"] == 4
        assert level["generator"]["loop_lag"]["count"] > 0
    assert written["levels"][0]["tokens"]["cached"] > 0, "prefixes and turns are shared"
    assert "first token" in result.stdout and "event loop late by" in result.stdout
    drawn = ElementTree.parse(tmp_path / "out.svg").getroot()
    texts = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    expected = ["omni bench: two_step, in process", "requests at once", "end to end, s", "p99"]
    expected += ["requests per second", "good requests per second", "tokens per second"]
    assert set(expected) <= set(texts)


@pytest.mark.parametrize(
    ("module", "flags"),
    [("matplotlib", ["two_step", "--plot", "out.svg"]), ("httpx2", ["--url", NOWHERE])],
)
def test_a_missing_package_is_named_with_its_extra(
    module: str, flags: list[str], monkeypatch: pytest.MonkeyPatch
):
    for name in ("http_target", "openai_requests", "openai_answers"):
        monkeypatch.delitem(sys.modules, f"omni.commands.bench.{name}", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    result = bench(*flags)
    assert result.exit_code == 2
    assert f"package that is not installed ({module})" in result.stderr
    assert "pip install -e '.[bench]'" in result.stderr


@pytest.mark.usefixtures("checkpoint_cache")
def test_the_lines_of_a_file_are_sent_repeatedly_in_process(tmp_path: Path):
    (tmp_path / "in.jsonl").write_text(
        '{"request_id": "a", "prompt": "Once", "sampling": {"max_tokens": 2}}\n'
        '{"prompt": "Twice", "sampling": {"reader": {"max_tokens": 3}}}\n'
    )
    out = tmp_path / "out.json"
    result = bench("two_step", "-i", tmp_path / "in.jsonl", "--requests", "6", "--concurrency", "6",
                   "-o", out, "--warmup", "0")  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert level_of(out)["requests"]["ok"] == 6, "the same id may run several times at once"
    assert level_of(out)["tokens"]["output"] == 3 * 2 + 3 * 3


def test_any_openai_server_is_measured(tmp_path: Path):
    out = tmp_path / "out.json"
    with in_thread(FakeOpenAI(hello)) as server:
        result = bench("--url", server.url, "--rate", "400", "--requests", "12", "-o", out)
    assert result.exit_code == 0, result.stderr
    level = level_of(out)
    assert level["rate"] == 400 and level["requests"]["ok"] == 12
    assert level["tokens"]["hit_rate"] == pytest.approx(0.5, abs=0.01)
    assert level["latencies"]["between_tokens"]["count"] == 12
    assert len(server.requests) == 2 + 4 + 12, "probes, warm-up, measurement"


def test_failures_are_counted_by_kind_and_429_separately(tmp_path: Path):
    out = tmp_path / "out.json"

    async def sometimes(path: str, body: Any) -> AsyncIterator[Any]:
        number = int(body["messages"][0]["content"])
        if number % 2:
            yield {"error": {"message": f"number {number} died"}}
        else:
            yield chat_piece("x")
            yield DONE

    lines = [{"messages": [{"role": "user", "content": str(number)}]} for number in range(6)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    with in_thread(FakeOpenAI(sometimes)) as server:
        flags = ("--url", server.url, "-i", tmp_path / "in.jsonl", "-o", out, "--warmup", "0")
        result = bench(*flags)
        assert result.exit_code == 1
        counts = level_of(out)["requests"]
        assert (counts["ok"], counts["failed"], counts["rejected"]) == (3, 3, 0)
        assert counts["failures"] == {"error in the stream": 3}
        assert "load 1: 3 failed: error in the stream: number 1 died" in result.stderr
        assert level_of(out)["tokens"]["are_pieces"] and "not told" in result.stdout
        server.status = 429
        result = bench(*flags)
        assert result.exit_code == 1, "no request was answered"
        counts = level_of(out)["requests"]
        assert (counts["ok"], counts["failed"], counts["rejected"]) == (0, 0, 6)
        assert level_of(out)["rejection"]["count"] == 6 and "until status 429" in result.stdout


def test_the_key_may_come_from_the_environment_and_is_never_shown(tmp_path: Path):
    out = tmp_path / "out.json"
    with in_thread(FakeOpenAI(hello)) as server:
        result = bench("--url", server.url, "--requests", "2", "-o", out, "--api-key", "sesame")
        named = {headers["authorization"] for _, headers, _ in server.requests}
        assert result.exit_code == 0 and named == {"bearer sesame"}
        server.requests.clear()
        bench("--url", server.url, "--requests", "2", "-o", out, env={"OMNI_API_KEY": "a,b"})
        assert {headers["authorization"] for _, headers, _ in server.requests} == {"bearer a"}
    assert "sesame" not in out.read_text() + result.output


@pytest.mark.parametrize(
    ("flags", "reported"),
    rows(
        """
 | give either a pipeline or --url
two_step --url NOWHERE | give either a pipeline or --url
two_setp | two_setp
two_step --model x | --model goes together with --url
two_step --speech | --speech goes together with --url
--url NOWHERE --runtime inline | --runtime is about a pipeline
--url NOWHERE --set a=b | --set is about a pipeline
--url NOWHERE --voice x | --voice goes together with --speech
--url nonsense | --url: must be such as http://localhost:8000
--url localhost:8000 | --url: must be such as http://localhost:8000
--url ftp://x | --url: must be such as http://localhost:8000
--url http://x:99999 | --url: must be such as http://localhost:8000
--url http://x/?a=b | --url: must be such as http://localhost:8000
--url NOWHERE | --url NOWHERE: cannot be reached
two_step --concurrency 0 | --concurrency: must be numbers above 0
two_step --concurrency 1,x | --concurrency: must be numbers above 0
two_step --concurrency 1.5 | --concurrency: must be whole numbers
two_step --concurrency 2,2 | --concurrency: a number stands twice
two_step --concurrency 1e9 | --concurrency: must be from 1 to 65536
two_step --rate nan | --rate: must be numbers above 0
two_step --rate 1e12 | --rate: must be above 0 and at most 1e+06 requests a second
two_step --rate 1 --concurrency 1 | give one of them
two_step --goodput speed=1 | --goodput: unknown measure 'speed'
two_step --goodput first_tokn=1 | did you mean 'first_token'?
two_step --goodput first_token | --goodput: must be limits such as
two_step --goodput first_token=x | --goodput: first_token: must be a number
two_step --goodput end_to_end=1,end_to_end=2 | end_to_end stands twice
two_step --requests 0 | --requests
two_step --endpoint x | --endpoint
two_step --endpoint speech | --endpoint speech goes together with --url
--url NOWHERE --endpoint speech --turns 2 | --turns says nothing to
--url NOWHERE --endpoint transcriptions | goes together with --input
--url NOWHERE --endpoint embeddings --speech | --speech is about chats
two_step -i x --endpoint chat | --endpoint is about requests that are
two_step --plot out.png | --plot: must end in .svg
two_step --json /nowhere/out.json | --json: '/nowhere/out.json' cannot be
two_step -i nowhere.jsonl | --input: nowhere.jsonl: cannot be read
two_step -i x --turns 2 | --turns is about requests that are made up
two_step --prompt-tokens 8 --shared-prefix-tokens 8 | must be fewer than
""".replace("NOWHERE", NOWHERE)
    ),
)
def test_a_mistake_is_reported_with_its_flag_before_anything_runs(flags: str, reported: str):
    result = bench(*flags.split())
    assert result.exit_code == 2
    assert reported in result.stderr and "Traceback" not in result.stderr


def test_all_wrong_lines_are_reported_before_anything_is_sent(tmp_path: Path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n{broken\n\n{"promt": "x"}\n')
    with in_thread(FakeOpenAI(hello)) as server:
        result = bench("--url", server.url, "-i", tmp_path / "in.jsonl")
    assert result.exit_code == 2 and not server.requests
    assert "in.jsonl:2: not valid JSON" in result.stderr and "in.jsonl:4: " in result.stderr


def test_a_refused_first_request_is_an_error():
    with in_thread(FakeOpenAI(hello)) as server:
        server.status = 400
        result = bench("--url", server.url)
    assert result.exit_code == 2
    assert "the first request was not answered: status 400: as it was told to" in result.stderr


def test_an_interrupt_prints_and_writes_the_results_so_far(tmp_path: Path):
    """Three requests are answered; the fourth one hangs."""
    served = 0

    async def three(path: str, body: Any) -> AsyncIterator[Any]:
        nonlocal served
        served += 1
        yield chat_piece("x")
        if served > 3:
            while True:
                yield b": still there\n\n"
                await asyncio.sleep(0.05)
        yield DONE

    (tmp_path / "in.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n' * 9)
    with in_thread(FakeOpenAI(three)) as server:
        flags = ["--url", server.url, "-i", str(tmp_path / "in.jsonl"), "--warmup", "0"]
        process = subprocess.Popen(
            [sys.executable, "-m", "omni", "bench", *flags, "-o", str(tmp_path / "out.json")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            preexec_fn=heed_interrupts,
        )
        try:
            wait_for(lambda: served > 3 or process.poll() is not None)
            process.send_signal(signal.SIGTERM)
            printed, reported = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGTERM, reported
    assert "cut short" in printed and "end to end" in printed
    assert "interrupted: what stands above is of the 3 requests that had ended" in reported
    assert "Traceback" not in reported
    written = json.loads((tmp_path / "out.json").read_text())
    assert not written["is_complete"]
    counts = written["levels"][0]["requests"]
    assert (counts["ok"], counts["unfinished"]) == (3, 1)

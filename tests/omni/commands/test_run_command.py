"""Files and messages of ``omni run`` after every kind of end, without models."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from omni.commands import run_command
from omni.commands.cli import app
from tests.support.command_line import omni
from tests.support.import_graph import ROOT
from tests.support.scripted_omni import ScriptedOmni
from tests.support.tables import rows

NUMBER = 7


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedOmni]:
    class Scripted(ScriptedOmni):
        pass

    monkeypatch.setattr(run_command, "Omni", Scripted)
    return Scripted


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    path = tmp_path / "requests.jsonl"
    lines = [json.dumps({"prompt": f"prompt {number}"}) for number in range(NUMBER)]
    lines[2] = "{"
    lines[4] = '{"prompt": "please fail"}'
    path.write_text("\n".join(lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    content = path.read_bytes()
    assert content.endswith(b"\n")
    return [json.loads(line) for line in content.splitlines()]


def raise_at(number: int, error: BaseException) -> Any:
    def before(done: int) -> None:
        if done == number:
            raise error

    return staticmethod(before)


def test_a_finished_run_prints_the_path_of_its_outputs(requests: Path, tmp_path: Path) -> None:
    result = omni("run", "two_step", "-i", requests, "-o", tmp_path / "out")
    assert result.exit_code == 1, "two of them failed"
    assert f"{tmp_path / 'out' / 'outputs.jsonl'}: 7 requests, 2 failed\n" in result.stderr
    lines = read(tmp_path / "out/outputs.jsonl")
    assert [line["request_id"] for line in lines] == [f"line-{number + 1}" for number in range(7)]
    printed = re.findall(r"^=== (.*)$", result.stdout, re.M)
    assert sorted(printed) == [line["request_id"] for line in lines]


def test_an_interrupted_run_prints_its_progress_and_is_resumed(
    requests: Path, tmp_path: Path, scripted: type[ScriptedOmni]
) -> None:
    out = tmp_path / "out"
    command = ("run", "two_step", "-i", requests, "-o", out)
    scripted.before = raise_at(2, KeyboardInterrupt())
    result = omni(*command, status=130)
    assert "interrupted: 3 of 7 requests are done, in " in result.stderr
    assert f"{out / 'outputs.partial.jsonl'}; the same command with --resume" in result.stderr
    assert [line["position"] for line in read(out / "outputs.partial.jsonl")] == [2, 6, 4]

    assert "was cut short; go on with --resume" in omni(*command, status=2).stderr
    assert scripted.built == 1, "before models are loaded"

    scripted.before = raise_at(1, KeyboardInterrupt())
    assert "4 of 7 requests are done" in omni(*command, "--resume").stderr
    del scripted.before
    result = omni(*command, "--resume", status=1)
    assert "7 requests, 4 of them before, 2 failed" in result.stderr
    assert "requests: 3, failed: 0" in result.stderr
    disturbed = (out / "outputs.jsonl").read_bytes()
    assert not (out / "outputs.partial.jsonl").exists()

    omni(*command, "--overwrite")
    assert (out / "outputs.jsonl").read_bytes() == disturbed

    built = scripted.built
    result = omni(*command, "--resume")
    assert result.exit_code == 1, "the status of the first run"
    assert "7 requests, 7 of them before, 2 failed" in result.stderr
    assert scripted.built == built, "there is nothing to run"


def test_an_interruption_before_anything_is_done_leaves_nothing(
    requests: Path, tmp_path: Path, scripted: type[ScriptedOmni]
) -> None:
    requests.write_text('{"prompt": "x"}')
    scripted.before = raise_at(0, KeyboardInterrupt())
    result = omni("run", "two_step", "-i", requests, "-o", tmp_path / "out", status=130)
    assert result.stderr == "interrupted: 0 of 1 requests are done\n"
    assert list((tmp_path / "out").iterdir()) == []


def test_sigterm_ends_a_run_like_an_interruption(
    requests: Path, tmp_path: Path, scripted: type[ScriptedOmni]
) -> None:
    assert threading.current_thread() is threading.main_thread()

    def before(done: int) -> None:
        if done == 2:
            signal.raise_signal(signal.SIGTERM)

    scripted.before = staticmethod(before)
    handler = signal.getsignal(signal.SIGTERM)
    result = omni("run", "two_step", "-i", requests, "-o", tmp_path / "out", status=143)
    assert "interrupted: 3 of 7 requests are done" in result.stderr
    assert len(read(tmp_path / "out/outputs.partial.jsonl")) == 3
    assert signal.getsignal(signal.SIGTERM) is handler


def test_without_a_folder_texts_are_printed_as_they_finish(
    requests: Path, scripted: type[ScriptedOmni]
) -> None:
    scripted.before = raise_at(3, KeyboardInterrupt())
    result = omni("run", "two_step", "-i", requests, status=130)
    shown = [line for line in result.stdout.splitlines() if line.startswith("===")]
    assert shown == ["=== line-3", "=== line-7", "=== line-5", "=== line-2"]
    assert "line-3: error: " in result.stderr
    assert "interrupted: 4 of 7 requests are done, and stand above" in result.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="limits of files are POSIX's")
def test_a_file_above_the_size_limit_is_named(requests: Path, tmp_path: Path) -> None:
    """With a real limit: run.json does not fit, then the second line does not."""
    out = tmp_path / "out"
    command = ("run", "two_step", "-i", requests, "-o", out)
    prompts = ("a", "b" * 100_000)
    requests.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit, place in ((100, "run.json"), (100_000, "outputs.partial.jsonl")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            result = omni(*command)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert result.exit_code == 1
        assert f"{out / place}: File too large; " in result.stderr
    assert omni(*command, "--resume").exit_code == 0
    assert len(read(out / "outputs.jsonl")) == 2


@pytest.mark.parametrize(
    ("flags", "printed"),
    [
        (["--resume"], "--resume is about the outputs in --output-dir: give that too"),
        (["--overwrite"], "--overwrite is about the outputs in --output-dir"),
        (["-o", "out", "--resume", "--overwrite"], "give one of them"),
    ],
)
def test_flags_without_an_effect_are_refused(flags: list[str], printed: str) -> None:
    assert printed in omni("run", "two_step", "-p", "x", *flags, status=2).stderr


CHANGES = rows("""
-p y | the requests: 1 then, 2 now
--max-tokens 3 | stages.writer.sampling.max_tokens: 32 then, 3 now; \\
stages.reader.sampling.max_tokens: 16 then, 3 now
--temperature 1 | sampling.temperature: 0.0 then, 1.0 now
--set stages.writer.engine.num_blocks=64 | stages.writer.engine.num_blocks: 512 then, 64 now
--speaker Ethan | speaker: None then, 'Ethan' now
""")


@pytest.mark.parametrize(("flags", "printed"), CHANGES)
def test_a_different_run_is_not_resumed(flags: str, printed: str, tmp_path: Path) -> None:
    command = ("run", "two_step", "-p", "x", "-o", tmp_path)
    assert omni(*command).exit_code == 0
    assert omni(*command, "--resume").exit_code == 0
    result = omni(*command, *flags.split(), "--resume", status=2)
    assert "something else is run now" in result.stderr
    for part in printed.split("; "):
        assert part in result.stderr


def test_the_standard_input_is_read_and_resumed(
    tmp_path: Path, scripted: type[ScriptedOmni]
) -> None:
    scripted.before = raise_at(1, KeyboardInterrupt())
    command = ("run", "two_step", "--input", "-", "-o", tmp_path)
    lines = '{"prompt": "a"}\n{"prompt": "b"}\n'
    assert omni(*command, stdin=lines).exit_code == 130
    del scripted.before
    assert omni(*command, "--resume", stdin=lines + "\n").exit_code == 2
    assert omni(*command, "--resume", stdin=lines).exit_code == 0
    assert [line["request_id"] for line in read(tmp_path / "outputs.jsonl")] == ["line-1", "line-2"]


def test_a_request_file_whose_name_is_not_utf8_runs_to_its_end(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xff.jsonl"))
    path.write_text('{"prompt": "a"}\n{\n{"prompt": "b"}\n')
    omni("run", "two_step", "-i", path, "-o", tmp_path / "out", status=1)
    first, bad, second = read(tmp_path / "out/outputs.jsonl")
    assert first["error"] is None and second["error"] is None
    assert "r\\udcff.jsonl:2:2: not valid JSON" in bad["error"]


def test_characters_that_the_terminal_cannot_show_end_no_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="latin-1"))
    app(["run", "two_step", "-p", "Gr\xfc\xdfe \u4e16", "-q"], standalone_mode=False)
    assert b"said Gr\xfc\xdfe \\u4e16\n" in shown.getvalue()


def test_an_unexpected_error_is_shown_without_a_traceback(
    scripted: type[ScriptedOmni], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("the driver has crashed")
    error.__cause__ = KeyError("k")
    scripted.before = raise_at(0, error)
    result = omni("run", "two_step", "-p", "x", status=1)
    assert result.stderr.startswith(
        "error: RuntimeError: the driver has crashed: KeyError: 'k' (unexpected; "
    )
    monkeypatch.setenv("OMNI_TRACEBACK", "1")
    with pytest.raises(RuntimeError, match="has crashed"):
        omni("run", "two_step", "-p", "x")
    monkeypatch.delenv("OMNI_TRACEBACK")
    with pytest.raises(RuntimeError, match="has crashed"):
        omni("run", "two_step", "-p", "x", "-vv")


def test_the_bar_shows_what_is_left(
    requests: Path, scripted: type[ScriptedOmni], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    result = omni("run", "two_step", "-i", requests)
    assert "loading models" in result.stderr
    assert "7/7" in result.stderr
    assert "left" in result.stderr
    assert sys.stdout is not None and "7/7" not in result.stdout
    assert "7/7" not in omni("run", "two_step", "-i", requests, "-q").stderr


def test_a_run_killed_at_any_point_is_resumed_to_the_same_outputs(tmp_path: Path) -> None:
    """With real kills; ``torture/killed_runs.py`` has random ones, over a real pipeline."""
    command = [sys.executable, "-m", "tests.support.killed_forks", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20

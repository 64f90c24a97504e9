"""The commands with stages in separate processes: the same results, clear errors, and no
processes left running."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.command_line import omni, outputs_without_times, write_requests
from tests.support.marked_processes import MarkedRun
from tests.support.patience import wait_for
from tests.support.trace_file import names_of, read_trace

pytestmark = pytest.mark.usefixtures("checkpoint_cache")

PROMPT = "Once upon a time, in a house by the sea, a clock told "
PROMPTS = ("--prompt", PROMPT + "all the time", "--prompt", PROMPT + "no time at all")


def test_a_run_in_processes_writes_what_a_run_inline_writes(tmp_path: Path) -> None:
    omni("run", "two_step", *PROMPTS, "--output-dir", tmp_path / "inline", status=0)
    run = MarkedRun(
        *("run", "two_step", *PROMPTS, "--output-dir", "apart", "--trace", "out.json"),
        *("--runtime", "processes", "-v"),
        folder=tmp_path,
    )
    status, _, err = run.finish()
    assert status == 0, err
    assert outputs_without_times(tmp_path / "apart") == outputs_without_times(tmp_path / "inline")
    assert "[writer/0] " in err, "log lines of workers are shown with their stage"
    events = read_trace(tmp_path / "out.json")
    for stage in ("writer", "reader"):
        assert names_of(events, stage, "prompt-1")[-1] in ("step", "hit")
    transfers = [each for each in events if each["ph"] == "b"]
    assert [each["args"]["bytes"] > 0 for each in transfers] == [True, True]
    run.check_nothing_left()


@pytest.mark.usefixtures("nothing_left")
def test_a_kind_in_a_file_runs_in_processes(tmp_path: Path) -> None:
    (tmp_path / "kinds.py").write_text(
        "from typing import Literal\n"
        "from stages import StageConfig\n"
        "class MurmurConfig(StageConfig):\n"
        "    kind: Literal['murmur']\n"
        "    def build_stage(self, name):\n"
        "        from tests.support.fake_stage import FakeStage\n"
        "        return FakeStage(name)\n"
    )
    stage = "{kind: 'kinds.py:MurmurConfig', final_output: text}"
    (tmp_path / "mine.yaml").write_text(f"name: mine\nstages:\n  murmurer: {stage}\n")
    result = omni("run", tmp_path / "mine.yaml", "-p", "hi", "--runtime", "processes", status=0)
    assert "murmurer(hi)" in result.stdout


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Check that commands in this process leave at most the fork server running."""

    def running() -> set[int]:
        children = psutil.Process().children(recursive=True)
        return {each.pid for each in children if not is_fork_server(each)}

    before = running()
    yield
    wait_for(lambda: running() <= before)


def is_fork_server(process: psutil.Process) -> bool:
    """Return True for the child process that forks workers."""
    try:
        is_ours = process.ppid() == os.getpid()
        return is_ours and "stages.remote.fork_server" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def test_ctrl_c_leaves_nothing_running(tmp_path: Path) -> None:
    lines = [
        {"prompt": PROMPT, "sampling": {"writer": {"max_tokens": number, "ignore_eos": True}}}
        for number in (4, *[400] * 200)  # a short request, and long work after it
    ]
    write_requests(tmp_path, *lines)
    run = MarkedRun(
        *("run", "two_step", "--input", "requests.jsonl", "--output-dir", "out"),
        *("--trace", "out.json", "--runtime", "processes"),
        folder=tmp_path,
    )
    begun = tmp_path / "out/outputs.partial.jsonl"
    wait_for(lambda: begun.exists() or run.process.poll() is not None)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    status, _, err = run.finish()
    assert status == 130, err
    # It may come between the line and its being counted.
    assert "1 of 201 requests are done, in out" in err or "0 of 201 requests are done" in err
    run.check_nothing_left()
    read_trace(tmp_path / "out.json")


def test_what_cannot_run_is_one_error_and_starts_nothing() -> None:
    """In this process, whose children can be counted."""
    flags = ("--runtime", "processes", "--set", "stages.reader.placement.device=cuda:99")
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    result = omni("run", "two_step", "--prompt", "Hello", *flags, status=2)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    reported = "error: stage 'reader': placement.device: 'cuda:99' was asked for, but torch sees "
    assert line.startswith(reported), line
    assert {each.pid for each in psutil.Process().children(recursive=True)} <= before


def one_error(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a command prints, those of its workers included."""
    result = omni("run", *arguments, status=2)
    assert result.stdout == ""
    assert capfd.readouterr() == ("", ""), "of workers"
    (line,) = result.stderr.splitlines()
    return line


@pytest.mark.usefixtures("nothing_left")
def test_a_stage_that_cannot_start_is_one_error_and_leaves_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    flags = ("--runtime", "processes", "--set", "stages.reader.engine.max_model_len=9999999")
    line = one_error(capfd, "two_step", "--prompt", "Hello", *flags)
    assert line.startswith("error: stage 'reader': max_model_len"), line


ONLY_ONCE = """\
from pathlib import Path

seen = Path(__file__).with_name("seen")
if seen.exists():
    raise ImportError("not in a worker")
seen.touch()


def words(context):
    return context.sources[0].text
"""


@pytest.mark.usefixtures("nothing_left")
def test_a_transform_that_a_worker_cannot_import_is_one_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The module lets itself be imported once, where the pipeline is checked."""
    (tmp_path / "mine.py").write_text(ONLY_ONCE)
    (tmp_path / "mine.yaml").write_text(
        "name: mine\n"
        "runtime: {kind: processes}\n"
        "stages:\n"
        "  a: {kind: autoregressive, model: seeded:qwen2}\n"
        "  b:\n"
        "    kind: autoregressive\n"
        "    model: seeded:llama\n"
        "    inputs: {from: a, transform: 'mine:words'}\n"
        "    final_output: text\n"
    )
    line = one_error(capfd, str(tmp_path / "mine.yaml"), "--prompt", "Hello")
    assert line.startswith("error: stage 'b': the stage's code "), line
    assert line.endswith("cannot be imported: ImportError: not in a worker"), line

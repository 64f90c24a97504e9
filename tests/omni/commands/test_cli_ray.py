"""The commands with stages in the actors of a Ray cluster of their own."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from omni.commands.cli import app
from tests.support.import_graph import ROOT
from tests.support.marked_processes import MarkedRun
from tests.support.patience import PATIENCE_S, wait_for

pytestmark = pytest.mark.usefixtures("checkpoint_cache")

PROMPTS = ("--prompt", "Once upon a time", "--prompt", "Once upon a day")


@pytest.fixture
def short_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """For what a cluster writes: pytest's own folders have too long names for its sockets."""
    folder = Path(tempfile.mkdtemp(prefix="o", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def lines_of(folder: Path) -> list[dict[str, object]]:
    """The lines of ``outputs.jsonl``, less the times."""
    lines = [json.loads(line) for line in (folder / "outputs.jsonl").read_text().splitlines()]
    for line in lines:
        for stage in line["stages"].values():
            del stage["metrics"]
    return lines


def test_a_run_writes_what_a_run_inline_writes_and_leaves_nothing(
    tmp_path: Path, short_folder: Path
) -> None:
    inline = CliRunner().invoke(
        app, ["run", "two_step", *PROMPTS, "--output-dir", str(tmp_path / "inline")]
    )
    assert inline.exit_code == 0, inline.output
    run = MarkedRun(
        *("run", "two_step", *PROMPTS, "--output-dir", "apart", "--runtime", "ray", "-v"),
        folder=tmp_path,
    )
    status, out, err = run.finish()
    assert status == 0, err
    assert "ray" not in out.lower(), "Ray speaks to nobody"
    assert lines_of(tmp_path / "apart") == lines_of(tmp_path / "inline")
    assert "[writer/0] " in err, "what workers log is shown here, with whose it is"
    run.check_nothing_left()
    assert not list(short_folder.iterdir())


def test_whoever_is_killed_takes_the_cluster_along(tmp_path: Path, short_folder: Path) -> None:
    requests = tmp_path / "requests.jsonl"
    line = {"prompt": "Hello", "sampling": {"writer": {"max_tokens": 40, "ignore_eos": True}}}
    requests.write_text("".join(json.dumps(line) + "\n" for _ in range(2000)))
    run = MarkedRun(
        *("run", "two_step", "--input", "requests.jsonl", "--output-dir", "out"),
        *("--runtime", "ray"),
        folder=tmp_path,
    )
    begun = tmp_path / "out/outputs.partial.jsonl"
    wait_for(lambda: begun.exists() or run.process.poll() is not None)
    assert run.process.poll() is None
    run.process.kill()
    run.finish()
    run.check_nothing_left()
    assert not [each for each in short_folder.iterdir() if each.name.startswith("omni-ray-")]


def test_an_address_where_nothing_answers_is_one_error(tmp_path: Path) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        run = MarkedRun(
            *("run", "two_step", *PROMPTS, "--runtime", "ray", "--address", address),
            folder=tmp_path,
        )
        status, out, err = run.finish()
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert f"runtime.address: no Ray cluster answers at '{address}'" in line
    run.check_nothing_left()


def test_tensors_cross_three_nodes(short_folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.three_nodes"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr

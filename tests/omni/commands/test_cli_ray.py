"""The commands with stages in the actors of a Ray cluster."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from stages.remote.codec import INLINE_BYTES
from tests.support.command_line import omni, outputs_without_times, write_requests
from tests.support.import_graph import ROOT
from tests.support.marked_processes import MarkedRun
from tests.support.patience import PATIENCE_S, wait_for
from tests.support.ray_cluster import SessionCluster
from tests.support.trace_file import names_of, read_trace

pytestmark = pytest.mark.usefixtures("checkpoint_cache")

PROMPTS = ("--prompt", "Once upon a time", "--prompt", "Once upon a day")


@pytest.fixture
def short_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for a cluster: names of pytest's folders are too long for its sockets."""
    folder = Path(tempfile.mkdtemp(prefix="o", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def one_stage(tmp_path: Path) -> str:
    """A pipeline of one actor, which is cheaper than two."""
    stage = {
        "kind": "autoregressive",
        "model": "seeded:qwen2",
        "sampling": {"temperature": 0.0},
        "final_output": "text",
    }
    (tmp_path / "one.yaml").write_text(json.dumps({"name": "one", "stages": {"writer": stage}}))
    return "one.yaml"


@pytest.fixture
def long_run(tmp_path: Path, one_stage: str) -> tuple[str, ...]:
    """Arguments of a run whose first request ends at once, before long ones."""
    lines = [
        {"prompt": "Hello", "sampling": {"writer": {"max_tokens": number, "ignore_eos": True}}}
        for number in (1, *[480] * 200)
    ]
    write_requests(tmp_path, *lines)
    where = ("--input", "requests.jsonl", "--output-dir", "out", "--runtime", "ray")
    return ("run", one_stage, *where)


def wait_until_underway(run: MarkedRun, folder: Path) -> None:
    begun = folder / "out/outputs.partial.jsonl"
    wait_for(lambda: begun.exists() or run.process.poll() is not None)
    assert run.process.poll() is None, run.finish()


def test_a_run_writes_what_a_run_inline_writes_and_leaves_nothing(
    tmp_path: Path, one_stage: str, short_folder: Path
) -> None:
    inline = omni("run", tmp_path / one_stage, *PROMPTS, "--output-dir", tmp_path / "inline")
    assert inline.exit_code == 0, inline.output
    run = MarkedRun(
        *("run", one_stage, *PROMPTS, "--output-dir", "apart", "--runtime", "ray", "-v"),
        folder=tmp_path,
    )
    status, out, err = run.finish()
    assert status == 0, err
    assert "ray" not in out.lower(), "Ray prints nothing"
    assert outputs_without_times(tmp_path / "apart") == outputs_without_times(tmp_path / "inline")
    assert "[writer/0] " in err, "log lines of workers are shown with their stage"
    run.check_nothing_left()
    assert not list(short_folder.iterdir())


def test_a_killed_run_stops_its_cluster(
    tmp_path: Path, long_run: tuple[str, ...], short_folder: Path
) -> None:
    run = MarkedRun(*long_run, folder=tmp_path)
    wait_until_underway(run, tmp_path)
    run.process.kill()
    run.finish()
    run.check_nothing_left()
    wait_for(lambda: not [*short_folder.glob("omni-ray-*")])
    assert not [each for each in short_folder.iterdir() if each.name.startswith("omni-ray-")]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_nothing_in_the_cluster_that_it_joined(
    tmp_path: Path, long_run: tuple[str, ...], ray_cluster: SessionCluster, how: signal.Signals
) -> None:
    run = MarkedRun(
        *(*long_run, "--address", ray_cluster.address),
        folder=tmp_path,
        environment=ray_cluster.environment,
    )
    wait_until_underway(run, tmp_path)
    pid = run.process.pid
    assert ray_cluster.num_actors(pid) == 1, "it runs in this cluster"
    run.process.send_signal(how)
    status, _, err = run.finish()
    assert status == (130 if how is signal.SIGINT else -signal.SIGKILL), err
    assert "Traceback" not in err, err
    run.check_nothing_left()
    wait_for(lambda: not ray_cluster.num_actors(pid))


def test_an_address_of_another_grpc_server_is_one_error(
    tmp_path: Path, ray_cluster: SessionCluster
) -> None:
    """The address of a node instead of the cluster."""
    (node, *_) = ray.nodes()
    address = f"127.0.0.1:{node['NodeManagerPort']}"
    run = MarkedRun(
        *("run", "two_step", *PROMPTS, "--runtime", "ray", "--address", address),
        folder=tmp_path,
        environment=ray_cluster.environment,
    )
    status, out, err = run.finish()
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert f"a Ray cluster: '{address}' could not be joined: " in line
    run.check_nothing_left()
    assert not ray_cluster.num_actors(run.process.pid)


def test_tensors_cross_three_nodes_and_a_lost_node_is_missed_until_it_is_replaced(
    tmp_path: Path, ray_cluster: SessionCluster, short_folder: Path
) -> None:
    """Speech also streams across them while its stages preempt, evict and abort."""
    trace = tmp_path / "trace.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.three_nodes", str(trace), ray_cluster.program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    errors = done.stdout.splitlines()
    assert errors
    for error in errors:
        assert error.startswith("stage 'reader': ")
        assert "each worker needs 1 CPU, 1 reader, and no node of the Ray cluster has that" in error
    events = read_trace(trace)
    steps = [names_of(events, process, None) for process in ("writer", "reader")]
    assert all(steps), "the trace has the steps of both processes"
    transfers = [each for each in events if each["name"] == "transfer" and each["ph"] == "b"]
    assert max(each["args"]["bytes"] for each in transfers) > INLINE_BYTES
    assert {each["args"]["from"] for each in transfers} == {"writer"}
    assert "run again" in [each["name"] for each in events]

"""Workers start in their parent's state, end with it and leave nothing behind."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from stages.remote import fork_server as module
from stages.remote import supervisor
from stages.remote.channel import Channel
from stages.remote.fork_server import WorkerProcess, shut_down, start_worker
from stages.stage_output import StageOutput
from tests.support.import_graph import ROOT
from tests.support.notes import Note
from tests.support.patience import PATIENCE_S, wait_for
from tests.support.remote_stages import one_stage

TARGETS = "tests.support.worker_targets"


@pytest.fixture(scope="module", autouse=True)
def fork_servers_of_this_file() -> Iterator[None]:
    """Preload only the targets: without importing an engine, a server starts in half the time."""
    shut_down()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PRELOADED", (TARGETS,))
        yield
        shut_down()
    assert not fork_servers()


def fork_servers() -> list[psutil.Process]:
    """Return the fork servers of this process; other tests have other child processes."""
    children = psutil.Process().children()
    return [each for each in children if "stages.remote.fork_server" in " ".join(each.cmdline())]


@pytest.fixture
def start() -> Iterator[Callable[..., WorkerProcess]]:
    """Start workers that are killed after the test."""
    started = []

    def start(target: str, argument: bytes = b"", threads: int = 1) -> WorkerProcess:
        worker = start_worker(f"{TARGETS}:{target}", argument, threads=threads, name=target)
        worker.sock.settimeout(PATIENCE_S)
        started.append(worker)
        return worker

    yield start
    for worker in started:
        worker.kill()
        assert worker.wait(PATIENCE_S)
        worker.sock.close()


def all_of(sock: socket.socket) -> bytes:
    content = b""
    while piece := sock.recv(1 << 16):
        content += piece
    return content


def is_gone(pid: int) -> bool:
    """Return True if the process ended; zombies that no parent reaps count as ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_worker_starts_in_its_parents_current_state(
    start: Callable[..., WorkerProcess],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    start("echo", b"x").sock.recv(1)  # starts the fork server before what follows
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMNI_TEST_WORKER", "\udcff as bytes")
    monkeypatch.delenv("PATH")
    (tmp_path / "users_own.py").write_text(
        "from tests.support.worker_targets import describe as function\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    workers = [
        start_worker("users_own:function", b"to stdout", threads=3, name="a long name of a worker")
        for _ in range(2)
    ]
    reported = [json.loads(all_of(worker.sock)) for worker in workers]
    for worker, each in zip(workers, reported, strict=True):
        fds = each["fds"]
        assert set(fds) == {"0", "1", "2", "3"}
        assert fds["0"] == os.devnull and fds["3"].startswith("socket:")
        assert fds["1"] == os.readlink("/proc/self/fd/1")
        assert fds["2"] == os.readlink("/proc/self/fd/2")
        assert each["threads"] == 3 and each["python_threads"] == 1
        assert each["folder"] == str(tmp_path) and each["path"] == sys.path
        assert each["environment"] == dict(os.environ)
        assert each["argv"] == ["a long name of a worker"]
        assert each["interrupt_is_ignored"] and not each["cuda"] and each["main"] is None
        assert psutil.Process(worker.pid).name() == "a long name of a"[:15]
    assert not set(reported[0]["random"]) & set(reported[1]["random"]), (
        "random numbers differ between workers"
    )
    for worker in workers:
        worker.sock.close()
        assert worker.wait(PATIENCE_S) and worker.exit_reason == "ended with exit status 0"
    assert capfd.readouterr().out.count("to stdout\n") == 2


@pytest.mark.parametrize(
    ("target", "argument", "reason", "printed"),
    [
        ("exit_with", b"3", "ended with exit status 3", ""),
        ("exit_with", b"0", "ended with exit status 0", ""),
        ("raise_an_error", b"lost", "ended with exit status 1", "KeyError: 'lost'"),
        ("nothing", b"", "ended with exit status 1", "has no attribute 'nothing'"),
    ],
)
def test_the_exit_reason_of_a_worker_is_reported(
    start: Callable[..., WorkerProcess],
    capfd: pytest.CaptureFixture[str],
    target: str,
    argument: bytes,
    reason: str,
    printed: str,
):
    worker = start(target, argument)
    assert worker.wait(PATIENCE_S) and worker.exit_reason == reason
    assert worker.wait(0.0) and worker.exit_reason == reason
    assert worker.sock.recv(1) == b"", "its socket is closed"
    assert printed in capfd.readouterr().err
    worker.kill()
    worker.terminate(1.0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_killed_worker_reports_its_signal(
    start: Callable[..., WorkerProcess], number: signal.Signals
):
    worker = start("echo", b"x")
    assert worker.sock.recv(1) == b"x"
    os.kill(worker.pid, number)
    assert worker.wait(PATIENCE_S) and worker.exit_reason == f"was killed by {number.name}"


def test_a_terminated_worker_is_killed_after_its_grace(start: Callable[..., WorkerProcess]):
    polite, stubborn, stopped = start("echo", b"x"), start("hold_on"), start("echo", b"x")
    for worker in (polite, stubborn, stopped):
        assert worker.sock.recv(4)
    polite.terminate(PATIENCE_S)
    assert polite.exit_reason == "was killed by SIGTERM"
    stubborn.terminate(0.0)
    assert stubborn.exit_reason == "was killed by SIGKILL"
    os.kill(stopped.pid, signal.SIGSTOP)
    stopped.terminate(0.0)
    assert stopped.exit_reason in ("was killed by SIGKILL", "was killed by SIGTERM")


def test_waiting_for_a_hanging_fork_server_is_bounded(
    start: Callable[..., WorkerProcess],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setattr(module, "_REPORT_TIMEOUT_S", 0.0)
    worker = start("hold_on")
    assert worker.sock.recv(4)
    the_server().suspend()
    try:
        worker.terminate(0.0)
        assert worker.exit_reason is None
        assert "was killed, but its end was not reported" in caplog.text
    finally:
        the_server().resume()
    assert worker.wait(PATIENCE_S) and worker.exit_reason == "was killed by SIGKILL"


def test_a_worker_without_a_channel_is_ended(
    start: Callable[..., WorkerProcess], monkeypatch: pytest.MonkeyPatch
):
    worker = start("echo", b"x")
    assert worker.sock.recv(1)

    def no_channel(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(supervisor, "start_worker", lambda *_, **__: worker)
    monkeypatch.setattr(supervisor, "Channel", no_channel)
    spec = one_stage("stage")
    with pytest.raises(OSError, match="Too many open files"):
        supervisor.connect_process(spec, lambda _: None, lambda _: None)
    assert worker.sock.fileno() == -1
    assert worker.wait(PATIENCE_S) and worker.exit_reason


def test_workers_ignore_ctrl_c(start: Callable[..., WorkerProcess]):
    worker = start("echo", b"x")
    assert worker.sock.recv(1) == b"x"
    os.kill(worker.pid, signal.SIGINT)
    the_server().send_signal(signal.SIGINT)
    worker.sock.sendall(b"y")
    assert worker.sock.recv(1) == b"y" and worker.exit_reason is None


def the_server() -> psutil.Process:
    (process,) = fork_servers()
    return process


def test_fifty_workers_leave_nothing_behind(
    start: Callable[..., WorkerProcess],
):
    start("exit_with", b"0").wait(PATIENCE_S)
    assert the_server().num_threads() == 1
    gc.collect()
    ours, theirs = os.listdir("/proc/self/fd"), the_server().num_fds()
    for number in range(50):
        worker = start_worker(f"{TARGETS}:echo", b"x", threads=1, name="brief")
        if number % 3 == 0:
            worker.kill()
        elif number % 3 == 1:
            assert worker.sock.recv(1) == b"x"
        worker.sock.close()  # ends it
        assert worker.wait(PATIENCE_S)
    assert os.listdir("/proc/self/fd") == ours
    wait_for(lambda: the_server().num_fds() == theirs and not the_server().children())


def test_workers_of_a_dead_fork_server_end_and_it_is_replaced(
    start: Callable[..., WorkerProcess],
):
    first, second = start("echo", b"x"), start("hold_on")
    assert first.sock.recv(1) and second.sock.recv(4)
    before = the_server()
    os.kill(second.pid, signal.SIGSTOP)
    before.kill()
    reason = "died when the process that workers are forked from was killed by SIGKILL"
    for worker in (first, second):
        assert worker.wait(PATIENCE_S) and worker.exit_reason == reason
    wait_for(lambda: is_gone(first.pid) and is_gone(second.pid))
    assert start("echo", b"again").sock.recv(5) == b"again"
    assert the_server() != before


def test_messages_and_tensors_reach_a_worker_and_come_back(start: Callable[..., WorkerProcess]):
    worker = start("send_back")
    messages: list[Any] = []
    reasons: list[str] = []
    channel = Channel(worker.sock, Note, "worker")
    channel.start(messages.append, reasons.append)
    for number in range(20):
        rows = torch.full((200, 200), number)
        channel.send(Note(outputs=(StageOutput("r", "s", True, tensors={"rows": rows}),)))
        wait_for(lambda: len(messages) == 1)
        assert torch.equal(messages.pop().outputs[0].tensors["rows"], rows + 1)
    channel.send(Note("hold"))
    wait_for(lambda: len(messages) == 1)
    kept = messages.pop().outputs[0].tensors["rows"]
    worker.kill()
    wait_for(lambda: reasons == ["the other side closed it or has ended"])
    assert (kept == 7).all(), "its tensors outlive the worker"
    assert channel.join(PATIENCE_S)


def test_a_missing_python_is_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_server", None)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(RuntimeError, match=r"cannot be started: .*No such file.*/no/such/python"):
        start_worker("a:b", b"", threads=1, name="a")
    gc.collect()
    assert os.listdir("/proc/self/fd") == before


SCRIPT = """
import os, signal, sys, time
from stages.remote import fork_server
from stages.remote.fork_server import start_worker
fork_server._PRELOADED = ("tests.support.worker_targets",)
print("main", flush=True)
workers = [
    start_worker("tests.support.worker_targets:hold_on", b"", threads=1, name="w") for _ in range(3)
]
for worker in workers:
    assert worker.sock.recv(4) == b"held"
os.kill(workers[1].pid, signal.SIGSTOP)
print(*(worker.pid for worker in workers), flush=True)
"""


def run_script(tmp_path: Path, rest: str) -> subprocess.Popen[str]:
    script = tmp_path / "users_script.py"
    script.write_text(SCRIPT + textwrap.dedent(rest))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def family(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    assert process.stdout.readline() == "main\n"
    workers = [int(pid) for pid in process.stdout.readline().split()]
    found = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
    assert len(workers) == 3 and set(workers) < found and len(found) == 4
    return sorted(found)


def test_all_workers_end_when_the_parent_is_killed_even_stopped_ones(tmp_path: Path):
    process = run_script(tmp_path, "sys.stdin.read()")
    pids = family(process)
    process.kill()
    wait_for(lambda: all(map(is_gone, pids)))
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert out == "", "no process holds its stdout"


def test_all_workers_end_with_the_parent_and_its_script_runs_once(tmp_path: Path):
    process = run_script(tmp_path, "sys.stdin.read()\nraise SystemExit(5)")
    pids = family(process)
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert out == "" and process.returncode == 5
    wait_for(lambda: all(map(is_gone, pids)))


def test_a_fork_of_the_parent_has_its_own_workers(start: Callable[..., WorkerProcess]):
    start("echo", b"x").sock.recv(1)
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        reported = module._server is None
        shut_down()
        os.write(write, b"y" if reported else b"n")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 1) == b"y"
    os.close(read)
    os.close(write)
    assert start("echo", b"z").sock.recv(1) == b"z"

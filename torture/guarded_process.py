"""Running of a function in a separate process with limits of time and memory."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Guarded:
    """Result of a run.

    Attributes:
        kind: ``"returned"``, ``"raised"``, ``"died"`` or ``"hangs"``.
        told: the returned text; or the name of the error's class and its message; or the status.
        peak_mb: peak resident size of the process, including the pages inherited from its parent.
    """

    kind: str
    told: tuple[str, ...]
    peak_mb: float


def run_guarded(function: Callable[[], str | None], seconds: float, limit_bytes: int) -> Guarded:
    """Fork, run, and wait; the parent must have no threads that hold locks.

    Args:
        function: returns a text, or None.
        seconds: timeout after which it is killed.
        limit_bytes: maximum additional memory, beyond what is mapped already.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            _run(function, limit_bytes, write)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        told, in_time = _listen(pipe.fileno(), time.monotonic() + seconds)
    if not in_time:
        os.kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    peak_mb = usage.ru_maxrss / 1e3
    if not in_time:
        return Guarded("hangs", (f"{seconds:g} s",), peak_mb)
    if not told:
        return Guarded("died", (f"status {status}",), peak_mb)
    kind, *rest = json.loads(told)
    return Guarded(kind, tuple(rest), peak_mb)


def _listen(pipe: int, until: float) -> tuple[bytes, bool]:
    told = b""
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            return told, False
        piece = os.read(pipe, 1 << 16)
        if not piece:
            return told, True
        told += piece


def _run(function: Callable[[], str | None], limit_bytes: int, write: int) -> None:
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    most = mapped + limit_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    os.dup2(os.open(os.devnull, os.O_RDWR), 2)
    try:
        told = ["returned", function() or ""]
    except BaseException as error:
        told = ["raised", type(error).__name__, str(error)[:2000]]
    os.write(write, json.dumps(told).encode())
    sys.stdout.flush()

"""A Ray cluster of three nodes for a whole test run; a separate program.

    python -m tests.support.ray_head PID FOLDER

It ends the cluster and removes the folder when the process with that id has ended for any reason:
workers of pytest-xdist come and go, and any of them may be the last one. Its actors are forked from
a :mod:`~tests.support.ray_nursery`.
"""

from __future__ import annotations

import ctypes
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

from tests.support import ray_nursery_client

NURSERY = "nursery"
"""The socket that serves actors; it exists as soon as it accepts connections."""

PROGRAM = "python"
"""The program that starts them, which a cluster uses as Python."""

_NODES = "tests.support.ray_nodes"
QUIET = {"RAY_prestart_worker_first_driver": "0", "RAY_enable_metrics_collection": "0"}
_PATIENCE_S = 60
_SET_PARENT_DEATH_SIGNAL = 1


def main(pid: int, folder: str) -> None:
    """Keep a cluster in a folder running for as long as a process lives."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        shutil.rmtree(folder, ignore_errors=True)
        return
    nursery = head = None
    try:
        with Path(folder, "head.log").open("wb") as log:
            nursery = _start_nursery(folder, log)
            head = subprocess.Popen(
                [sys.executable, "-m", _NODES, str(_write_program(folder)), folder],
                env=os.environ | QUIET,
                stdout=log,
                stderr=log,
                preexec_fn=_die_with_the_parent,
            )
        select.select([watched, os.pidfd_open(head.pid), os.pidfd_open(nursery.pid)], [], [])
    finally:
        for process in filter(None, (head, nursery)):
            _end(process)
        shutil.rmtree(folder, ignore_errors=True)


def _start_nursery(folder: str, log: BinaryIO) -> subprocess.Popen[bytes]:
    """Start the process that actors are forked from; it ends with this process."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.ray_nursery", str(Path(folder, NURSERY))],
        env=os.environ | QUIET,
        stdout=log,
        stderr=log,
        preexec_fn=_die_with_the_parent,
    )


def _write_program(folder: str) -> Path:
    """Write the program that the cluster uses as Python."""
    program = Path(folder, PROGRAM)
    client = ray_nursery_client.__file__
    words = (sys.executable, "-I", "-S", client, str(Path(folder, NURSERY)))
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o700)
    return program


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _die_with_the_parent() -> None:
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGTERM))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

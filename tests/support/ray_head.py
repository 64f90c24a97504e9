"""A Ray cluster for a whole run of the tests, begun by ``ray start``; a program of its own.

    python tests/support/ray_head.py PID FOLDER

It ends the cluster, and removes the folder, when the process with that id has ended in whatever
way: workers of pytest-xdist come and go, and any of them may be the last one.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

__all__ = ["main"]

_START = (
    *("-m", "ray.scripts.scripts", "start"),
    *("--head", "--block", "--port", "0", "--node-ip-address", "127.0.0.1"),
    *("--num-cpus", "64", "--object-store-memory", str(256 * 2**20)),
    # What these processes do, no test asks for, and each of them takes half a second to begin.
    *("--no-monitor", "--include-log-monitor", "false", "--include-dashboard", "false"),
    "--disable-usage-stats",
)
_QUIET = {"RAY_prestart_worker_first_driver": "0", "RAY_enable_metrics_collection": "0"}
_PATIENCE_S = 60
_SET_PARENT_DEATH_SIGNAL = 1


def main(pid: int, folder: str) -> None:
    """Keep a cluster in a folder for as long as a process lives."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        shutil.rmtree(folder, ignore_errors=True)
        return
    with Path(folder, "head.log").open("wb") as log:
        head = subprocess.Popen(
            [sys.executable, *_START, "--temp-dir", folder],
            env=os.environ | _QUIET,
            stdout=log,
            stderr=log,
            preexec_fn=_die_with_the_parent,
        )
    try:
        select.select([watched, os.pidfd_open(head.pid)], [], [])
    finally:
        head.send_signal(signal.SIGTERM)
        try:
            head.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            head.kill()
            head.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _die_with_the_parent() -> None:
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGTERM))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

"""Runs parts of the training in parallel: a lane is a sequence of parts."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Sequence

_PROGRAMS = ("espeak-ng", "flite")


def needed_programs() -> None:
    """Check that the synthesizers are installed, before hours of work.

    Raises:
        ValueError: one of them is not installed.
    """
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        raise ValueError(
            f"{' and '.join(missing)} not found: questions and answers are spoken by Debian's "
            "packages of these names"
        )


def run_lanes(lanes: Sequence[Sequence[str]], command: Sequence[str]) -> None:
    """Run all lanes, each part in a separate process.

    If a part fails, the parallel ones are stopped; they continue from their saved state next time.

    Args:
        lanes: names of parts.
        command: the command that runs a part; the part's name is appended.

    Raises:
        subprocess.CalledProcessError: a part failed.
    """
    running = _Running()
    threads = [
        threading.Thread(target=running.run, args=(names, command), daemon=True) for names in lanes
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        running.stop()
    if running.failure is not None:
        raise running.failure


class _Running:
    """The running processes, and the first failure."""

    def __init__(self) -> None:
        self.failure: subprocess.CalledProcessError | None = None
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._is_stopped = False

    def run(self, names: Sequence[str], command: Sequence[str]) -> None:
        """Run parts in sequence, until one fails in any lane."""
        for name in names:
            with self._lock:
                if self._is_stopped:
                    return
                process = subprocess.Popen([*command, name])
                self._processes.add(process)
            status = process.wait()
            with self._lock:
                self._processes.discard(process)
                if status and not self._is_stopped:
                    self.failure = subprocess.CalledProcessError(status, [*command, name])
            if status:
                self.stop()
                return

    def stop(self) -> None:
        """Terminate all running processes, and start no more."""
        with self._lock:
            self._is_stopped = True
            for process in self._processes:
                process.terminate()

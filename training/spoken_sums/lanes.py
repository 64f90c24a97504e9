"""Parts of the training side by side: a lane is a row of parts, one after the other."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Sequence

_PROGRAMS = ("espeak-ng", "flite")


def needed_programs() -> None:
    """Look for the synthesizers, before hours of work.

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
    """Run all lanes, each part in a process of its own.

    When a part fails, those beside it are ended: their states are saved, and go on next time.

    Args:
        lanes: names of parts.
        command: that does a part; the part's name is its last argument.

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
    """The processes that run now, and the first failure."""

    def __init__(self) -> None:
        self.failure: subprocess.CalledProcessError | None = None
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._is_stopped = False

    def run(self, names: Sequence[str], command: Sequence[str]) -> None:
        """Run parts one after the other, until one fails anywhere."""
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
        """End what runs, and begin nothing more."""
        with self._lock:
            self._is_stopped = True
            for process in self._processes:
                process.terminate()

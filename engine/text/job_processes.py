"""Processes that run code shipped with checkpoints and can be stopped: see ``job_worker.py``."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.interface.ownership import renew_in_forks

# Idle processes kept for the next job; concurrent jobs start more.
_MAX_IDLE = 2
# The system limits CPU time. A process that hangs in any other way is killed after this multiple
# of its CPU time, plus so many seconds.
_WALL_FACTOR, _WALL_SECONDS = 20, 60.0

_WORKER = Path(__file__).with_name("job_worker.py")
_PACKAGES = ("jinja2", "tokenizers")


class _JobProcess:
    """A process that runs one job at a time.

    Args:
        first: a line that it reads before its first job, or empty.
    """

    def __init__(self, first: bytes) -> None:
        found = [find_spec(name) for name in _PACKAGES]
        places = {str(Path(spec.origin).parents[1]) for spec in found if spec and spec.origin}
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(_WORKER), *places],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that it receives no signals of the terminal
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has exited; the first job reports that
            self._process.stdin.write(first)

    def ask(self, job: bytes, wall_seconds: float) -> dict[str, Any] | None:
        """Return the answer to a line of JSON; None if the process exited during the job."""
        assert self._process.stdin is not None and self._process.stdout is not None
        kill_timer = threading.Timer(wall_seconds, self._process.kill)
        kill_timer.daemon = True
        kill_timer.start()
        try:
            self._process.stdin.write(job)
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        finally:
            kill_timer.cancel()
        return json.loads(line) if line.endswith(b"\n") else None

    @property
    def is_running(self) -> bool:
        """True if it still runs; the resources of an exited process are freed."""
        if self._process.poll() is None:
            return True
        self.close()
        return False

    def close(self) -> int:
        """End the process and return its exit status."""
        assert self._process.stdin is not None and self._process.stdout is not None
        # Part of a job may still be buffered.
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                pipe.close()
        try:
            return self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def disown(self) -> None:
        """Forget a child process of another process."""
        self._process.returncode = 0


class JobProcesses:
    """Starts processes on demand and keeps some. Thread-safe.

    Args:
        first: a line of JSON that each reads before its first job, or empty.
    """

    def __init__(self, first: bytes = b"") -> None:
        self._first = first
        self._idle: list[_JobProcess] = []
        self.renew_locks()
        renew_in_forks(self)
        # Also runs when this object is dropped or the interpreter ends.
        weakref.finalize(self, _close_all, self._idle)

    def renew_locks(self) -> None:
        """Renew the lock after a fork, and forget the parent's processes and pipes."""
        self._lock = threading.Lock()
        for process in self._idle:
            process.disown()
        self._idle.clear()

    def ask(self, job: bytes, seconds: float) -> dict[str, Any] | str:
        """Run a job.

        Args:
            seconds: CPU time to which the process limits itself.

        Returns:
            The answer; or, if the process exited during the job, ``"seconds"`` if it exceeded its
            CPU time, otherwise its exit status.
        """
        with self._borrow() as process:
            answer = process.ask(job, _WALL_FACTOR * seconds + _WALL_SECONDS)
            if answer is not None:
                return answer
            status = process.close()
        took_too_long = hasattr(signal, "SIGPROF") and status == -signal.SIGPROF
        return "seconds" if took_too_long else str(status)

    @contextmanager
    def _borrow(self) -> Iterator[_JobProcess]:
        with self._lock:
            self._idle[:] = [each for each in self._idle if each.is_running]
            process = self._idle.pop() if self._idle else None
        if process is None:
            process = _JobProcess(self._first)
        try:
            yield process
        except BaseException:
            # Whatever the error, an answer may still be in the pipe.
            process.close()
            raise
        with self._lock:
            if process.is_running and len(self._idle) < _MAX_IDLE:
                self._idle.append(process)
                return
        process.close()


def _close_all(idle: list[_JobProcess]) -> None:
    for process in idle:
        process.close()

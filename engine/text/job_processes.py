"""Processes that run what checkpoints bring, where it can be stopped: see ``job_worker.py``."""

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

# Kept for the next job; more are started while more are asked for at once.
_MOST_IDLE = 2
# CPU time is limited by the system. Should the process be held up in any other way, it is ended
# after so many times that, and so many seconds more.
_WALL_FACTOR, _WALL_SECONDS = 20, 60.0


_WORKER = Path(__file__).with_name("job_worker.py")
_PACKAGES = ("jinja2", "tokenizers")


class _JobProcess:
    """One process; one job at a time.

    Args:
        first: a line that it reads before its first job, or nothing.
    """

    def __init__(self, first: bytes) -> None:
        found = [find_spec(name) for name in _PACKAGES]
        places = {str(Path(spec.origin).parents[1]) for spec in found if spec and spec.origin}
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(_WORKER), *places],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # signals of the terminal are not for it
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended; asking for the first job says so
            self._process.stdin.write(first)

    def ask(self, job: bytes, wall_seconds: float) -> dict[str, Any] | None:
        """The answer to a line of JSON; None if the process ended over it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        last_resort = threading.Timer(wall_seconds, self._process.kill)
        last_resort.daemon = True
        last_resort.start()
        try:
            self._process.stdin.write(job)
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        finally:
            last_resort.cancel()
        return json.loads(line) if line.endswith(b"\n") else None

    @property
    def is_running(self) -> bool:
        """Whether it still runs; what is left of one that has ended is cleaned up."""
        if self._process.poll() is None:
            return True
        self.close()
        return False

    def close(self) -> int:
        """End it; returns its exit status."""
        assert self._process.stdin is not None and self._process.stdout is not None
        # Something of a job may be unwritten.
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                pipe.close()
        try:
            return self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def disown(self) -> None:
        """Forget a process that another one started."""
        self._process.returncode = 0


class JobProcesses:
    """Starts processes as they are needed and keeps some. May be used from several threads.

    Args:
        first: a line of JSON that each reads before its first job, or nothing.
    """

    def __init__(self, first: bytes = b"") -> None:
        self._first = first
        self._idle: list[_JobProcess] = []
        self.renew_locks()
        renew_in_forks(self)
        # Also runs when this object is dropped or the interpreter ends.
        weakref.finalize(self, _end, self._idle)

    def renew_locks(self) -> None:
        """Forget the processes that a parent started, too: after a fork their pipes are its own."""
        self._lock = threading.Lock()
        for process in self._idle:
            process.disown()
        self._idle.clear()

    def ask(self, job: bytes, seconds: float) -> dict[str, Any] | str:
        """Have a job done.

        Args:
            seconds: of CPU time, to which the process is to limit itself.

        Returns:
            The answer; or, if the process ended over it, ``"seconds"`` where it took too many,
            and its exit status elsewhere.
        """
        with self._borrowed() as process:
            answer = process.ask(job, _WALL_FACTOR * seconds + _WALL_SECONDS)
            if answer is not None:
                return answer
            status = process.close()
        took_too_long = hasattr(signal, "SIGPROF") and status == -signal.SIGPROF
        return "seconds" if took_too_long else str(status)

    def close(self) -> None:
        """End the processes that are kept; more are started when they are needed."""
        with self._lock:
            idle = self._idle.copy()
            self._idle.clear()
        _end(idle)

    @contextmanager
    def _borrowed(self) -> Iterator[_JobProcess]:
        with self._lock:
            self._idle[:] = [each for each in self._idle if each.is_running]
            process = self._idle.pop() if self._idle else None
        if process is None:
            process = _JobProcess(self._first)
        try:
            yield process
        except BaseException:
            # Whatever it was, an answer may still be on its way.
            process.close()
            raise
        with self._lock:
            if process.is_running and len(self._idle) < _MOST_IDLE:
                self._idle.append(process)
                return
        process.close()


def _end(idle: list[_JobProcess]) -> None:
    for process in idle:
        process.close()

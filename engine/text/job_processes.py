"""Processes that do jobs of strangers' making, where they can be stopped."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from engine.interface.ownership import renew_in_forks

__all__ = ["JobProcess", "JobProcesses"]

# Kept for the next job; more are started while more are asked for at once.
_MOST_IDLE = 2
# CPU time is limited by the system. Should the process be held up in any other way, it is ended
# after so many times that, and so many seconds more.
_WALL_FACTOR, _WALL_SECONDS = 20, 60.0


class JobProcess:
    """One process; one job at a time.

    Args:
        command: the program and its arguments.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # signals of the terminal are not for it
        )

    def send(self, line: bytes) -> None:
        """Have it read a line before its first job."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
        except BrokenPipeError:  # it has ended; asking for the first job tells so
            return

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
        answer: dict[str, Any] | None = json.loads(line) if line.endswith(b"\n") else None
        return answer

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
            try:
                pipe.close()
            except BrokenPipeError:
                continue
        try:
            return self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def disown(self) -> None:
        """Forget a process that another one started."""
        self._process.returncode = 0


class JobProcesses(ABC):
    """Starts processes as they are needed and keeps some. May be used from several threads."""

    def __init__(self) -> None:
        self._idle: list[JobProcess] = []
        self._pid = os.getpid()
        self.renew_locks()
        renew_in_forks(self)
        # Also runs when this object is dropped or the interpreter ends.
        weakref.finalize(self, _end, self._idle, self._pid)

    def renew_locks(self) -> None:
        """See :class:`~engine.interface.ownership.Renewable`."""
        self._lock = threading.Lock()

    @abstractmethod
    def start(self) -> JobProcess:
        """A new process, ready for a job."""

    def ask(self, job: bytes, seconds: float) -> dict[str, Any] | int:
        """Have a job done.

        Args:
            job: a line.
            seconds: of CPU time, to which the process is to limit itself.

        Returns:
            The answer; or the exit status of the process, if it ended over it.
        """
        with self._borrowed() as process:
            answer = process.ask(job, _WALL_FACTOR * seconds + _WALL_SECONDS)
            return process.close() if answer is None else answer

    def close(self) -> None:
        """End the processes that are kept; more are started when they are needed."""
        with self._lock:
            self._forget_of_others()
            idle = tuple(self._idle)
            self._idle.clear()
        for process in idle:
            process.close()

    @contextmanager
    def _borrowed(self) -> Iterator[JobProcess]:
        with self._lock:
            self._forget_of_others()
            self._idle[:] = [each for each in self._idle if each.is_running]
            process = self._idle.pop() if self._idle else None
        if process is None:
            process = self.start()
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

    def _forget_of_others(self) -> None:
        """Keep what this process started: after a fork the pipes belong to another."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            for process in self._idle:
                process.disown()
            self._idle.clear()


def _end(idle: list[JobProcess], pid: int) -> None:
    if pid == os.getpid():
        for process in idle:
            process.close()

"""Runs chat templates in processes of their own, where they can be stopped."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.interface.forks import renew_in_forks

__all__ = ["TemplateLimitError", "TemplateLimits", "TemplateProcesses", "TemplateRefusalError"]

_WORKER = Path(__file__).with_name("template_worker.py")
# Kept for the next prompt; more are started while more are asked for at once.
_MOST_IDLE = 2
# CPU time is limited by the system. Should the process be held up in any other way, it is ended
# after so many times that, and so many seconds more.
_WALL_FACTOR, _WALL_SECONDS = 20, 60.0


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """What the rendering of one prompt may take.

    Attributes:
        max_chars: of the text that comes out.
        seconds: of CPU time, all tries together.
        num_bytes: of memory, the process's own included.
    """

    max_chars: int = 2**22
    seconds: float = 5.0
    num_bytes: int = 2**29


class TemplateLimitError(ValueError):
    """A template took more than it may; another try would as well."""


class TemplateRefusalError(Exception):
    """A template raised.

    Args:
        message: what it said.
        is_deliberate: whether it refused the messages, rather than stumbled.
    """

    def __init__(self, message: str, is_deliberate: bool) -> None:
        super().__init__(message)
        self.is_deliberate = is_deliberate


class _Process:
    """One process; one job at a time."""

    def __init__(self) -> None:
        jinja = find_spec("jinja2")
        if jinja is None or jinja.origin is None:
            raise ValueError("chat templates need the package jinja2, which is not installed")
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(_WORKER), str(Path(jinja.origin).parents[1])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # signals of the terminal are not for it
        )

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
        """Whether nobody has ended it."""
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


class TemplateProcesses:
    """Starts processes as they are needed and keeps some. May be used from several threads."""

    def __init__(self) -> None:
        self._idle: list[_Process] = []
        self._pid = os.getpid()
        self.renew_locks()
        renew_in_forks(self)
        atexit.register(self.close)

    def renew_locks(self) -> None:
        """See :class:`~engine.interface.forks.Renewable`."""
        self._lock = threading.Lock()

    def render(
        self, template: str, values: Mapping[str, Any], limits: TemplateLimits
    ) -> tuple[str, float]:
        """Render a template.

        Args:
            template: jinja2's, as transformers has them.
            values: what it sees. What JSON does not know is replaced by the name of its type.
            limits: what it may take.

        Returns:
            The text, and the seconds of CPU time that it took.

        Raises:
            TemplateLimitError: it took more than it may; says of what.
            TemplateRefusalError: the template raised.
            ValueError: the values cannot be written as JSON.
        """
        job = _line(
            {
                "template": template,
                "values": values,
                "chars": limits.max_chars,
                "seconds": limits.seconds,
                "bytes": limits.num_bytes,
            }
        )
        with self._borrowed() as process:
            answer = process.ask(job, _WALL_FACTOR * limits.seconds + _WALL_SECONDS)
            if answer is None:
                raise _ended(process.close(), limits)
        if "error" in answer:
            raise TemplateRefusalError(answer["error"], answer["refused"])
        if "beyond" in answer:
            raise _beyond(answer["beyond"], limits)
        return answer["text"], answer["seconds"]

    def close(self) -> None:
        """End the processes that are kept; more are started when they are needed."""
        with self._lock:
            idle, self._idle = self._own(self._idle), []
        for process in idle:
            process.close()

    @contextmanager
    def _borrowed(self) -> Iterator[_Process]:
        with self._lock:
            self._idle = [each for each in self._own(self._idle) if each.is_running]
            process = self._idle.pop() if self._idle else None
        if process is None:
            process = _Process()
        try:
            yield process
        except BaseException:
            # Whatever it was, an answer may still be on its way.
            process.close()
            raise
        with self._lock:
            if len(self._idle) < _MOST_IDLE:
                self._idle.append(process)
                return
        process.close()

    def _own(self, processes: list[_Process]) -> list[_Process]:
        """Those that this process started: after a fork its pipes belong to another."""
        if self._pid == os.getpid():
            return processes
        self._pid = os.getpid()
        for process in processes:
            process.disown()
        return []


def _line(job: Mapping[str, Any]) -> bytes:
    try:
        # What a message carries beside words, templates only ask for.
        text = json.dumps(job, default=lambda each: f"<{type(each).__name__}>")
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the chat messages are no plain data: {error}") from error
    return text.encode() + b"\n"


def _beyond(limit: str, limits: TemplateLimits) -> TemplateLimitError:
    if limit == "characters":
        return TemplateLimitError(
            f"what the checkpoint's chat template makes of the messages has more than "
            f"{limits.max_chars} characters; shorten them, or raise engine.limits.max_prompt_chars"
        )
    return TemplateLimitError(
        f"the checkpoint's chat template took more than {limits.num_bytes} bytes of memory; if it "
        "is to be trusted, raise engine.limits.template_bytes"
    )


def _ended(status: int, limits: TemplateLimits) -> TemplateLimitError:
    if hasattr(signal, "SIGPROF") and status == -signal.SIGPROF:
        return TemplateLimitError(
            f"the checkpoint's chat template took more than {limits.seconds:.3g} s of CPU time; if "
            "it is to be trusted, raise engine.limits.template_seconds"
        )
    return TemplateLimitError(
        f"the process of the checkpoint's chat template ended with status {status}; "
        "the template may not work, or need more memory: see engine.limits.template_bytes"
    )

"""A worker in a process of its own: builds its stage, and drives it until its link is gone."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from stages.portable import load_by_name
from stages.remote.connection import Spec
from stages.remote.control import (
    Beat,
    Built,
    Call,
    GaveUp,
    Grown,
    Idle,
    News,
    NotBuilt,
    Orders,
    WorkerMessage,
    WorkerSpec,
)
from stages.remote.growing_output import OutputTails
from stages.remote.worker_calls import WorkerCalls, facts_of
from stages.stage import Stage, Transform
from stages.stage_config import StageConfig
from stages.trace_events import Traced
from stages.worker.messages import Abort, Command, Enter, Event, Failed, Moved
from stages.worker.stage_worker import StageWorker
from stages.worker.traced_worker import TracedWorker

__all__ = ["Build", "WorkerLoop", "alive", "build_stage", "not_built"]

_logger = logging.getLogger(f"omni.{__name__}")

_BEAT_S = 0.5
# How long a worker sleeps whose requests all wait for something: longer and longer.
_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.001, 0.05

_Send = Callable[[WorkerMessage], None]
Build = Callable[[WorkerSpec], tuple[Stage, Transform | None]]
"""Makes the stage of a worker, and the transform that makes its prompts."""


def build_stage(spec: WorkerSpec) -> tuple[Stage, Transform | None]:
    """Build the stage of a worker, and find the transform that makes its prompts.

    Raises:
        ValueError: it cannot be built, or the transform cannot be found here.
    """
    kind: type[StageConfig] = load_by_name(spec.kind)
    config = kind.model_validate_json(spec.config)
    transform = None if spec.transform is None else load_by_name(spec.transform)
    return config.build_stage(spec.name), transform


def not_built(spec: Spec, error: Exception) -> NotBuilt:
    """What a worker says that cannot build what it was told."""
    _logger.debug("%s cannot be built", spec.called, exc_info=error)
    is_told = isinstance(error, ValueError)
    return NotBuilt(str(error) if is_told else f"{type(error).__name__}: {error}", is_told)


@contextmanager
def alive(send: Callable[[Beat], None]) -> Iterator[None]:
    """Give signs of life while this thread cannot: to load a model may take minutes.

    Args:
        send: them; it raises ``ConnectionError`` when nobody listens.
    """
    is_over = threading.Event()

    def beat() -> None:
        with suppress(ConnectionError):
            send(Beat({}))
            while not is_over.wait(_BEAT_S):
                send(Beat({}))

    thread = threading.Thread(target=beat, name="signs of life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


class WorkerLoop:
    """Turns a :class:`~stages.worker.stage_worker.StageWorker` by what comes over a connection. ::

        connection's thread ──► inbox ──► turn: commands, calls, one unit of work ──► send
                       └──► answers at once what only looks

    Args:
        spec: what to build.
        send: to the link; from any thread. It raises ``ConnectionError`` when nobody listens.
        build: None for :func:`build_stage`.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        send: _Send,
        build: Build | None = None,
    ) -> None:
        self._spec = spec
        self._build = build or build_stage
        self._send = send
        self._inbox: deque[Command | Call] = deque()
        self._changed = threading.Condition()
        self._has_changed = False
        self._is_over = False
        self._calls: WorkerCalls | None = None
        self._tails = OutputTails()
        self._tickets: dict[str, int] = {}
        self._num_commands = 0
        self._was_idle = False
        self._nap_s = _SHORTEST_NAP_S
        self._counted_at = 0.0

    def take(self, message: Any) -> None:
        """Take a command or a call, in the connection's thread."""
        if isinstance(message, Call) and self._calls and message.method in self._calls.at_once:
            self._send(self._calls.answer(message))
            return
        with self._changed:
            if isinstance(message, Orders):
                self._inbox.extend(message.commands)
            else:
                self._inbox.append(message)
            self._has_changed = True
            self._changed.notify()

    def end(self) -> None:
        """Have :meth:`run` return before its next turn."""
        with self._changed:
            self._is_over = self._has_changed = True
            self._changed.notify()

    def run(self) -> None:
        """Build the stage and drive it until the end."""
        try:
            with alive(self._send):
                stage, transform = self._build(self._spec)
            worker = self._worker(stage, transform)
            self._calls = WorkerCalls(stage)
            facts = facts_of(stage)
        except Exception as error:  # told once, to whoever asked for the stage
            self._send(not_built(self._spec, error))
            return
        worker.tell_news(self._wake)
        worker.prepare_aside()
        self._send(Built({self._spec.name: facts}))
        try:
            while not self._is_over:
                self._turn(worker)
        finally:
            worker.close()
            stage.close()

    def _worker(self, stage: Stage, transform: Transform | None) -> StageWorker:
        if self._spec.is_traced:
            replica = self._spec.replica
            return TracedWorker(stage, transform, self._spec.edges, replica=replica)
        return StageWorker(stage, transform, self._spec.edges)

    def _wake(self) -> None:
        with self._changed:
            self._has_changed = True
            self._changed.notify()

    def _turn(self, worker: StageWorker) -> None:
        """Take what came; one unit of work; tell what is new, or sleep if nothing is."""
        had_commands = self._take_in(worker)
        worker.work()
        if (reason := worker.mend()) is not None:
            self._give_up(worker, reason)
            return
        traces = worker.traces()
        events = worker.news()
        if events or traces:
            self._tell(worker, traces, events)
        if events or had_commands:
            self._was_idle = False
            self._nap_s = _SHORTEST_NAP_S
        elif not worker.has_work:
            self._sleep(worker.time_to_work)
        elif worker.check_idle():
            if not self._was_idle:
                self._was_idle = True
                self._send(Idle(self._num_commands))
            self._sleep(self._nap_s)
            self._nap_s = min(2 * self._nap_s, _LONGEST_NAP_S)
        if time.monotonic() - self._counted_at > _BEAT_S:
            self._tell_counts(worker)

    def _give_up(self, worker: StageWorker, reason: str) -> None:
        """Let another worker do what this one cannot, the requests of this turn included."""
        self._tell_counts(worker)
        self._send(GaveUp(reason))
        self.end()

    def _take_in(self, worker: StageWorker) -> bool:
        """Do what was commanded and asked so far; whether there was a command."""
        has_any = False
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, Call):
                assert self._calls is not None
                self._send(self._calls.answer(message))
                continue
            if isinstance(message, Enter):
                self._tickets[message.request_id] = message.ticket
            elif isinstance(message, Abort):
                self._forget(message.request_id)
            worker.send(message)
            self._num_commands += 1
            has_any = True
        return has_any

    def _tell(self, worker: StageWorker, traces: list[Traced], events: list[Event]) -> None:
        ended = [request_id for event in events if (request_id := _ended_by(event)) is not None]
        if ended:  # before its end is told: should this process die, its work has been counted
            self._tell_counts(worker)
        short = [self._tails.shorten(e) if isinstance(e, Moved) else e for e in events]
        try:
            self._send(News((*traces, *short)))
        except (MemoryError, ValueError):
            # Something does not fit into shared memory, or is no type that can be sent.
            for event in short:
                self._tell_alone(worker, event)
        for request_id in ended:
            self._tickets.pop(request_id, None)
        for event in events:
            if isinstance(event, Failed):
                for request_id, ticket in list(self._tickets.items()):
                    if ticket == event.ticket:
                        self._forget(request_id)

    def _tell_alone(self, worker: StageWorker, event: Event | Grown) -> None:
        try:
            self._send(News((event,)))
        except (MemoryError, ValueError) as error:
            name = self._spec.name
            told = (
                f"stage {name!r}: its output cannot be handed on: {type(error).__name__}: {error}"
            )
            _logger.exception("an output of stage %r cannot be handed on", name)
            if isinstance(event, Moved | Grown) and event.output is not None:
                worker.send(Abort(event.output.request_id))
            self._send(News((Failed(event.ticket, told),)))

    def _tell_counts(self, worker: StageWorker) -> None:
        self._counted_at = time.monotonic()
        self._send(Beat({self._spec.name: worker.stage.stats()}))

    def _forget(self, request_id: str) -> None:
        ticket = self._tickets.pop(request_id, None)
        if ticket is not None:
            self._tails.forget(ticket)

    def _sleep(self, longest_s: float | None) -> None:
        """Sleep until something comes, or it is time for a sign of life."""
        longest_s = _BEAT_S if longest_s is None else min(longest_s, _BEAT_S)
        with self._changed:
            if not self._has_changed:
                self._changed.wait(longest_s)
            self._has_changed = False


def _ended_by(event: Event) -> str | None:
    """The id of the request whose last output an event has."""
    output = event.output if isinstance(event, Moved) else None
    return output.request_id if output is not None and output.finished else None

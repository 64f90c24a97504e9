"""Starts a worker, monitors it, and restarts it when it dies.

Also contains the connection to a worker process; the one to an actor is in ``stages.cluster``.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import count
from typing import Any, TypeAlias

from engine.interface.placed_error import PlacedError, described
from stages.remote.channel import Channel
from stages.remote.codec import encode
from stages.remote.fork_server import WorkerProcess, start_worker
from stages.remote.messages import (
    Built,
    Call,
    Commands,
    Events,
    GaveUp,
    NotBuilt,
    Returned,
    StageFacts,
    WorkerMessage,
    WorkerSpec,
)
from stages.remote.worker_log import Logged, relay
from stages.stage import StageStats
from stages.worker.stage_link import WorkerState

_logger = logging.getLogger(f"omni.{__name__}")

MAX_STARTS = 6
"""Maximum number of consecutive starts of a worker without a finished request."""

_FIRST_DELAY_S, _MAX_DELAY_S = 0.05, 5.0
_GRACE_S = 5.0
_POLL_INTERVAL_S = 0.5
_STATS_TIMEOUT_S = 2.0
_REPLAYED_METHODS = ("set_enable_prefix_caching",)
"""Methods replayed on workers that start later."""

_EXIT_TIMEOUT_S = 5.0


class NoPlaceError(ValueError):
    """There are currently no resources for a worker; there may be some later."""


class Connection(ABC):
    """Connection to one worker, for its lifetime. All methods are thread-safe.

    Attributes:
        start_timeout_s: minimum heartbeat timeout, in seconds, until the worker is built.
        has_no_place: true if it ended because there are currently no resources for it.
    """

    start_timeout_s: float = 30.0
    has_no_place: bool = False

    @property
    def pid(self) -> int | None:
        """The worker's process id, if known on this machine."""
        return None

    @abstractmethod
    def send(self, message: Any) -> None:
        """Send a command or call without waiting for the worker.

        Raises:
            ConnectionError: the worker has ended.
            ValueError: the message cannot be encoded.
            MemoryError: there is no memory for its tensors.
        """

    @abstractmethod
    def kill(self, reason: str) -> None:
        """Kill the worker immediately; ``on_end`` receives the reason."""

    @abstractmethod
    def close(self, grace_s: float) -> None:
        """Let the worker end by itself, and kill it after the grace period."""


Connect: TypeAlias = Callable[
    [WorkerSpec, Callable[[Any], None], Callable[[str], None]], Connection
]
"""Starts a worker, which sends ``Built`` or ``NotBuilt`` before anything about its stages.

Its arguments are the worker's specification; ``on_message``, called with every message, in a thread
of the connection; and ``on_end``, called once, after the last message, with the exit reason. It
raises ``OSError`` if no worker can be started, ``NoPlaceError`` if none can be at present.
"""


class ProcessConnection(Connection):
    """A process that runs :func:`stages.remote.worker.worker_main`, and the channel to it."""

    def __init__(
        self,
        process: WorkerProcess,
        on_message: Callable[[Any], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._process = process
        self._on_end = on_end
        self._kill_reason: str | None = None
        self._is_closed = threading.Event()
        self._channel = Channel(process.sock, WorkerMessage, process.name)
        self._channel.start(on_message, self._channel_ended)

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

    def send(self, message: Any) -> None:
        """See :class:`Connection`."""
        self._channel.send(message)

    def kill(self, reason: str) -> None:
        """See :class:`Connection`."""
        self._kill_reason = reason
        self._process.kill()

    def close(self, grace_s: float) -> None:
        """See :class:`Connection`."""
        self._is_closed.set()
        self._channel.close()
        if not self._process.wait(grace_s):
            self._process.terminate(grace_s)
        self._channel.join(grace_s)

    def _channel_ended(self, reason: str) -> None:
        """Wait for the exit reason, after the last message of the worker."""
        if self._is_closed.is_set():
            return
        self._channel.close()
        if not self._process.wait(_EXIT_TIMEOUT_S):
            self._process.kill()
            self._process.wait(_EXIT_TIMEOUT_S)
        self._on_end(self._kill_reason or self._process.exit_reason or reason)


def connect_process(
    spec: WorkerSpec, on_message: Callable[[Any], None], on_end: Callable[[str], None]
) -> Connection:
    """Start a worker in a process; see :data:`Connect`."""
    main, name = "stages.remote.worker:worker_main", f"omni {spec.label}"
    process = start_worker(main, encode(spec), threads=spec.threads, name=name)
    try:
        return ProcessConnection(process, on_message, on_end)
    except BaseException:  # no descriptors or threads left
        process.sock.close()
        process.kill()
        raise


class WorkerEndedError(RuntimeError):
    """The called worker has ended, or is being restarted."""


class WorkerSupervisor:
    """Keeps a worker running. ::

        start ──► Built ──► ... ──► ended ──► (delay) ──► start ──► Built ──► ...
                                      └── MAX_STARTS in a row that finished nothing: final,
                                          or, if resources are lacking: retried indefinitely

    A pending call fails when its worker ends.

    Args:
        connect: starts a worker.
        stall_timeout_s: seconds without a heartbeat after which a worker counts as dead.

    Attributes:
        inboxes: for each stage, messages of its workers, with the worker's generation number:
            events, ``Idle``, ``Built``, and a ``WorkerState`` at the end of a worker.
        facts: description of each stage by the last worker; None before one was built.
        num_starts: starts since a worker last finished a request.
        state: state of the worker, and the history of the previous ones.
        on_event: called, in any thread, when an inbox may have messages.
    """

    def __init__(self, spec: WorkerSpec, connect: Connect, stall_timeout_s: float) -> None:
        self.spec = spec
        self.inboxes: dict[str, deque[tuple[int, Any]]]
        self.inboxes = {stage.name: deque() for stage in spec.stages}
        self._connect = connect
        self._stall_timeout_s = stall_timeout_s
        self._first_built: Future[None] = Future()
        self._lock = threading.Lock()  # guards everything below
        self._connection: Connection | None = None
        self._generation = 0
        self.num_commands = 0
        self._is_connected = threading.Event()
        self._is_settled = threading.Event()  # it is up, or may never be again
        self._is_closed = False
        self.num_starts = 0
        self._call_numbers = count()
        self._answers: dict[int, Future[Any]] = {}
        self._last_message_s = time.monotonic()
        self._settings: dict[tuple[str, str], Call] = {}
        self.on_event: Callable[[], object] = lambda: None
        self._start_at: float | None = None  # when the next worker is due
        self._is_due = threading.Event()
        self._watch = threading.Thread(
            target=self._watch_worker, name=f"watch {spec.label}"[:60], daemon=True
        )
        self.facts: Mapping[str, StageFacts] | None = None
        # Final counters of the workers that have ended, and the current one's latest report.
        self._ended = {stage.name: StageStats() for stage in spec.stages}
        self._latest: dict[str, StageStats] = {}
        self.state = WorkerState("starting")

    @property
    def is_up(self) -> bool:
        """True if the worker has built its stages and accepts commands."""
        return self.state.state == "up"

    @property
    def pid(self) -> int | None:
        """Process id of the current worker; None if there is none or this machine has no id."""
        return None if self._connection is None else self._connection.pid

    def start(self) -> None:
        """Start a worker without waiting; the inboxes get its ``Built`` or its end."""
        with self._lock:
            if self._is_closed:
                return
            self._generation += 1
            generation = self._generation
            self.num_starts += 1
            self.num_commands = 0
            self._last_message_s = time.monotonic()
            self._is_connected.clear()
            if self._watch.ident is None:
                self._watch.start()
        try:
            connection = self._connect(
                self.spec,
                lambda message: self._receive(generation, message),
                lambda reason: self._end(generation, reason),
            )
        except Exception as error:  # whatever it is, a later start may succeed
            has_no_place = isinstance(error, NoPlaceError)
            reason = str(error) if has_no_place else described(error)
            self._end(generation, f"could not be started: {reason}", has_no_place=has_no_place)
            return
        with self._lock:
            has_ended = self._is_over(generation)
            if not has_ended:
                self._connection = connection
            self._is_connected.set()
        if has_ended:
            connection.kill("it is not needed any more")

    def wait_until_built(self) -> None:
        """Wait for the first worker; ``ValueError``: it ended, or cannot build a stage."""
        self._first_built.result()

    def send(self, generation: int, commands: Commands) -> None:
        """Send commands to the worker of a generation.

        Raises:
            ConnectionError: it has ended; the next one gets nothing before its ``Built`` was read.
            ValueError: they cannot be encoded.
            MemoryError: there is no memory for their tensors.
        """
        with self._lock:
            connection = self._connection if generation == self._generation else None
        self._send_over(connection, commands)
        self.num_commands += len(commands.commands)

    def _send_over(self, connection: Connection | None, message: Any) -> None:
        if connection is None or not self.is_up:
            raise ConnectionError("no worker is up")
        connection.send(message)

    def call(
        self, stage: str | None, method: str, *arguments: Any, timeout_s: float | None = None
    ) -> Mapping[str, StageStats] | None:
        """Call a method of a stage, and wait for its result or the end of its worker.

        Args:
            stage: its name; None for all stages, whose counters are returned.
            method, arguments: see :func:`~stages.remote.worker.answer_call`.
            timeout_s: maximum wait; None for no limit.

        Raises:
            WorkerEndedError: the worker has ended.
            RuntimeError: the stage raised an exception other than ValueError.
            TimeoutError: there was no answer in time.
            ValueError: the stage raised one.
        """
        number, answer = next(self._call_numbers), Future[Any]()
        self._answers[number] = answer
        message = Call(number, stage, method, arguments)
        if method in _REPLAYED_METHODS and stage is not None:
            self._settings[stage, method] = message
        try:
            self._send_over(self._connection, message)
        except ConnectionError:
            self._fail_calls("its worker is being started again", number)
        try:
            return answer.result(timeout_s)
        finally:
            self._answers.pop(number, None)  # after a timeout

    def call_when_up(self, stage: str, method: str, *arguments: Any) -> None:
        """Call a method of a stage, and repeat it in the next worker if this one ends.

        Raises:
            RuntimeError: no more workers are started, or the stage raised another exception.
            ValueError: the stage raised one.
        """
        while True:
            try:
                self.call(stage, method, *arguments)
                return
            except WorkerEndedError:
                self._is_settled.wait()
                if not self.is_up:
                    raise

    def stats(self) -> Mapping[str, StageStats]:
        """Return the workers' counters, by stage; without an answer, those reported last."""
        generation, answer = self._generation, None
        with suppress(RuntimeError, TimeoutError):  # use its last report instead
            answer = self.call(None, "stats", timeout_s=_STATS_TIMEOUT_S)
        with self._lock:
            if answer is not None and generation == self._generation:  # else it is in _ended
                for name, stats in answer.items():
                    latest = self._latest.get(name)
                    # Counters never decrease below an earlier report.
                    if latest is None or latest.num_steps <= stats.num_steps:
                        self._latest[name] = stats
            return self._totals()

    def _totals(self) -> dict[str, StageStats]:
        empty = StageStats()
        return {
            name: self._latest.get(name, empty).following(ended)
            for name, ended in self._ended.items()
        }

    def _resolve(self, returned: Returned) -> None:
        """Resolve the future of a call, unless it has failed already."""
        if (answer := self._answers.pop(returned.number, None)) is None:
            return
        if returned.error is None:
            answer.set_result(returned.stats)
        elif returned.error_place is None:
            answer.set_exception(RuntimeError(f"{self.spec.called}: {returned.error}"))
        else:
            answer.set_exception(PlacedError(returned.error_place, returned.error))

    def _fail_calls(self, reason: str, *numbers: int) -> None:
        """Make calls raise ``WorkerEndedError``: those with the given numbers, or all."""
        for number in numbers or tuple(self._answers):
            if (answer := self._answers.pop(number, None)) is not None:
                answer.set_exception(WorkerEndedError(f"{self.spec.called}: {reason}"))

    def _watch_worker(self) -> None:
        """Start the next worker when it is due, and kill an unresponsive one, until closed."""
        while not self._is_closed:
            connection, start_at = self._connection, self._start_at
            now_s = time.monotonic()
            if start_at is not None and start_at <= now_s:
                self._start_at = None
                self.start()
            elif connection is not None:
                start_s = 0.0 if self.is_up else connection.start_timeout_s
                timeout_s = max(self._stall_timeout_s, start_s)
                if now_s - self._last_message_s > timeout_s:
                    self._last_message_s = now_s
                    connection.kill(f"gave no sign of life for {timeout_s:g} s")
            begin_s = time.monotonic()
            due = self._start_at
            wait_s = _POLL_INTERVAL_S if due is None else max(0.0, due - begin_s)
            self._is_due.wait(min(_POLL_INTERVAL_S, wait_s))
            self._is_due.clear()
            if time.monotonic() - begin_s > 2 * _POLL_INTERVAL_S:  # this process itself was stopped
                self._last_message_s = time.monotonic()

    def close(self) -> None:
        """End the worker, and start no more. Idempotent."""
        with self._lock:
            self._is_closed = True
            if self.is_up:
                self.state = replace(self.state, state="starting")
            self._is_settled.set()
            connection, self._connection = self._connection, None
        self._is_due.set()
        if connection is not None:
            connection.close(_GRACE_S)
        self._fail_calls("the stage is closed")

    def _receive(self, generation: int, message: Any) -> None:
        """Handle a message of a worker, in its connection's thread."""
        if generation != self._generation:
            return
        self._last_message_s = time.monotonic()
        match message:
            case Returned():
                self._resolve(message)
            case GaveUp():
                self._is_connected.wait()
                if (connection := self._connection) is not None:
                    connection.kill(f"was ended ({message.reason})")
            case Logged():
                relay(message)
            case Events():
                self._latest.update(message.stats)
                for name, events in message.events.items():
                    self.inboxes[name].append((generation, events))
                if message.events:
                    self.on_event()
            case NotBuilt() if self.facts is None:
                self._fail_first(message.error)
            case Built():
                # A worker may send this before the call that starts it returns.
                self._is_connected.wait()
                is_first, self.facts = self.facts is None, message.facts
                with self._lock:
                    connection = self._connection
                if connection is None:
                    return
                for setting in self._settings.values():
                    connection.send(setting)
                if self.state.state == "waiting":  # those starts did not fail by its own fault
                    self.num_starts = 1
                with self._lock:
                    if self._connection is None:  # closed in the meantime
                        return
                    self.state = replace(self.state, state="up")
                    self._is_settled.set()
                if is_first:
                    self._first_built.set_result(None)
                else:
                    self._broadcast(generation, message)
            case _:
                self._broadcast(generation, message)

    def _broadcast(self, generation: int, message: Any) -> None:
        for inbox in self.inboxes.values():
            inbox.append((generation, message))
        self.on_event()

    def _fail_first(self, error: str) -> None:
        if not self._first_built.done():
            self._first_built.set_exception(ValueError(error))

    def _is_over(self, generation: int) -> bool:
        """Return True if the generation is outdated, or this is closed."""
        return self._is_closed or generation != self._generation

    def _end(self, generation: int, reason: str, *, has_no_place: bool = False) -> None:
        with self._lock:
            if self._is_over(generation):
                return
            self._generation += 1
            has_no_place |= self._connection is not None and self._connection.has_no_place
            self._connection = None
            is_late = self.num_starts >= MAX_STARTS
            is_final = self.facts is None or (is_late and not has_no_place)
            is_waiting = is_late and not is_final
            was_waiting = self.state.state == "waiting"
            num_restarts = int(not is_final and not was_waiting)
            self.state = state = WorkerState(
                "down" if is_final else "waiting" if is_waiting else "starting",
                self.state.num_restarts + num_restarts,
                reason,
                time.time(),
            )
            totals = self._totals().items()
            self._ended = {name: each.plus(num_restarts=num_restarts) for name, each in totals}
            self._latest = {}
            if is_final or is_waiting:  # it may never be up again, so wake waiting callers
                self._is_settled.set()
            else:
                self._is_settled.clear()
        self._fail_calls(f"its worker {reason}")
        self._fail_first(f"{self.spec.called}: its worker {reason}, before it was built")
        # Reported before the next one is started, which may send messages immediately.
        self._broadcast(generation, state)
        if not is_final:
            plan = "it is started when there is a place" if is_waiting else "it is started again"
            if not (is_waiting and was_waiting):  # log it once
                _logger.warning("the worker of %s %s; %s", self.spec.called, reason, plan)
            num_tries = min(self.num_starts, MAX_STARTS + 10)
            delay_s = min(_FIRST_DELAY_S * 2**num_tries, _MAX_DELAY_S)
            self._start_at = time.monotonic() + delay_s
            self._is_due.set()


def start_workers(
    specs: Sequence[WorkerSpec], connect: Connect, stall_timeout_s: float
) -> list[WorkerSupervisor]:
    """Start workers concurrently, and wait until all have built their stages.

    Raises:
        ValueError: a stage cannot be built, or its worker has ended; no worker is left running.
    """
    with ExitStack() as closed:
        supervisors = []
        for spec in specs:
            supervisors.append(WorkerSupervisor(spec, connect, stall_timeout_s))
            closed.callback(supervisors[-1].close)
            supervisors[-1].start()
        for supervisor in supervisors:
            supervisor.wait_until_built()
        closed.pop_all()
    return supervisors

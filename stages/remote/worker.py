"""Main program of a worker: builds its stages, and steps them by turns until its link is gone.

Also contains the calls that a link may make to a stage, by name, and the description of a stage
that the worker sends.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from typing import Any

from engine.interface.log_fields import LogFields
from engine.interface.placed_error import PlacedError, described
from stages.portable import load_by_name
from stages.remote.channel import Channel, ChannelClosed
from stages.remote.codec import Decoder
from stages.remote.messages import (
    Built,
    Call,
    Commands,
    Events,
    GaveUp,
    Idle,
    LinkMessage,
    NotBuilt,
    Returned,
    StageFacts,
    StageSpec,
    WorkerMessage,
    WorkerSpec,
)
from stages.remote.worker_log import forward_log
from stages.stage import Stage, Transform
from stages.stage_config import StageConfig
from stages.trace_events import Traced
from stages.worker.messages import Abort, Command, Event, Failed, Output
from stages.worker.stage_tracer import TracedWorker
from stages.worker.stage_worker import StageWorker

_IMMEDIATE_CALLS = frozenset(("stats", "check_sampling"))
"""Calls answered immediately, even during a step. The others change the stage and wait for it."""


def answer_call(stages: Mapping[str, Stage], call: Call) -> Returned:
    """Call the method of a stage, or collect all counters; exceptions become the answer."""
    try:
        if call.stage is None:
            stats = {name: stage.stats() for name, stage in stages.items()}
            return Returned(call.number, stats=stats)
        stage = stages[call.stage]
        match call.method:
            case "set_enable_prefix_caching":
                (stage.enable_prefix_caching,) = call.arguments
            case "check_sampling" | "reset_prefix_cache" | "check_integrity":
                getattr(stage, call.method)(*call.arguments)
            case _:
                raise RuntimeError(f"a stage has no method {call.method!r} for calls")
        return Returned(call.number)
    except Exception as error:  # raised again by the caller
        if not isinstance(error, ValueError):
            return Returned(call.number, error=described(error))
        place = error.place if isinstance(error, PlacedError) else ()
        return Returned(call.number, error=str(error), error_place=place)


def log_fields_of(spec: WorkerSpec) -> LogFields:
    """Return the log fields of a worker: its stage, if it has only one."""
    return LogFields(spec.name, spec.replica) if len(spec.stages) == 1 else LogFields()


def _facts_of(stage: Stage) -> StageFacts:
    """Describe a stage for other processes."""
    facts = {each.name: getattr(stage, each.name, None) for each in fields(StageFacts)}
    dtype = None if stage.dtype is None else str(stage.dtype).removeprefix("torch.")
    return StageFacts(**facts | {"dtype": dtype, "description": dict(stage.describe())})


_logger = logging.getLogger(f"omni.{__name__}")

_HEARTBEAT_S = 0.5
_EXIT_TIMEOUT_S = 5.0
# Sleep of a worker whose requests all wait for something, doubled each time.
_MIN_NAP_S, _MAX_NAP_S = 0.001, 0.05

_Send = Callable[[WorkerMessage], None]
Build = Callable[[StageSpec], tuple[Stage, Transform | None]]
"""Builds a stage of a worker; also returns the transform that makes its prompts."""


def build_stage(spec: StageSpec) -> tuple[Stage, Transform | None]:
    """Build a stage of a worker, and load the transform that makes its prompts."""
    kind: type[StageConfig] = load_by_name(spec.kind)
    config = kind.model_validate_json(spec.config)
    transform = None if spec.transform is None else load_by_name(spec.transform)
    return config.build_stage(spec.name), transform


@contextmanager
def _heartbeats(send: _Send) -> Iterator[None]:
    """Send heartbeats from another thread meanwhile: loading a model may take minutes."""
    is_over = threading.Event()

    def beat() -> None:
        with suppress(ConnectionError):
            send(Events({}))
            while not is_over.wait(_HEARTBEAT_S):
                send(Events({}))

    thread = threading.Thread(target=beat, name="signs of life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


class WorkerLoop:
    """Steps the stages of a worker by turns, and executes commands from a connection. ::

        connection's thread ──► inbox ──► turn: commands, calls, a step of each stage ──► send
                       └──► answers read-only calls immediately

    A turn steps the last stage first, so that nearly finished requests leave before others enter.

    Args:
        send: sends to the link; thread-safe. Raises ``ConnectionError`` when the link is gone.
    """

    def __init__(self, spec: WorkerSpec, send: _Send, build: Build = build_stage) -> None:
        self._spec = spec
        self._build = build
        self._send = send
        self._inbox: deque[tuple[str, Command] | Call] = deque()
        self._changed = threading.Event()
        self._is_over = False
        self._stages: dict[str, Stage] | None = None  # once all are built
        self._workers: dict[str, StageWorker] = {}  # the last stage first
        self._num_commands = 0
        self._nap_s = _MIN_NAP_S
        self._stats_sent_s = 0.0

    def take(self, message: Any) -> None:
        """Accept commands or a call, in the connection's thread."""
        if isinstance(message, Call) and self._stages and message.method in _IMMEDIATE_CALLS:
            self._send(answer_call(self._stages, message))
            return
        if isinstance(message, Commands):
            self._inbox.extend((message.stage, command) for command in message.commands)
        else:
            self._inbox.append(message)
        self._changed.set()

    def end(self) -> None:
        """Make :meth:`run` return before its next turn."""
        self._is_over = True
        self._changed.set()

    def run(self) -> None:
        """Build the stages and step them until the end."""
        with ExitStack() as closed:
            try:
                with _heartbeats(self._send):
                    facts = {each.name: self._add_stage(each, closed) for each in self._spec.stages}
            except Exception as error:  # raised again where the worker was started
                _logger.debug("%s cannot be built", self._spec.called, exc_info=error)
                self._send(NotBuilt(str(error)))
                return
            self._stages = {name: each.stage for name, each in self._workers.items()}
            for worker in self._workers.values():
                worker.notify(self._changed.set)
                worker.prepare_aside()
                closed.callback(worker.close)
            self._send(Built(facts))
            while not self._is_over:
                self._turn()

    def _add_stage(self, spec: StageSpec, closed: ExitStack) -> StageFacts:
        try:
            stage, transform = self._build(spec)
            closed.callback(stage.close)
            facts = _facts_of(stage)
        except Exception as error:  # the stage may be a user's class
            message = str(error) if isinstance(error, ValueError) else described(error)
            raise ValueError(f"stage {spec.name!r}: {message}") from error
        if self._spec.is_traced:
            replica = self._spec.replica
            worker: StageWorker = TracedWorker(stage, transform, spec.edges, replica=replica)
        else:
            worker = StageWorker(stage, transform, spec.edges)
        self._workers = {spec.name: worker, **self._workers}
        return facts

    def _turn(self) -> None:
        """Handle the inbox; step each stage and send its events; sleep if there are none."""
        has_moved = self._handle_inbox()
        for name, worker in self._workers.items():
            worker.work()
            if (reason := worker.repair()) is not None:
                self._give_up(reason if len(self._workers) == 1 else f"stage {name!r}: {reason}")
                return
            # Immediately: the receivers can act on it while the next stage works.
            has_moved |= self._emit(name, worker)
        if has_moved:
            self._nap_s = _MIN_NAP_S
        elif not (busy := [worker for worker in self._workers.values() if worker.has_work]):
            self._sleep(_HEARTBEAT_S)
        elif all([worker.check_idle() for worker in busy]):
            if self._nap_s == _MIN_NAP_S:  # it was not idle before
                self._send(Idle(self._num_commands))
            self._sleep(self._nap_s)
            self._nap_s = min(2 * self._nap_s, _MAX_NAP_S)
        if time.monotonic() - self._stats_sent_s > _HEARTBEAT_S:
            self._send_stats()

    def _give_up(self, reason: str) -> None:
        """End this worker, so that another one runs its requests, including this turn's."""
        self._send_stats()
        self._send(GaveUp(reason))
        self.end()

    def _handle_inbox(self) -> bool:
        """Execute the commands and calls in the inbox; return True if there was a command."""
        has_any = False
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, Call):
                assert self._stages is not None
                self._send(answer_call(self._stages, message))
                continue
            name, command = message
            self._workers[name].send(command)
            self._num_commands += 1
            has_any = True
        return has_any

    def _emit(self, name: str, worker: StageWorker) -> bool:
        """Send the new events of a stage; return True if there were any."""
        events = worker.events()
        ends = any([isinstance(e, Output) and e.delta and e.delta.finished for e in events])
        try:
            if events:
                stats = {name: worker.stage.stats()} if ends else {}
                self._send(Events({name: tuple(events)}, stats))
        except (MemoryError, ValueError):
            # Something does not fit into shared memory, or has a type that cannot be sent.
            for event in events:
                if not isinstance(event, Traced):
                    self._emit_alone(name, event)
        return bool(events)

    def _emit_alone(self, name: str, event: Event) -> None:
        try:
            self._send(Events({name: (event,)}))
        except (MemoryError, ValueError) as error:
            message = f"stage {name!r}: its output cannot be handed on: {described(error)}"
            _logger.exception("an output of stage %r cannot be handed on", name)
            if isinstance(event, Output):
                parts = (event.delta, *(chunk.output for chunk in event.chunks))
                request_id = next(part.request_id for part in parts if part is not None)
                self._workers[name].send(Abort(request_id))
            self._send(Events({name: (Failed(event.ticket, message),)}))

    def _send_stats(self) -> None:
        self._stats_sent_s = time.monotonic()
        self._send(Events({}, {name: each.stage.stats() for name, each in self._workers.items()}))

    def _sleep(self, timeout_s: float) -> None:
        """Sleep until the inbox or a stage changes."""
        self._changed.wait(timeout_s)
        self._changed.clear()  # before the next turn reads the inbox


def worker_main(sock: socket.socket, argument: bytes) -> None:
    """Run a worker in this process; ``sock`` is connected to the link."""
    spec: WorkerSpec = Decoder(WorkerSpec).decode(argument)
    channel = Channel(sock, LinkMessage, "the pipeline")
    loop = WorkerLoop(spec, channel.send)
    channel.start(loop.take, lambda reason: loop.end())
    forward_log(channel.send, spec.log_level, log_fields_of(spec))
    try:
        loop.run()
        channel.wait_until_sent(_EXIT_TIMEOUT_S)
    except ChannelClosed:
        return  # the pipeline is gone, or closed this stage
    finally:
        channel.close()

"""A worker's program: builds its stage, and drives it until its link is gone.

Here are also the calls that a link may make to the stage, by name, and the description of the stage
that the worker sends.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

from engine import SamplingParams
from engine.interface.placed_error import PlacedError
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
    Returned,
    StageFacts,
    WorkerMessage,
    WorkerSpec,
)
from stages.remote.growing_output import OutputTails
from stages.stage import Stage, StageInputs, StageOutput, StageRequest, StageStats, Transform
from stages.stage_config import StageConfig
from stages.trace_events import Traced
from stages.worker.messages import Abort, Command, Enter, Event, Failed, Moved
from stages.worker.stage_link import DistantStage
from stages.worker.stage_tracer import TracedWorker
from stages.worker.stage_worker import StageWorker

if TYPE_CHECKING:
    import torch

__all__ = [
    "Build",
    "StageShape",
    "ToldStage",
    "WorkerCalls",
    "WorkerLoop",
    "alive",
    "build_stage",
    "facts_of",
    "not_built",
]


class StageShape(Protocol):
    """What of a stage's configuration its pipeline has to know."""

    @property
    def inputs(self) -> StageInputs | None:
        """The stages that feed it."""
        ...

    @property
    def final_output(self) -> tuple[str, ...]:
        """What the user gets of it."""
        ...


class ToldStage(DistantStage):
    """Answers for a stage by what its worker told of it, and takes nothing itself.

    Args:
        name: of the stage.
        config: of the stage.
        facts: what its worker told.
    """

    def __init__(self, name: str, config: StageShape, facts: StageFacts) -> None:
        super().__init__(
            name,
            inputs=config.inputs,
            outputs=getattr(config, "outputs", None),
            final_output=config.final_output,
        )
        self._facts = facts
        self.has_cache = facts.has_cache
        self._checked: set[str] = set()

    @property
    def hidden_size(self) -> int | None:
        """See :class:`~stages.stage.Stage`."""
        return self._facts.hidden_size

    @property
    def dtype(self) -> torch.dtype | None:
        """See :class:`~stages.stage.Stage`."""
        import torch  # only here: a link needs none of it

        return None if self._facts.dtype is None else getattr(torch, self._facts.dtype)

    @property
    def sampling(self) -> SamplingParams | None:
        """See :class:`~stages.stage.Stage`."""
        return self._facts.sampling

    @property
    def seed(self) -> int | None:
        """See :class:`~stages.stage.Stage`."""
        return self._facts.seed

    @property
    def speakers(self) -> tuple[str, ...] | None:
        """See :class:`~stages.stage.Stage`."""
        return self._facts.speakers

    @property
    def takes_chunks(self) -> bool:
        """See :class:`~stages.stage.Stage`."""
        return self._facts.takes_chunks

    @property
    def gives_chunks(self) -> bool:
        """See :class:`~stages.stage.Stage`."""
        return self._facts.gives_chunks

    def describe(self) -> Mapping[str, Any]:
        """What a worker resolved and reserved."""
        return dict(self._facts.description)

    def check_sampling(self, params: SamplingParams) -> None:
        """See :class:`~stages.stage.Stage`; what was asked before is not asked again.

        A worker that does not answer at once is not waited for: it refuses the request itself.
        """
        key = params.model_dump_json(exclude={"seed"})
        if key in self._checked:
            return
        try:
            self._ask_sampling(params)
        except (RuntimeError, TimeoutError):
            return
        if len(self._checked) < 1000:
            self._checked.add(key)

    @abstractmethod
    def _ask_sampling(self, params: SamplingParams) -> None:
        """Ask a worker, for a moment.

        Raises:
            RuntimeError: there is none.
            TimeoutError: it does not answer.
            ValueError: it refuses them.
        """

    def add_request(self, request: StageRequest) -> None:
        """Its worker takes requests, from whatever drives it alone."""
        raise RuntimeError(f"stage {self.name!r} runs elsewhere; ask its pipeline")

    def step(self) -> list[StageOutput]:
        """Its worker steps by itself."""
        raise RuntimeError(f"stage {self.name!r} runs elsewhere, where it is stepped")

    def abort(self, request_id: str) -> None:
        """Its worker drops requests, told by whatever drives it alone."""
        raise RuntimeError(f"stage {self.name!r} runs elsewhere; ask its pipeline")


class WorkerCalls:
    """The methods of a stage that are called between its steps, and those that only look.

    Args:
        stage: to ask.

    Attributes:
        at_once: what may be asked beside a step.
        in_turn: what changes the stage, and waits for its step.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.at_once: Mapping[str, Callable[..., Any]] = {
            "stats": self._stats,
            "describe": lambda: dict(stage.describe()),
            "check_sampling": self._check_sampling,
        }
        self.in_turn: Mapping[str, Callable[..., Any]] = {
            "reset_prefix_cache": stage.reset_prefix_cache,
            "check_integrity": stage.check_integrity,
            "set_enable_prefix_caching": self._set_enable_prefix_caching,
        }

    def answer(self, call: Call) -> Returned:
        """Do what is asked; whatever it raises is the answer."""
        method = self.at_once.get(call.method) or self.in_turn[call.method]
        try:
            return Returned(call.number, method(*call.arguments))
        except PlacedError as error:
            return Returned(call.number, None, str(error), ValueError.__name__, error.place)
        except Exception as error:  # it is raised again at the other end
            return Returned(call.number, None, str(error), type(error).__name__)

    def _stats(self) -> Mapping[str, StageStats]:
        return {self._stage.name: self._stage.stats()}

    def _check_sampling(self, params: SamplingParams) -> None:
        self._stage.check_sampling(params)

    def _set_enable_prefix_caching(self, value: bool) -> None:
        self._stage.enable_prefix_caching = value


def facts_of(stage: Stage) -> StageFacts:
    """What a stage says of itself."""
    return StageFacts(
        hidden_size=stage.hidden_size,
        dtype=None if stage.dtype is None else str(stage.dtype).removeprefix("torch."),
        sampling=stage.sampling,
        seed=stage.seed,
        takes_chunks=stage.takes_chunks,
        gives_chunks=stage.gives_chunks,
        speakers=stage.speakers,
        has_cache=stage.has_cache,
        enable_prefix_caching=stage.enable_prefix_caching,
        final_output_kinds=stage.final_output_kinds,
        description=dict(stage.describe()),
    )


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

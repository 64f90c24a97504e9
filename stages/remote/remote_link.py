"""The way to a stage whose workers are elsewhere, and may die."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from stages.remote.connection import WorkerGone
from stages.remote.control import Built, Grown, Idle, News, NotBuilt, Orders
from stages.remote.prefix_router import PrefixRouter
from stages.remote.seeded_runs import SeededRuns
from stages.remote.visit import ContradictionError, Visit
from stages.remote.worker_life import Ended, WorkerLife
from stages.trace_events import RUN_AGAIN, StageEvent, Traced, this_clock
from stages.worker.messages import (
    Abort,
    CloseStream,
    Command,
    Credit,
    Enter,
    Event,
    Extend,
    Failed,
    Moved,
    StreamedEdge,
    Took,
)
from stages.worker.stage_link import StageLink

__all__ = ["RemoteLink"]

_logger = logging.getLogger(f"omni.{__name__}")


class RemoteLink(StageLink):
    """Sends commands to a stage's workers, and hides from the orchestrator that they die.

    What a request needs to run again is kept until the stage is done with it. A worker that ends
    is started again; the requests that it had run again there, or in another replica, from what
    they came with, at most ``max_retries`` times. So do those that the stage itself ended with an
    error. Nothing is told twice.

    Args:
        name: of the stage.
        lives: a worker for every replica.
        edges: the streamed edges that leave the stage.
        max_retries: how often a request is run again.
    """

    def __init__(
        self,
        name: str,
        lives: Sequence[WorkerLife],
        edges: tuple[StreamedEdge, ...],
        max_retries: int,
    ) -> None:
        self._name = name
        self._lives = tuple(lives)
        self._edges = edges
        self._max_retries = max_retries
        self._router = PrefixRouter()
        self._visits: dict[str, Visit] = {}
        self._by_ticket: dict[int, Visit] = {}
        self._tickets = count()
        self._seeds = SeededRuns()
        self._news: list[Event] = []
        self._traces: list[Traced] = []
        # The stage is built by the time that a link is made.
        self._is_up = [True] * len(self._lives)
        self._outboxes: list[list[Command]] = [[] for _ in self._lives]
        self._num_sent = [0] * len(self._lives)
        self._idle_at = [-1] * len(self._lives)
        self._hopeless: dict[int, str] = {}
        self._has_moved = False
        self._on_news: Callable[[], object] = lambda: None

    def tell_news(self, on_news: Callable[[], object]) -> None:
        """See :class:`~stages.worker.stage_link.StageLink`."""
        self._on_news = on_news
        for life in self._lives:
            life.tell_news(on_news)

    def prepare_aside(self) -> None:
        """Workers elsewhere always do."""

    def work(self) -> None:
        """The workers work by themselves."""

    @property
    def has_requests(self) -> bool:
        """Whether any worker has a request, or gets one when it is up."""
        return bool(self._visits)

    @property
    def has_work(self) -> bool:
        """Whether any worker has said something, or has said nothing for too long."""
        return bool(self._news) or any(life.has_news for life in self._lives) or self._is_stalled()

    @property
    def time_to_work(self) -> float | None:
        """Seconds after which a silent worker counts as dead; None if none has anything to do."""
        time_s = min((self._lives[each].time_to_stall() for each in self._busy()), default=math.inf)
        return max(0.0, time_s) if time_s < math.inf else None

    def check_idle(self) -> bool:
        """Whether every worker has said that nothing moves, with all that was sent to it."""
        if self._has_moved or self._news:
            self._has_moved = False
            return False
        return all(self._idle_at[each] == self._num_sent[each] for each in self._busy())

    def close(self) -> None:
        """The workers are the stage's to end."""

    def send(self, command: Command) -> None:
        """See :class:`~stages.worker.stage_link.StageLink`."""
        self._has_moved = True
        if isinstance(command, Enter):
            self._enter(command)
            return
        visit = self._visits.get(command.request_id)
        if visit is None:
            return
        match command:
            case Extend():
                visit.extends.append(command)
            case Credit():
                visit.credit(command.consumer)
            case CloseStream():
                visit.close_stream(command.consumer)
            case Abort():
                self._forget(visit)
        self._hand_over(visit, command)

    def drop_all(self) -> None:
        """See :class:`~stages.worker.stage_link.StageLink`."""
        visits, self._visits = self._visits, {}
        self._by_ticket, self._news = {}, []
        for visit in visits.values():
            self._hand_over(visit, Abort(visit.enter.request_id))

    def news(self) -> list[Event]:
        """See :class:`~stages.worker.stage_link.StageLink`."""
        for replica in self._busy():
            self._lives[replica].check_alive()
        self._listen()
        news, self._news = self._news, []
        self._has_moved |= bool(news)
        return news

    def traces(self) -> list[Traced]:
        """See :class:`~stages.worker.stage_link.StageLink`."""
        traces, self._traces = self._traces, []
        return traces

    def _listen(self) -> None:
        for replica, life in enumerate(self._lives):
            for message in life.news():
                self._hear(replica, message)

    def _enter(self, enter: Enter) -> None:
        self._listen()  # a worker may be back, and nobody have asked for news since it was lost
        enter = self._seeds.seeded(enter, (self._lives[0].facts or {}).get(self._name))
        visit = Visit.of(enter, next(self._tickets), self._edges)
        self._visits[enter.request_id] = self._by_ticket[visit.ticket] = visit
        self._place(visit)

    def _place(self, visit: Visit) -> None:
        """Choose a replica for a run that begins, and hand it over if that is up."""
        loads = {each: 0 for each in range(len(self._lives)) if each not in self._hopeless}
        if not loads:
            self._fail(visit, next(iter(self._hopeless.values())))
            return
        for other in self._visits.values():
            if other is not visit and other.replica in loads:
                loads[other.replica] += 1
        up = {each: load for each, load in loads.items() if self._is_up[each]}
        visit.replica = self._router.choose(visit.enter, up or loads)
        self._hand_over(visit, visit.entry(), *visit.extends)

    def _hand_over(self, visit: Visit, *commands: Command) -> None:
        """Send what concerns a request to its worker; if none is up, it gets all of it later."""
        if self._is_up[visit.replica]:
            self._outboxes[visit.replica] += commands

    def flush(self) -> None:
        """See :class:`~stages.worker.stage_link.StageLink`."""
        for replica, outbox in enumerate(self._outboxes):
            if outbox:
                self._outboxes[replica] = []
                self._dispatch(replica, tuple(outbox))

    def _dispatch(self, replica: int, commands: tuple[Command, ...]) -> None:
        self._num_sent[replica] += len(commands)
        try:
            self._lives[replica].send(Orders(commands))
            for command in commands:
                if isinstance(command, Enter) and command.request_id in self._visits:
                    self._visits[command.request_id].is_sent = True
        except WorkerGone:
            return  # they are sent to the next one
        except (ValueError, MemoryError) as error:
            if len(commands) > 1:  # one of them cannot be sent; the others can
                self._num_sent[replica] -= len(commands)
                for command in commands:
                    self._dispatch(replica, (command,))
                return
            self._num_sent[replica] -= 1
            visit = self._visits.get(commands[0].request_id)
            if visit is not None:
                has_begun = not isinstance(commands[0], Enter)
                kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                self._fail(visit, f"{kind}{error}", has_begun=has_begun)
                if has_begun:
                    self._hand_over(visit, Abort(visit.enter.request_id))

    def _hear(self, replica: int, message: Any) -> None:
        match message:
            case News():
                for event in message.events:
                    if isinstance(event, Traced):
                        self._traces.append(event)
                    else:
                        self._take(event)
            case Idle():
                self._idle_at[replica] = message.num_commands
            case Built():
                self._is_up[replica] = True
                self._hopeless.pop(replica, None)
                self._trace("worker started", replica)
                self._outboxes[replica] = []
                self._num_sent[replica], self._idle_at[replica] = 0, -1
                for visit in [each for each in self._visits.values() if each.replica == replica]:
                    self._hand_over(visit, visit.entry(), *visit.extends)
            case NotBuilt():
                _logger.warning("a worker of stage %r cannot be built: %s", self._name, message)
            case Ended():
                self._bury(replica, message)

    def _take(self, event: Event | Grown) -> None:
        visit = self._by_ticket.get(event.ticket)
        if visit is None:
            return
        match event:
            case Took():
                if visit.take():
                    self._news.append(Took(visit.enter.ticket))
            case Failed():
                if event.is_stages and visit.num_runs <= self._max_retries:
                    self._run_again(visit)
                else:
                    self._forget(visit)
                    self._news.append(replace(event, ticket=visit.enter.ticket))
            case Moved() | Grown():
                self._move(visit, event)

    def _move(self, visit: Visit, event: Moved | Grown) -> None:
        output = event.output
        if output is not None and output.error is not None and visit.num_runs <= self._max_retries:
            # It was interrupted, perhaps; what is wrong with the request itself comes out again.
            self._run_again(visit)
            return
        try:
            moved = visit.hear(event)
        except ContradictionError:
            self._hand_over(visit, Abort(visit.enter.request_id))
            told = "its worker died, and another run did not say what the first one had said"
            self._fail(visit, told)
            return
        if output is not None and output.finished:
            if output.error is None:
                self._lives[visit.replica].note_success()
            self._forget(visit)
        if moved is not None:
            self._news.append(moved)

    def _bury(self, replica: int, ended: Ended) -> None:
        """A worker has ended: run again what it had."""
        self._is_up[replica] = False
        self._trace("worker ended", replica, reason=ended.reason)
        self._outboxes[replica] = []
        self._num_sent[replica], self._idle_at[replica] = 0, -1
        self._router.forget(replica)
        if ended.is_waiting:
            self._hopeless[replica] = (
                f"it takes no requests until there is a place for it: its worker {ended.reason}"
            )
        elif ended.is_final:
            told = f"it cannot be used any more: its worker {ended.reason}"
            self._hopeless[replica] = told
            _logger.error("stage %r: a worker %s, for the last time", self._name, ended.reason)
        for visit in [each for each in self._visits.values() if each.replica == replica]:
            if visit.is_sent and visit.num_runs > self._max_retries:
                runs = f"{visit.num_runs} times" if visit.num_runs > 1 else "once"
                told = f"its worker {ended.reason} while it had this request; it was run {runs}"
                self._fail(visit, told)
            elif visit.is_sent:
                self._run_again(visit)
            else:
                self._place(visit)

    def _run_again(self, visit: Visit) -> None:
        del self._by_ticket[visit.ticket]
        visit.begin_again(next(self._tickets))
        self._by_ticket[visit.ticket] = visit
        self._place(visit)
        self._trace(RUN_AGAIN, visit.replica, visit.enter.request_id, run=visit.num_runs)

    def _trace(
        self, name: str, replica: int, request_id: str | None = None, **args: int | str
    ) -> None:
        """Tell a trace, if there is one, what no worker can."""
        if self._lives[replica].spec.is_traced:
            now_s = time.monotonic()
            event = StageEvent(name, now_s, None, request_id, args)
            self._traces.append(Traced((event,), replica, this_clock(), now_s))

    def _fail(self, visit: Visit, told: str, *, has_begun: bool = True) -> None:
        self._forget(visit)
        error = f"stage {self._name!r}: {told}"
        self._news.append(Failed(visit.enter.ticket, error, has_begun=has_begun))
        self._on_news()

    def _forget(self, visit: Visit) -> None:
        self._visits.pop(visit.enter.request_id, None)
        self._by_ticket.pop(visit.ticket, None)

    def _busy(self) -> set[int]:
        """The replicas that have requests."""
        return {visit.replica for visit in self._visits.values()}

    def _is_stalled(self) -> bool:
        return any(self._lives[replica].time_to_stall() <= 0 for replica in self._busy())

"""Has requests run by a pipeline in a process of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from itertools import count
from typing import TypeAlias

from engine.interface.log_fields import package_logger
from engine.interface.ownership import renew_in_forks
from omni.requests.request import OmniOutput, OmniRequest
from omni.runtime.apart.apart_messages import (
    AbortById,
    Discard,
    Outputs,
    Submission,
    Submit,
)
from omni.runtime.apart.shown_outputs import ShortOutput, ShownRequest, unpacked
from omni.runtime.orchestrator import refusal
from omni.runtime.runner import LENT_HERE, Runner, Sink, Ticket
from stages.remote.connection import WorkerGone
from stages.remote.control import Built, NotBuilt
from stages.remote.worker_life import Ended, WorkerLife

__all__ = ["ApartRunner"]

_logger = package_logger(__name__)

_LOOKED_EACH_S = 1.0
_CLOSED = "the pipeline was closed before it finished"

_Letter: TypeAlias = tuple[Ticket, OmniOutput]


class ApartRunner(Runner):
    """Hands requests over to the process of a pipeline, and their outputs to those who asked.

    A process that dies is started again; the requests that it had fail, and later ones wait for it.
    One that dies six times in a row, without having finished any, is given up.

    Args:
        life: of the process, which is up; it is this runner's from now on.
    """

    def __init__(self, life: WorkerLife) -> None:
        self._life = life
        self._pid = os.getpid()
        self.renew_locks()
        renew_in_forks(self)
        self._numbers = count()
        self._live: dict[int, tuple[Ticket, ShownRequest]] = {}
        self._number_of: dict[Ticket, int] = {}
        self._together: list[Submission] | None = None
        self._held_back: list[Submission] = []
        self._is_stopped = False
        self._pauses = 0
        self._lent_to: int | None = None
        self._has_stopped = threading.Event()
        life.tell_news(self._take_news)
        self._take_news()
        self._watch = threading.Thread(target=self._watch_life, name="omni-watch", daemon=True)
        self._watch.start()

    def renew_locks(self) -> None:
        """See :class:`~engine.interface.ownership.Renewable`: callers end requests in forks too."""
        self._in_order = threading.RLock()  # over news, from taking them in to telling of them
        self._lock = threading.RLock()  # over all that is below it; no sink is called under it

    def submit(self, request: OmniRequest, request_id: str, sink: Sink) -> Ticket:
        """See :class:`~omni.runtime.runner.Runner`."""
        ticket = Ticket(request, request_id, sink)
        with self._lock:
            self._check_open()
            number = next(self._numbers)
            self._live[number] = ticket, ShownRequest(request_id)
            self._number_of[ticket] = number
            submission = Submission(number, _named(request, request_id))
            if self._together is not None:
                self._together.append(submission)
                return ticket
            refused = self._send([submission])
        self._tell(refused)
        return ticket

    @contextmanager
    def together(self) -> Iterator[None]:
        """See :class:`~omni.runtime.runner.Runner`."""
        refused: list[_Letter] = []
        with self._lock:
            if self._together is not None:  # within another such block
                yield
                return
            self._together = []
            try:
                yield
            finally:
                submissions, self._together = self._together, None
                refused = self._send(submissions)
        self._tell(refused)

    def abort(self, request_id: str) -> None:
        """See :class:`~omni.runtime.runner.Runner`."""
        with self._lock:
            held_back = [e.number for e in self._held_back if e.request.request_id == request_id]
            aborted = [self._ended(number, "aborted") for number in held_back]
            if not aborted:
                self._try_to_send(AbortById(request_id))
        self._tell(aborted)

    def discard(self, tickets: Iterable[Ticket]) -> None:
        """See :class:`~omni.runtime.runner.Runner`."""
        if os.getpid() != self._pid:  # they are the parent's, who may still want them
            return
        with self._lock:
            numbers = [self._number_of.get(each) for each in tickets]
            live = tuple(each for each in numbers if each is not None)
            for number in live:
                self._forget(number)
            if live:
                self._try_to_send(Discard(live))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """See :class:`~omni.runtime.runner.Runner`; the stages are asked by calls."""
        thread = threading.get_ident()
        with self._lock:
            self._check_open()
            num_running = len(self._live) - len(self._held_back)
            if num_running:
                raise RuntimeError(
                    f"{num_running} requests are running; wait for them or abort them first"
                )
            if self._pauses and self._lent_to != thread:
                raise RuntimeError(
                    "the pipeline is lent to another thread (paused): wait until it has given it "
                    "back"
                )
            self._pauses += 1
            self._lent_to = thread
        try:
            yield
        finally:
            with self._lock:
                self._pauses -= 1
                refused = self._send_held_back()
            self._tell(refused)

    def check_can_wait(self) -> None:
        """See :class:`~omni.runtime.runner.Runner`."""
        if self._pauses and self._lent_to == threading.get_ident():
            raise RuntimeError(LENT_HERE)

    def stop(self) -> None:
        """See :class:`~omni.runtime.runner.Runner`."""
        with self._lock:
            self._is_stopped = True
        self._has_stopped.set()
        self._life.close()
        with self._in_order:
            self._tell(self._end_all(_CLOSED))

    def _check_open(self) -> None:
        if self._is_stopped:
            raise RuntimeError("the pipeline is closed")

    def _watch_life(self) -> None:
        """End a process that hangs, of which nobody else would hear."""
        while not self._has_stopped.wait(_LOOKED_EACH_S):
            self._life.check_alive()

    def _send(self, submissions: list[Submission]) -> list[_Letter]:
        """Hand requests over, under the lock; the last outputs of those that cannot run."""
        if self._pauses:
            self._held_back += submissions
            return []
        live = tuple(each for each in submissions if each.number in self._live)
        if not live:
            return []
        try:
            self._life.send(Submit(live))
        except WorkerGone:
            if self._is_stopped or self._life.state.state == "down":
                return [self._ended(each.number, self._why_gone()) for each in live]
            self._held_back += live  # until another one is built, or none is started any more
            return []
        except (ValueError, MemoryError) as error:  # of what one of them has
            if len(live) > 1:
                return [letter for each in live for letter in self._send([each])]
            (lonely,) = live
            ticket, _ = self._forget(lonely.number)
            return [(ticket, refusal(ticket.request_id, error))]
        return []

    def _send_held_back(self) -> list[_Letter]:
        if self._pauses:
            return []
        waiting, self._held_back = self._held_back, []
        return self._send(waiting)

    def _why_gone(self) -> str:
        if self._is_stopped:
            return _CLOSED
        last_end = self._life.state.last_end
        return f"{self._life.spec.called} cannot be used any more: its process {last_end}"

    def _try_to_send(self, message: object) -> None:
        with suppress(WorkerGone):  # with whatever the message was about
            self._life.send(message)

    def _take_news(self) -> None:
        """Tell what the process has to say, in order, in whatever thread hears of it."""
        with self._in_order:
            for message in self._life.news():
                match message:
                    case Outputs():
                        self._tell_together(unpacked(message))
                    case Built():
                        with self._lock:
                            refused = self._send_held_back()
                        self._tell(refused)
                    case Ended():
                        called = self._life.spec.called
                        died = f"its process {message.reason} while it had this request"
                        self._tell(self._end_those_inside(f"{called}: {died}"))
                        if message.is_final:
                            self._tell(self._end_all(self._why_gone()))
                    case NotBuilt():
                        called = self._life.spec.called
                        _logger.warning("%s cannot be built again: %s", called, message.error)

    def _tell_together(self, outputs: Iterable[ShortOutput]) -> None:
        """Tell of outputs once all of them are put together.

        The first that is told wakes whoever takes it, who would have to wait for the interpreter
        while this thread goes on with the others.
        """
        heard: list[tuple[int, OmniOutput]] = []
        try:
            for short in outputs:
                number = short[0].number
                with self._lock:
                    live = self._live.get(number)
                if live is not None:  # else nobody waits for it
                    heard.append((number, live[1].whole(short)))
        finally:
            for number, output in heard:
                self._tell(self._letter(number, output))

    def _letter(self, number: int, output: OmniOutput) -> list[_Letter]:
        """To whoever waits for an output still: what was told before may have ended the wait."""
        with self._lock:
            live = self._live.get(number)
            if live is None:
                return []
            if output.finished:
                self._forget(number)
                if output.error is None:
                    self._life.note_success()
        return [(live[0], output)]

    def _end_those_inside(self, error: str) -> list[_Letter]:
        with self._lock:
            waiting = {each.number for each in self._held_back}
            return [self._ended(each, error) for each in [*self._live] if each not in waiting]

    def _end_all(self, error: str) -> list[_Letter]:
        with self._lock:
            return [self._ended(each, error) for each in [*self._live]]

    def _ended(self, number: int, error: str) -> _Letter:
        ticket, request = self._forget(number)
        return ticket, request.ended(error)

    def _forget(self, number: int) -> tuple[Ticket, ShownRequest]:
        ticket, request = self._live.pop(number)
        del self._number_of[ticket]
        self._held_back = [each for each in self._held_back if each.number != number]
        return ticket, request

    def _tell(self, letters: Iterable[_Letter]) -> None:
        for ticket, output in letters:
            try:
                ticket.sink(output)
            except Exception:  # such as an event loop that was closed without telling us
                # One that told us may have been closed before this thread came to hear of it.
                if output.finished or ticket in self._number_of:
                    about = {"request_id": ticket.request_id}
                    _logger.exception(
                        "the outputs of request %r are not taken", ticket.request_id, extra=about
                    )
                self.discard([ticket])


def _named(request: OmniRequest, request_id: str) -> OmniRequest:
    """A request with its id, of no class but the one that messages know."""
    told = {each.name: getattr(request, each.name) for each in fields(OmniRequest)}
    return OmniRequest(**told | {"request_id": request_id})

"""Driver of a pipeline: a single thread that serves any number of callers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TypeAlias

from engine.interface.log_fields import package_logger
from engine.interface.ownership import renew_in_forks
from engine.interface.placed_error import described
from omni.requests.request import OmniDelta, OmniRequest
from omni.runtime.orchestrator import Orchestrator, refusal

_logger = package_logger(__name__)

Sink: TypeAlias = Callable[[OmniDelta | BaseException], object]
"""Receives a request's outputs, in the driver's thread; it must not block. It must ignore whatever
follows a finished output or an exception: a driver that was interrupted may report the end of a
request again."""


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """A submitted request; another caller may use the same id."""

    request: OmniRequest
    request_id: str
    sink: Sink


class Driver:
    """Exclusive owner of an orchestrator, and of the thread that runs it.

    Callers submit requests and get outputs through a sink::

        caller A --submit--> |          |
        caller B --submit--> | commands | --> orchestrator.step() --> sinks of A and B
        caller B --abort---> |          |

    All methods may be called from any thread. The thread starts with the first request.
    """

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator
        self._live: dict[str, Ticket] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._submitted: list[Ticket] = []
        # Not live any more, but its sink may not have been notified.
        self._ending: Ticket | None = None
        self.renew_locks()
        self._thread: threading.Thread | None = None
        self._busy = False
        self._pauses = 0
        self._lent_to: int | None = None
        self._stopping = False
        self._crash: BaseException | None = None
        self._discarded: set[Ticket] = set()
        orchestrator.prepare_aside(self._wake)
        renew_in_forks(self)

    def renew_locks(self) -> None:
        """See :class:`~engine.interface.ownership.Renewable`: forks may discard requests, too."""
        self._changed = threading.Condition()

    def submit(self, request: OmniRequest, request_id: str, sink: Sink) -> Ticket:
        """Submit a request; one that cannot run gets a finished output with an error.

        Raises:
            RuntimeError: the driver was stopped or has crashed.
        """
        ticket = Ticket(request, request_id, sink)
        with self._changed:
            self._check_open()
            if self._thread is None:
                self._start_thread()
            self._submitted.append(ticket)
            self._command(lambda: self._add(ticket))
        return ticket

    @contextmanager
    def together(self) -> Iterator[None]:
        """Start all requests that are submitted within the context in the same turn.

        So they share batches, and a duplicate id is detected regardless of how fast they run. A
        request that takes much longer to prepare than the others starts later.
        """
        with self._changed:
            yield

    def abort(self, request_id: str) -> None:
        """Abort a request: its sink gets a last output. An unknown id is ignored."""
        with self._changed:
            self._command(lambda: self._abort(request_id, "aborted"))

    def discard(self, tickets: Iterable[Ticket]) -> None:
        """Abort requests whose callers are gone; those that have ended are ignored."""
        gone = tuple(tickets)
        if not gone:  # do not wake the thread
            return
        with self._changed:
            self._discarded.update(gone)
            self._command(lambda: self._discard(gone))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let new requests queue up while the caller drives the stages.

        Raises:
            RuntimeError: requests are running, another thread drives the stages at present, or this
                was stopped or has crashed.
        """
        thread = threading.get_ident()
        with self._changed:
            # Earlier aborts still have to reach the stages.
            self._changed.wait_for(self._can_pause)
            self._check_open()
            if self._live:
                raise RuntimeError(
                    f"{len(self._live)} requests are running; wait for them or abort them first"
                )
            if self._pauses and self._lent_to != thread:
                raise RuntimeError(
                    "the pipeline is lent to another thread, which drives its stages (paused, "
                    "verify): wait until it has given it back"
                )
            self._pauses += 1
            self._lent_to = thread
        try:
            yield
        finally:
            with self._changed:
                self._pauses -= 1
                if not self._pauses:
                    self._orchestrator.listen()
                self._changed.notify_all()

    def check_can_wait(self) -> None:
        """Check that this thread does not block the outputs that it is about to wait for.

        Raises:
            RuntimeError: it is the driver's own thread, or the stages are lent to it.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "a transform or a stage cannot wait for requests of the pipeline that runs it: "
                "give it a stage of its own, or an Omni of its own"
            )
        if self._pauses and self._lent_to == threading.get_ident():
            raise RuntimeError(
                "the pipeline is lent to this thread (paused), and runs no requests until that "
                "ends: leave the with block first"
            )

    def stop(self) -> None:
        """End all requests with an error, then the thread. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            thread = self._thread
        # The garbage collector may finalize the driver's owner in the driver's own thread.
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._orchestrator.close()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._crash is not None:
            raise RuntimeError("the pipeline's driver has crashed") from self._crash
        if self._stopping:
            raise RuntimeError("the pipeline is closed")

    def _command(self, command: Callable[[], None]) -> None:
        # Without the thread no request is live, so the command would have no effect.
        if self._thread is not None and self._thread.is_alive():
            self._commands.append(command)
            self._changed.notify_all()

    def _start_thread(self) -> None:
        self._thread = threading.Thread(target=self._run, name="omni-driver", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._run_commands()
                for output in self._orchestrator.step():
                    self._deliver(output)
            self._run_commands()
            for request_id in tuple(self._live):
                self._abort(request_id, "the pipeline was closed before it finished")
        except Exception as error:  # for example out of memory: it ends the live requests
            try:
                self._recover(error)
            except BaseException as again:  # whatever it is, callers must not wait forever
                self._give_up(again)
        except BaseException as error:  # not even a SystemExit may leave callers waiting forever
            self._give_up(error)

    def _wait_for_work(self) -> bool:
        """Sleep until there is work; return False when the driver is to stop."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            while not self._has_work():
                self._changed.wait()
            self._busy = True
            return not self._stopping

    def _has_work(self) -> bool:
        if self._stopping:
            return True
        return not self._pauses and (bool(self._commands) or self._orchestrator.has_work)

    def _can_pause(self) -> bool:
        """Return True if all commands are done, and requests are live or the driver is idle."""
        if self._stopping:
            return True
        return not self._commands and (bool(self._live) or not self._busy)

    def _run_commands(self) -> None:
        """Run commands in order; each stays queued until it is done, because ``paused`` checks."""
        while self._commands:
            try:
                self._commands[0]()
            finally:
                with self._changed:
                    self._commands.popleft()
                    self._changed.notify_all()

    def _add(self, ticket: Ticket) -> None:
        if ticket not in self._submitted:  # it has failed together with all live requests
            return
        request = ticket.request
        if request.request_id is None:
            request = replace(request, request_id=ticket.request_id)
        try:
            self._orchestrator.add_request(request)
        except Exception as error:  # stages may be user code; other callers are not affected
            if not isinstance(error, ValueError):
                if ticket.request_id in self._orchestrator.live_request_ids:
                    raise  # unknown which stages have it
                about = {"request_id": ticket.request_id}
                _logger.exception("request %r could not be added", ticket.request_id, extra=about)
            self._emit(ticket, refusal(ticket.request_id, error))
        else:
            self._live[ticket.request_id] = ticket
        self._submitted.remove(ticket)

    def _abort(self, request_id: str, reason: str) -> None:
        output = self._orchestrator.abort(request_id, reason)
        if output is not None:
            self._deliver(output)

    def _discard(self, tickets: Collection[Ticket]) -> None:
        for ticket in tickets:
            if self._live.get(ticket.request_id) is ticket:
                del self._live[ticket.request_id]
                self._orchestrator.abort(ticket.request_id)
        with self._changed:
            self._discarded.difference_update(tickets)

    def _deliver(self, output: OmniDelta) -> None:
        ticket = self._live[output.request_id]
        if output.finished:
            self._ending = self._live.pop(output.request_id)
        self._emit(ticket, output)
        self._ending = None

    def _emit(self, ticket: Ticket, event: OmniDelta | BaseException) -> None:
        """Pass an event to the sink; if it raises, the request is over."""
        try:
            ticket.sink(event)
        except Exception as error:  # for example, the caller's event loop was closed
            # The sink of a discarded request may be closed before this thread handles the discard.
            if ticket not in self._discarded:
                about = {"request_id": ticket.request_id}
                _logger.exception(
                    "the outputs of request %r are not taken", ticket.request_id, extra=about
                )
            self._discard([ticket])
            with suppress(Exception):  # if the caller still exists, it waits for an end
                ticket.sink(refusal(ticket.request_id, error))

    def _recover(self, error: Exception) -> None:
        """End all requests with the error of a turn; the next request starts another thread."""
        _logger.error("a turn of the pipeline failed", exc_info=error)
        message = f"the pipeline was interrupted: {described(error)}"
        ended = {output.request_id: output for output in self._orchestrator.fail_all(message)}
        for ticket in self._pop_waiting():
            over = OmniDelta(ticket.request_id, finished=True, error=message)
            self._emit(ticket, ended.get(ticket.request_id, over))
        with self._changed:
            self._busy, self._thread = False, None
            if self._commands and not self._stopping:
                self._start_thread()
            self._changed.notify_all()

    def _give_up(self, error: BaseException) -> None:
        _logger.error("the pipeline's driver crashed", exc_info=error)
        with self._changed:
            self._crash = error
            self._busy = False
            self._commands.clear()
            self._changed.notify_all()
        for ticket in self._pop_waiting():
            self._emit(ticket, error)

    def _pop_waiting(self) -> Collection[Ticket]:
        """Remove and return all requests that wait for an output; they are over."""
        with self._changed:
            waiting = dict.fromkeys((*self._live.values(), *self._submitted))
            if self._ending is not None:
                waiting[self._ending] = None
            self._submitted.clear()
            self._live.clear()
        return waiting

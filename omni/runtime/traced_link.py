"""Watches what goes to a stage and what comes back, for a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.interface.outputs import OutputDelta
from omni.runtime.trace import Trace
from stages import StageOutput
from stages.worker.messages import Abort, Command, Enter, Event, Extend, Failed, Output
from stages.worker.stage_link import StageLink
from stages.worker.stage_worker import num_tensor_bytes

__all__ = ["TracedLink"]


class TracedLink(StageLink):
    """A way to a stage, at which a trace stands.

    Args:
        name: of the stage.
        link: the way.
        trace: gets what the stage's workers report of their time, and what is sent to them.
    """

    def __init__(self, name: str, link: StageLink, trace: Trace) -> None:
        self._name = name
        self._link = link
        self._trace = trace
        self._request_ids: dict[int, str] = {}
        self._tickets: dict[str, int] = {}

    def send(self, command: Command) -> None:
        """See :class:`StageLink`."""
        match command:
            case Enter():
                self._left(command.request_id)
                self._request_ids[command.ticket] = command.request_id
                self._tickets[command.request_id] = command.ticket
                if command.sources:
                    self._sent(command.request_id, command.sources)
            case Extend():
                self._sent(command.request_id, (command.source,))
            case Abort():
                self._left(command.request_id)
        self._link.send(command)

    def events(self) -> list[Event]:
        """See :class:`StageLink`."""
        for traced in self._link.traces():
            self._trace.take(self._name, traced)
        events = self._link.events()
        # Of workers elsewhere, what they did when has come with the events.
        for traced in self._link.traces():
            self._trace.take(self._name, traced)
        for event in events:
            match event:
                case Output(delta=OutputDelta(finished=True) as delta):
                    self._left(delta.request_id)
                case Failed() if event.ticket in self._request_ids:
                    self._left(self._request_ids[event.ticket])
        return events

    def flush(self) -> None:
        """See :class:`StageLink`."""
        self._link.flush()

    def work(self) -> None:
        """See :class:`StageLink`."""
        self._link.work()

    @property
    def has_work(self) -> bool:
        """See :class:`StageLink`."""
        return self._link.has_work

    def drop_all(self) -> None:
        """See :class:`~stages.worker.stage_link.StageLink`."""
        for request_id in self._request_ids.values():
            self._trace.left(self._name, request_id)
        self._request_ids, self._tickets = {}, {}
        self._link.drop_all()

    def check_idle(self) -> bool:
        """See :class:`StageLink`."""
        return self._link.check_idle()

    @property
    def time_to_work(self) -> float | None:
        """See :class:`StageLink`."""
        return self._link.time_to_work

    def notify(self, on_event: Callable[[], object]) -> None:
        """See :class:`StageLink`."""
        self._link.notify(on_event)

    def prepare_aside(self) -> None:
        """See :class:`StageLink`."""
        self._link.prepare_aside()

    def close(self) -> None:
        """See :class:`StageLink`."""
        self._link.close()

    def _sent(self, request_id: str, sources: Iterable[StageOutput]) -> None:
        outputs = tuple(sources)
        stages = [each.stage for each in outputs]
        self._trace.sent(self._name, request_id, stages, num_tensor_bytes(outputs))

    def _left(self, request_id: str) -> None:
        self._trace.left(self._name, request_id)
        self._request_ids.pop(self._tickets.pop(request_id, -1), None)

"""Finds out which request made a step fail, at no other request's cost."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.interface.log_fields import package_logger
from engine.requests.request import Request, RequestStatus
from engine.scheduling.request_queues import RequestQueues
from engine.scheduling.scheduler_output import SchedulerOutput

__all__ = ["FaultIsolation"]

logger = package_logger(__name__)


@dataclass(slots=True)
class FaultIsolation:
    """Recovers from steps that failed.

    When a step of several requests fails, the error does not tell whose fault it is. They begin
    anew, as after a preemption, and are *isolated*: each runs alone until it is past the tokens of
    that step. A request that fails alone is the culprit, and the others go on together. Steps of
    one isolated request take turns with steps of all others, and a request that came later does
    not begin before an isolated one that could. A fault that many requests make together, and none
    alone, costs all of them their steps again and again, but fails none of them.

    Attributes:
        queues: where the requests stand.
        has_turn: whether the next step is an isolated request's, if one can run.
    """

    queues: RequestQueues
    has_turn: bool = True
    _isolated: dict[str, Request] = field(default_factory=dict)

    def isolate(self, request: Request, num_tokens: int) -> None:
        """Have a request run alone until so many of its tokens are computed."""
        request.alone_until = num_tokens
        self._isolated[request.request_id] = request

    def isolated(self) -> list[Request]:
        """The isolated requests that wait or run, in the order of their turn."""
        if not self._isolated:
            return []
        live = (RequestStatus.WAITING, RequestStatus.RUNNING)
        self._isolated = {
            request_id: request
            for request_id, request in self._isolated.items()
            if request.is_isolated and request.status in live
        }
        return sorted(self._isolated.values(), key=lambda r: r.queue_key)

    def clear(self) -> None:
        """Forget which requests are isolated, whatever an interrupted call left of it."""
        self._isolated = {}

    def recover(self, output: SchedulerOutput, *, swap_failed: bool = False) -> tuple[Request, ...]:
        """After a step that failed: let its requests begin anew.

        It is not known which pages were copied, so requests that the step swapped out, or in
        without running them, are recomputed.

        Args:
            output: the step.
            swap_failed: whether copying pages failed. That is no fault of the requests that were
                to run, and requests are recomputed rather than swapped from now on.

        Returns:
            The culprit, as it was, if it is known: the request that ran alone.
        """
        self._undo_swaps(output)
        requests = tuple(item.request for item in output.scheduled)
        if swap_failed:
            logger.error("requests that make room are recomputed from now on, not swapped")
            self.queues.swaps_out = False
        elif len(requests) > 1:
            for item in output.scheduled:
                self.isolate(item.request, item.request.num_computed_tokens + item.num_tokens)
        else:
            return requests
        for request in requests:
            self.queues.begin_anew(request)
        return ()

    def _undo_swaps(self, output: SchedulerOutput) -> None:
        swapped = [r for r in output.preempted if r.status is RequestStatus.SWAPPED]
        for request in (*output.restored, *swapped):
            self.queues.begin_anew(request)

"""A step in the making: what it takes in so far, and what it has room for."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.requests.request import Request
from engine.scheduling.encoder_cache_manager import EncodingBudget, ItemShare
from engine.scheduling.scheduler_output import ScheduledRequest, SchedulerOutput
from prefix_cache import CachedPrefix, PageCopy

__all__ = ["StepPlan"]


@dataclass(slots=True)
class StepPlan:
    """A step in the making.

    Attributes:
        num_tokens: what is left of the token budget.
        encoding_budget: what towers or the encoder may still run.
        scheduled: see :class:`SchedulerOutput`, as for the fields below.
    """

    num_tokens: int
    encoding_budget: EncodingBudget
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    swapped_out: tuple[PageCopy, ...] = ()
    swapped_in: tuple[PageCopy, ...] = ()
    restored: list[Request] = field(default_factory=list)

    def has_room_to_encode(self, request: Request, prefix: CachedPrefix) -> bool:
        """Whether a request's encoder input, if it is not cached, may be encoded in this step."""
        blocks = request.encoder_blocks
        if blocks is None or prefix.encoder_cached:
            return True
        return self.encoding_budget.allows(blocks.num_tokens)

    def add(self, request: Request, share: ItemShare, *, runs_encoder: bool = False) -> None:
        """Take a request in."""
        self.scheduled.append(
            ScheduledRequest(request, share.num_tokens, runs_encoder, share.to_encode)
        )
        self.num_tokens -= share.num_tokens
        self.encoding_budget = share.budget
        if runs_encoder and request.encoder_blocks:
            self.encoding_budget = share.budget.less(request.encoder_blocks.num_tokens)

    def output(self) -> SchedulerOutput:
        """The step, shortest shares first."""
        return SchedulerOutput(
            tuple(sorted(self.scheduled, key=lambda item: item.num_tokens)),
            tuple(self.preempted),
            self.swapped_out,
            self.swapped_in,
            tuple(self.restored),
        )

"""A step: in the making, and as the scheduler decided it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from engine.requests.encoder_input import MultiModalInput
from engine.requests.request import Request
from engine.scheduling.encoder_cache_manager import EncodingBudget, ItemShare
from prefix_cache import CachedPrefix, PageCopy

__all__ = ["PageMove", "ScheduledRequest", "SchedulerOutput", "StepPlan"]


@dataclass(frozen=True, slots=True)
class PageMove:
    """One request's pages, to be copied between the device and the host.

    Attributes:
        copies: of each group with pages.
        to_host: whether they go out; else they come back.
    """

    copies: tuple[PageCopy, ...]
    to_host: bool


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step: the ``num_tokens`` after its computed ones.

    Attributes:
        request: the request; its ``num_computed_tokens`` is still that of before the step.
        num_tokens: tokens to run.
        runs_encoder: whether the request's encoder input is encoded in this step.
        items_to_encode: its images and the like that towers encode in this step.
    """

    request: Request
    num_tokens: int
    runs_encoder: bool = False
    items_to_encode: tuple[MultiModalInput, ...] = ()

    @property
    def reaches_last_token(self) -> bool:
        """Whether the step computes the newest token, so that the next one can be sampled."""
        return self.request.num_computed_tokens + self.num_tokens == self.request.num_tokens

    @property
    def samples(self) -> bool:
        """Whether this step chooses a token for the request."""
        return self.reaches_last_token and self.request.num_tokens < self.request.max_num_tokens


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """What the scheduler decided for one step.

    Attributes:
        scheduled: which requests run how many tokens, in order of these numbers.
        preempted: requests that gave their blocks back to make room.
        page_moves: what is copied before anything is written, in this order: each may go to where
            one before it came from, on the device as on the host.
        restored: requests whose pages come in, but that run in a later step.
    """

    scheduled: tuple[ScheduledRequest, ...]
    preempted: tuple[Request, ...]
    page_moves: tuple[PageMove, ...] = ()
    restored: tuple[Request, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the step over all requests."""
        return sum(item.num_tokens for item in self.scheduled)

    def without(self, failed: Collection[Request]) -> SchedulerOutput:
        """The step as if requests that failed in it had not run: nothing of theirs is complete."""
        if not failed:
            return self
        sound = (item for item in self.scheduled if item.request not in failed)
        return replace(self, scheduled=tuple(sound))


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
    page_moves: list[PageMove] = field(default_factory=list)
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
            tuple(self.page_moves),
            tuple(self.restored),
        )

"""What the scheduler decided for one step."""

from __future__ import annotations

from dataclasses import dataclass

from engine.requests.multimodal_input import MultiModalInput
from engine.requests.request import Request
from prefix_cache import PageCopy

__all__ = ["ScheduledRequest", "SchedulerOutput"]


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step: the ``num_tokens`` after its computed ones.

    Attributes:
        request: the request; its ``num_computed_tokens`` is still that of before the step.
        num_tokens: tokens to run.
        runs_encoder: whether the request's encoder input is encoded in this step.
        items_to_encode: of the request's images and the like, those that towers encode in this
            step.
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
        swapped_out: pages to copy to the host before anything is written.
        swapped_in: pages to copy from the host after that.
        restored: requests whose pages come in, but that run in a later step.
    """

    scheduled: tuple[ScheduledRequest, ...]
    preempted: tuple[Request, ...]
    swapped_out: tuple[PageCopy, ...] = ()
    swapped_in: tuple[PageCopy, ...] = ()
    restored: tuple[Request, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the step over all requests."""
        return sum(item.num_tokens for item in self.scheduled)

"""When a request was in which stage."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StageTime"]


@dataclass(frozen=True, slots=True)
class StageTime:
    """A request's stay in one stage; times are those of ``time.monotonic`` in this process.

    Attributes:
        stage: which.
        entered_s: when it was handed to the stage.
        ended_s: when the stage was done with it; None while it is there.
        queue_s: how long it waited there for its first step; None if that is not known.
        first_token_s: how long after its arrival there the first token came; likewise.
        num_prompt_tokens: of the stage's input.
        num_cached_tokens: of these, those that the cache saved computing.
        num_tokens: generated.
        num_preemptions: how often it had to give its blocks back.
        prefix_miss: why no more of its input was cached; see :class:`engine.RequestMetrics`.
    """

    stage: str
    entered_s: float
    ended_s: float | None = None
    queue_s: float | None = None
    first_token_s: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_tokens: int = 0
    num_preemptions: int = 0
    prefix_miss: str | None = None

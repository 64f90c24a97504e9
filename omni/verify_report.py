"""What a comparison of cached with uncached runs has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Difference", "Kind", "NearTie", "Run", "StageVerification", "VerifyReport"]

Run = Literal["cold", "warm"]
"""``cold`` starts with empty caches and fills them; ``warm`` repeats the requests and hits."""

Kind = Literal["tokens", "finish_reason", "tensor", "error"]
"""What may differ."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that a cached run put out and the uncached run did not.

    Attributes:
        request_id: of which request.
        stage: of which stage; None for what concerns the whole request.
        run: in which cached run.
        kind: what differs.
        message: how, for people.
    """

    request_id: str
    stage: str | None
    run: Run
    kind: Kind
    message: str


@dataclass(frozen=True, slots=True)
class NearTie:
    """A place where two tokens were equally likely but for rounding, and the runs chose apart.

    Attributes:
        request_id: of which request.
        stage: of which stage.
        run: in which cached run.
        position: index of the generated token.
        token_ids: the uncached and the cached run's choice.
        gap: difference of their log-probabilities in the uncached run.
    """

    request_id: str
    stage: str
    run: Run
    position: int
    token_ids: tuple[int, int]
    gap: float


@dataclass(frozen=True, slots=True)
class StageVerification:
    """One stage over all requests.

    Attributes:
        stage: its name.
        prompt_tokens: tokens of its inputs in one run.
        cold_hit_tokens: of these, what the cache saved in the cold run.
        warm_hit_tokens: the same in the warm run.
        max_abs_diff: largest difference between a cached and an uncached tensor element.
        uncached_s: seconds that it worked in the uncached run.
        cold_s: the same in the cold run.
        warm_s: the same in the warm run.
    """

    stage: str
    prompt_tokens: int
    cold_hit_tokens: int
    warm_hit_tokens: int
    max_abs_diff: float
    uncached_s: float
    cold_s: float
    warm_s: float

    @property
    def saved_s(self) -> float:
        """Seconds that a warm cache saved; negative if it cost some."""
        return self.uncached_s - self.warm_s


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The whole comparison.

    Attributes:
        num_requests: how many were run, three times each.
        stages: in topological order.
        differences: everything that was not equal.
        near_ties: token differences that rounding explains; not counted as differences.
        failures: ``(request_id, error)`` of requests that failed in the uncached run.
    """

    num_requests: int
    stages: tuple[StageVerification, ...]
    differences: tuple[Difference, ...]
    near_ties: tuple[NearTie, ...]
    failures: tuple[tuple[str, str], ...]

    @property
    def equal(self) -> bool:
        """Whether turning the caches on changed nothing."""
        return not self.differences

    def lines(self) -> list[str]:
        """The report for people."""
        compared = self.num_requests - len(self.failures)
        verdict = (
            f"cached equals uncached: {compared} of {self.num_requests} requests compared"
            if self.equal
            else f"cached DIFFERS from uncached in {len(self.differences)} places"
        )
        return [
            verdict,
            *(_stage_line(stage) for stage in self.stages),
            *(
                f"difference: request {each.request_id!r}"
                f"{'' if each.stage is None else f', stage {each.stage!r}'}, "
                f"{each.run} cache: {each.message}"
                for each in self.differences
            ),
            *(
                f"near tie: request {tie.request_id!r}, stage {tie.stage!r}, {tie.run} cache: "
                f"generated token {tie.position} is {tie.token_ids[0]} or {tie.token_ids[1]}, "
                f"whose log-probabilities are {tie.gap:.1e} apart; not compared from there on"
                for tie in self.near_ties
            ),
            *(
                f"failed without caching, not compared: request {request_id!r}: {error}"
                for request_id, error in self.failures
            ),
        ]


def _stage_line(stage: StageVerification) -> str:
    return (
        f"stage {stage.stage!r}: {stage.prompt_tokens} input tokens, hits {stage.cold_hit_tokens} "
        f"cold and {stage.warm_hit_tokens} warm; largest tensor difference "
        f"{stage.max_abs_diff:.1e}; {stage.uncached_s:.3f} s uncached, {stage.cold_s:.3f} s cold, "
        f"{stage.warm_s:.3f} s warm, saved {stage.saved_s:.3f} s"
    )

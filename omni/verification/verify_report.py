"""Findings of a comparison of cached with uncached runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Run = Literal["regrouped", "cold", "warm"]
"""Runs that are compared with the uncached one: ``regrouped`` is uncached, with other batch mates;
``cold`` starts with empty caches and fills them; ``warm`` repeats the requests and hits."""

REFERENCE: Mapping[Run, str] = {
    "regrouped": "batched together",
    "cold": "without caching",
    "warm": "without caching",
}
"""Names of the uncached run in messages about each."""

Kind = Literal["tokens", "finish_reason", "tensor", "error"]
"""Kinds of differences."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that another run put out and the uncached run did not.

    Attributes:
        stage: of which stage; None for what concerns the whole request.
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
        token_ids: the uncached and the other run's choice.
        gap: difference of their log-probabilities in the uncached run.
    """

    request_id: str
    stage: str
    run: Run
    position: int
    token_ids: tuple[int, int]
    gap: float


@dataclass(frozen=True, slots=True)
class TensorVerification:
    """One tensor of a stage over all requests.

    Differences are shares of the largest element of their row, or of 1 if that is larger.

    Attributes:
        max_difference: the largest between a cached and an uncached element.
        noise: the largest between uncached runs with other batch mates; None if not measured.
    """

    name: str
    max_difference: float
    tolerance: float
    noise: float | None


@dataclass(frozen=True, slots=True)
class StageVerification:
    """One stage over all requests.

    Attributes:
        prompt_tokens: tokens of its inputs in one run.
        cold_hit_tokens: of these, what the cache saved in the cold run.
        warm_hit_tokens: the same in the warm run.
        encoder_hits: encodings of images, sounds and the like that the cached runs found there.
        uncached_s, cold_s, warm_s: seconds that it worked in each run.
        has_cache: whether it keeps anything that a later request could hit.
        is_cached: whether its settings let it: what they turn off was not tested.
    """

    stage: str
    prompt_tokens: int
    cold_hit_tokens: int
    warm_hit_tokens: int
    tensors: tuple[TensorVerification, ...]
    uncached_s: float
    cold_s: float
    warm_s: float
    has_cache: bool = True
    encoder_hits: int = 0
    is_cached: bool = True

    @property
    def has_hits(self) -> bool:
        """True if anything that it had cached was used, so that a comparison says something."""
        return bool(self.cold_hit_tokens or self.warm_hit_tokens or self.encoder_hits)

    @property
    def saved_s(self) -> float:
        """Seconds that a warm cache saved; negative if it cost some, 0 where there is none."""
        return self.uncached_s - self.warm_s if self.has_cache and self.is_cached else 0.0


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The whole comparison.

    Attributes:
        stages: in topological order.
        near_ties: token differences that rounding explains; not counted as differences.
        failures: ``(request_id, error)`` of requests that failed in the uncached run. Failing
            the same way with caches is no difference.
    """

    num_requests: int
    stages: tuple[StageVerification, ...]
    differences: tuple[Difference, ...]
    near_ties: tuple[NearTie, ...]
    failures: tuple[tuple[str, str], ...]

    @property
    def equal(self) -> bool:
        """True if nothing differed: not with the caches on, and not with other batch mates."""
        return not self.differences

    @property
    def has_hits(self) -> bool:
        """True if any stage used what it had cached. Without a hit nothing was proven."""
        return any(stage.has_hits for stage in self.stages)

    def lines(self) -> list[str]:
        """The report for people."""
        return [
            *self._verdict(),
            *(line for stage in self.stages for line in _stage_lines(stage)),
            *(
                f"difference: request {each.request_id!r}"
                f"{'' if each.stage is None else f', stage {each.stage!r}'}, "
                f"{_where(each.run)}: {each.message}"
                for each in self.differences
            ),
            *(
                f"near tie: request {tie.request_id!r}, stage {tie.stage!r}, {_where(tie.run)}: "
                f"generated token {tie.position} is {tie.token_ids[0]} or {tie.token_ids[1]}, "
                f"whose log-probabilities are {tie.gap:.1e} apart; not compared from there on"
                for tie in self.near_ties
            ),
            *(
                f"failed without caching, not compared: request {request_id!r}: {error}"
                for request_id, error in self.failures
            ),
        ]

    def _verdict(self) -> list[str]:
        regrouped = sum(each.run == "regrouped" for each in self.differences)
        cached = len(self.differences) - regrouped
        compared = self.num_requests - len(self.failures)
        lines = [
            f"cached DIFFERS from uncached in {cached} places"
            if cached
            else f"cached equals uncached: {compared} of {self.num_requests} requests compared"
        ]
        if self.equal and not self.has_hits:
            lines.insert(0, self._why_nothing())
        if regrouped:
            lines.append(
                f"outputs DEPEND ON BATCH MATES, without any caching, in {regrouped} places"
            )
        return lines

    def _why_nothing(self) -> str:
        if not any(stage.has_cache and stage.is_cached for stage in self.stages):
            return "NOTHING WAS PROVEN: no stage has a cache that its settings turn on"
        return (
            "NOTHING WAS PROVEN: no request used anything that was cached, and all runs did the "
            "same work. Whole blocks of block_size tokens are cached: give longer prompts, which "
            "hit when they run again"
        )


def _where(run: Run) -> str:
    return "uncached with other batch mates" if run == "regrouped" else f"{run} cache"


def _stage_lines(stage: StageVerification) -> list[str]:
    if not stage.has_cache:  # what its runs took less or more is noise
        hits, saved = "no cache of its own: computed again in every run", ""
    elif not stage.is_cached:
        hits, saved = "caching is off in its settings: its cache was not tested", ""
    else:
        hits = f"hits {stage.cold_hit_tokens} cold and {stage.warm_hit_tokens} warm"
        if stage.encoder_hits:
            hits += f", {stage.encoder_hits} encodings found"
        if not stage.has_hits:
            hits += ": nothing was proven of this stage"
        # Runs of equal work differ, too: a negative difference says no more than that.
        saved = f", {stage.saved_s:.3f} saved" if stage.saved_s > 0 else ", nothing saved"
    return [
        f"stage {stage.stage!r}: {stage.prompt_tokens} input tokens, {hits}",
        f"  seconds: {stage.uncached_s:.3f} uncached, {stage.cold_s:.3f} cold, "
        f"{stage.warm_s:.3f} warm{saved}",
        *(
            f"  {tensor.name}: largest difference {tensor.max_difference:.1e}, allowed "
            f"{tensor.tolerance:.1e}"
            f"{'' if tensor.noise is None else f', noise {tensor.noise:.1e}'}"
            for tensor in stage.tensors
        ),
    ]

"""What one level of load came to, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from omni.commands.bench.distribution import Distribution
from omni.commands.bench.goodput_limits import GoodputLimits
from omni.commands.bench.level_run import LevelRun
from omni.commands.bench.load_level import LoadLevel
from omni.commands.bench.measured_request import MeasuredRequest

__all__ = ["METRICS", "GeneratorReport", "LevelReport", "RequestCounts", "TokenTotals"]

METRICS = (
    *("first_token", "between_tokens", "per_token"),
    *("first_audio", "real_time_factor", "end_to_end"),
)
"""What is told of the answers, in this order."""


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """How requests ended.

    Attributes:
        ok: answered to the end.
        rejected: refused with status 429, since there was too much to do.
        failed: in any other way.
        unfinished: that were cut short, as the measuring itself was.
        failures: by kind, how many.
        examples: by kind, what the first one said.
    """

    ok: int
    rejected: int
    failed: int
    unfinished: int
    failures: Mapping[str, int]
    examples: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TokenTotals:
    """Tokens of the requests that were answered.

    Attributes:
        prompt: None where no answer told.
        cached: of these, what caches saved computing; None where no answer told.
        output: of the answers.
        are_pieces: whether an answer did not tell how many it has, so that its pieces of text were
            counted, which may hold several tokens each.
    """

    prompt: int | None
    cached: int | None
    output: int
    are_pieces: bool

    @property
    def hit_rate(self) -> float | None:
        """Cached tokens of all tokens of prompts; None where it is not known."""
        return self.cached / self.prompt if self.prompt and self.cached is not None else None


@dataclass(frozen=True, slots=True)
class GeneratorReport:
    """How good the sender was: what it adds to what it measures.

    Attributes:
        send_delay: seconds by which requests were sent later than they were to be.
        loop_lag: seconds by which the event loop was late, every hundredth of a second.
        cpu_share: CPU seconds of this process per second; above 1 on several cores. In process it
            holds the pipeline's own work.
    """

    send_delay: Distribution | None
    loop_lag: Distribution | None
    cpu_share: float


@dataclass(frozen=True, slots=True)
class LevelReport:
    """What one level of load came to.

    Attributes:
        level: how much load there was at once.
        duration_s: seconds from the first request to the last end.
        requests: how they ended.
        tokens: of those that were answered.
        audio_s: seconds of sound, likewise.
        latencies: by the names of :data:`METRICS`, of the requests that were answered.
            ``between_tokens`` is of all gaps of all answers, as vLLM's inter-token latency; all
            others have one value per request. Those are missing of which there was none.
        rejection: seconds until a request was refused with status 429.
        num_good: requests that kept all limits; None if there is no limit.
        generator: how good the sender was.
    """

    level: LoadLevel
    duration_s: float
    requests: RequestCounts
    tokens: TokenTotals
    audio_s: float
    latencies: Mapping[str, Distribution]
    rejection: Distribution | None
    num_good: int | None
    generator: GeneratorReport

    @classmethod
    def of(cls, run: LevelRun, limits: GoodputLimits) -> LevelReport:
        """Sum up what was seen, also of a run that was cut short."""
        answered = [record for record in run.records if record.failure is None]
        duration_s = run.duration_s
        return cls(
            level=run.level,
            duration_s=duration_s,
            requests=_counts(run.records, run.num_in_flight),
            tokens=_tokens(answered),
            audio_s=sum(record.audio_s for record in answered),
            latencies=_latencies(answered),
            rejection=Distribution.of(
                record.end_to_end
                for record in run.records
                if record.failure is not None and record.failure.is_rejection
            ),
            num_good=sum(map(limits.are_kept, run.records)) if limits.limits else None,
            generator=GeneratorReport(
                Distribution.of(record.send_delay for record in run.records),
                Distribution.of(run.lag.lags),
                run.cpu_s / duration_s if duration_s else 0.0,
            ),
        )

    @property
    def throughput(self) -> dict[str, float]:
        """What was answered in a second: requests, tokens of answers and of all, and sound."""
        tokens = self.tokens
        per_second = {
            "requests": float(self.requests.ok),
            "output_tokens": float(tokens.output),
            "total_tokens": float(tokens.output + (tokens.prompt or 0)),
            "audio_s": self.audio_s,
        }
        if self.num_good is not None:
            per_second["good_requests"] = float(self.num_good)
        seconds = self.duration_s
        return {name: value / seconds if seconds else 0.0 for name, value in per_second.items()}

    def as_json(self) -> dict[str, Any]:
        """All of it, for programs; seconds where a name does not say otherwise."""
        return {
            **asdict(self.level),
            "duration_s": self.duration_s,
            "requests": asdict(self.requests),
            "throughput_per_s": self.throughput,
            "tokens": {**asdict(self.tokens), "hit_rate": self.tokens.hit_rate},
            "audio_s": self.audio_s,
            "latencies": {name: asdict(each) for name, each in self.latencies.items()},
            "rejection": None if self.rejection is None else asdict(self.rejection),
            "num_good": self.num_good,
            "generator": asdict(self.generator),
        }


def _counts(records: Sequence[MeasuredRequest], num_in_flight: int) -> RequestCounts:
    failures = [record.failure for record in records if record.failure is not None]
    bad = [failure for failure in failures if not failure.is_rejection]
    examples: dict[str, str] = {}
    for failure in bad:
        examples.setdefault(failure.kind, str(failure))
    return RequestCounts(
        ok=len(records) - len(failures),
        rejected=len(failures) - len(bad),
        failed=len(bad),
        unfinished=num_in_flight,
        failures=dict(Counter(failure.kind for failure in bad).most_common()),
        examples=examples,
    )


def _tokens(answered: Sequence[MeasuredRequest]) -> TokenTotals:
    return TokenTotals(
        prompt=_sum(record.prompt_tokens for record in answered),
        cached=_sum(record.cached_tokens for record in answered),
        output=sum(record.num_tokens for record in answered),
        are_pieces=any(record.completion_tokens is None for record in answered),
    )


def _sum(counts: Iterable[int | None]) -> int | None:
    told = [count for count in counts if count is not None]
    return sum(told) if told else None


def _latencies(answered: Sequence[MeasuredRequest]) -> dict[str, Distribution]:
    values: dict[str, list[float | None]] = {
        name: [getattr(record, name) for record in answered]
        for name in METRICS
        if name != "between_tokens"
    }
    values["between_tokens"] = [gap for record in answered for gap in record.gaps]
    found = {}
    for name in METRICS:
        distribution = Distribution.of(each for each in values[name] if each is not None)
        if distribution is not None:
            found[name] = distribution
    return found

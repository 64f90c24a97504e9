"""Benchmark reports: statistics of every load level, as tables, JSON and plots."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import numpy as np
from rich.table import Table

from engine.interface.placed_error import suggest
from omni.commands.bench.load import METRICS, LevelRun, LoadLevel, MeasuredRequest

_PLOT_COLUMNS = 3
_CONTINUITY_LIMITS_MS = (50, 100, 200)
_THROUGHPUTS = {
    "requests": ("requests per second", "requests/s", ".3g"),
    "output_tokens": ("tokens per second", "tokens/s", ".1f"),
    "audio_s": ("seconds of audio per second", "audio s/s", ".2f"),
    "good_requests": ("good requests per second", "good/s", ".3g"),
}
"""Headings of plots and of tables, and number formats of tables."""


def parse_goodput(text: str) -> dict[str, float]:
    """Parse request limits such as ``first_token=0.5,end_to_end=10``.

    Raises:
        ValueError: a measure or a number is wrong; the message names the flag.
    """
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = (each.strip() for each in part.partition("="))
        if not equals:
            raise ValueError(
                f"--goodput: must be limits such as first_token=0.5,end_to_end=10; got {text!r:.80}"
            )
        if name not in METRICS:
            raise ValueError(
                f"--goodput: unknown measure {name!r:.80}{suggest(name, METRICS)}; there are "
                f"{', '.join(METRICS)}"
            )
        if name in limits:
            raise ValueError(f"--goodput: {name} stands twice")
        try:
            limit = float(number)
        except ValueError:
            limit = math.nan
        if not math.isfinite(limit) or limit < 0:
            raise ValueError(f"--goodput: {name}: must be a number from 0 on, got {number!r}")
        limits[name] = limit
    return limits


def keeps_limits(record: MeasuredRequest, limits: Mapping[str, float]) -> bool:
    """True if a request was answered within all limits of :func:`parse_goodput`.

    A request without a value, such as an answer without audio under a limit on the first audio,
    does not keep the limit; but an answer of one token keeps every limit per token.
    """
    if record.failure is not None:
        return False
    for name, limit in limits.items():
        value = getattr(record, name)
        if name == "per_token" and record.num_tokens == 1:
            value = 0.0
        if value is None or value > limit:
            return False
    return True


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics of a set of values, in their unit.

    Attributes:
        p50: the median; like the other percentiles interpolated linearly, numpy's default.
        p99: the 99th percentile. With fewer than 100 values it is close to the maximum.
    """

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self | None:
        """Compute the statistics; None if there are no values."""
        numbers = np.fromiter(values, dtype=np.float64)
        if not numbers.size:
            return None
        p50, p90, p99 = np.percentile(numbers, (50, 90, 99)).tolist()
        return cls(numbers.size, float(numbers.mean()), p50, p90, p99, float(numbers.max()))


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Counts of requests by outcome.

    Attributes:
        ok: requests with a complete answer.
        rejected: requests refused with status 429 by an overloaded server.
        failed: requests that failed in any other way.
        failures: number of failures by kind.
        examples: first message of each kind of failure.
    """

    ok: int
    rejected: int
    failed: int
    unfinished: int
    failures: dict[str, int]
    examples: dict[str, str]

    @classmethod
    def of(cls, run: LevelRun) -> Self:
        """Count the requests of a level."""
        failures = [each.failure for each in run.records if each.failure is not None]
        bad = [failure for failure in failures if not failure.is_rejection]
        return cls(
            ok=len(run.records) - len(failures),
            rejected=len(failures) - len(bad),
            failed=len(bad),
            unfinished=run.num_in_flight,
            failures=dict(Counter(failure.kind for failure in bad).most_common()),
            examples={failure.kind: str(failure) for failure in reversed(bad)},
        )


@dataclass(frozen=True, slots=True)
class TokenTotals:
    """Token totals of the answered requests.

    Attributes:
        prompt: prompt tokens; None if no answer reported them.
        cached: prompt tokens found in caches; None if no answer reported them.
        output: tokens of the answers.
        are_pieces: true if an answer did not report its tokens, so that its chunks of text were
            counted, which may hold several tokens each.
        hit_rate: cached tokens per prompt token; None if unknown.
    """

    prompt: int | None
    cached: int | None
    output: int
    are_pieces: bool
    hit_rate: float | None

    @classmethod
    def of(cls, answered: Sequence[MeasuredRequest]) -> Self:
        """Sum up the token counts of answers."""
        prompt = [each.prompt_tokens for each in answered if each.prompt_tokens is not None]
        cached = [each.cached_tokens for each in answered if each.cached_tokens is not None]
        return cls(
            prompt=sum(prompt) if prompt else None,
            cached=sum(cached) if cached else None,
            output=sum(each.num_tokens for each in answered),
            are_pieces=any(each.completion_tokens is None for each in answered),
            hit_rate=sum(cached) / sum(prompt) if cached and any(prompt) else None,
        )


@dataclass(frozen=True, slots=True)
class GeneratorReport:
    """Statistics of the load generator itself, which distort its measurements.

    Attributes:
        send_delay: seconds by which requests were sent late.
        loop_lag: seconds by which the event loop was late, sampled every 10 ms.
        cpu_share: CPU seconds of this process per second; above 1 on several cores. In process it
            includes the pipeline's own work.
    """

    send_delay: Distribution | None
    loop_lag: Distribution | None
    cpu_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelReport(LoadLevel):
    """A level of load, and the results of its run.

    Attributes:
        duration_s: seconds from the first request to the last end.
        throughput_per_s: answered requests, output tokens, total tokens and seconds of audio per
            second; with limits also ``good_requests``.
        latencies: by the names of :data:`METRICS`, of the answered requests. ``between_tokens``
            covers all gaps of all answers, like vLLM's inter-token latency; all others have one
            value per request. A metric without values is missing.
        continuity: ``C50``, ``C100`` and ``C200``: the share of answers with audio whose playback
            never paused for more than 50, 100, 200 ms when started with the first chunk; empty
            without audio.
        stage_starts: seconds until requests entered each stage; empty if the target does not
            report stages.
        rejection: seconds until requests were refused with status 429.
        num_good: number of requests that kept all limits; None without limits.
    """

    duration_s: float
    requests: RequestCounts
    throughput_per_s: dict[str, float]
    tokens: TokenTotals
    audio_s: float
    latencies: dict[str, Distribution]
    continuity: dict[str, float]
    stage_starts: dict[str, Distribution]
    rejection: Distribution | None
    num_good: int | None
    generator: GeneratorReport

    @classmethod
    def of(cls, run: LevelRun, limits: Mapping[str, float]) -> Self:
        """Compute the results of a run, which may be incomplete."""
        answered = [record for record in run.records if record.failure is None]
        counts, tokens = RequestCounts.of(run), TokenTotals.of(answered)
        audio_s = sum(record.audio_s for record in answered)
        num_good = sum(keeps_limits(each, limits) for each in run.records) if limits else None
        totals = {
            "requests": counts.ok,
            "output_tokens": tokens.output,
            "total_tokens": tokens.output + (tokens.prompt or 0),
            "audio_s": audio_s,
            **({} if num_good is None else {"good_requests": num_good}),
        }
        seconds = run.duration_s or math.inf
        return cls(
            concurrency=run.level.concurrency,
            rate=run.level.rate,
            duration_s=run.duration_s,
            requests=counts,
            throughput_per_s={name: total / seconds for name, total in totals.items()},
            tokens=tokens,
            audio_s=audio_s,
            latencies=_latencies(answered),
            continuity=_continuity(answered),
            stage_starts=_stage_starts(answered),
            rejection=Distribution.of(
                record.end_to_end
                for record in run.records
                if record.failure is not None and record.failure.is_rejection
            ),
            num_good=num_good,
            generator=GeneratorReport(
                Distribution.of(record.send_delay for record in run.records),
                Distribution.of(run.loop_lags),
                run.cpu_s / seconds,
            ),
        )


def _latencies(answered: Sequence[MeasuredRequest]) -> dict[str, Distribution]:
    found = {}
    for name in METRICS:
        if name == "between_tokens":
            values = [gap for record in answered for gap in record.gaps]
        else:
            each = (getattr(record, name) for record in answered)
            values = [value for value in each if value is not None]
        distribution = Distribution.of(values)
        if distribution is not None:
            found[name] = distribution
    return found


def _continuity(answered: Sequence[MeasuredRequest]) -> dict[str, float]:
    gaps = [each.audio_gap for each in answered if each.audio_gap is not None]
    return {
        f"C{limit}": sum(gap <= limit / 1000 for gap in gaps) / len(gaps)
        for limit in _CONTINUITY_LIMITS_MS
        if gaps
    }


def _stage_starts(answered: Sequence[MeasuredRequest]) -> dict[str, Distribution]:
    starts: dict[str, list[float]] = {}
    for record in answered:
        for name, entered in record.stages.items():
            starts.setdefault(name, []).append(entered - record.sent)
    found = {name: Distribution.of(values) for name, values in starts.items()}
    return {name: each for name, each in found.items() if each is not None}


@dataclass(frozen=True, slots=True)
class BenchReport:
    """All levels of a measurement.

    Attributes:
        settings: flags without dashes, and their values, with which the run can be repeated.
        levels: levels in the order in which they ran; the last one may be incomplete.
    """

    target: str
    settings: Mapping[str, Any]
    levels: Sequence[LevelReport]
    is_complete: bool

    @property
    def has_failures(self) -> bool:
        """True if a request failed, or none was answered. Status 429 alone is no failure."""
        counts = [level.requests for level in self.levels]
        return any(each.failed for each in counts) or not any(each.ok for each in counts)

    def save(self, path: Path) -> None:
        """Write the report as JSON, in seconds unless named otherwise; ``OSError`` on failure."""
        content = {
            "omni_version": version("omni-pipeline"),
            "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "target": self.target,
            "settings": dict(self.settings),
            "is_complete": self.is_complete,
            "levels": [asdict(level) for level in self.levels],
        }
        path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", "utf-8")


def failure_lines(report: BenchReport) -> Iterator[str]:
    """Yield a line for every kind of failure of every level, with the first message of its kind."""
    for level in report.levels:
        for kind, count in level.requests.failures.items():
            example = level.requests.examples[kind]
            yield f"load {level.label}: {count} failed: {kind}: {example}"


def report_tables(report: BenchReport) -> Iterator[Table]:
    """Yield tables of answers, audio playback, latencies, and the load generator itself."""
    if report.levels:
        yield _answered(report.levels)
        if any(level.continuity for level in report.levels):
            yield _playback(report.levels)
        yield _times(report.levels)
        yield _sender(report.levels)


def _answered(levels: Sequence[LevelReport]) -> Table:
    rows: dict[str, list[str]] = {
        "load": [level.label for level in levels],
        "seconds": [f"{level.duration_s:.1f}" for level in levels],
        "ok": [str(level.requests.ok) for level in levels],
        "429": [str(level.requests.rejected) for level in levels],
        "failed": [str(level.requests.failed) for level in levels],
    }
    if any(level.requests.unfinished for level in levels):
        rows["cut short"] = [str(level.requests.unfinished) for level in levels]
    are_pieces = any(level.tokens.are_pieces for level in levels)
    for name, values in _throughputs(levels):
        _, heading, form = _THROUGHPUTS[name]
        heading = heading.replace("tokens", "pieces") if are_pieces else heading
        rows[heading] = [format(value, form) for value in values]
    rows["prompt tokens"] = [_format_optional(level.tokens.prompt, "d") for level in levels]
    rows["hits"] = [_format_optional(level.tokens.hit_rate, ".0%") for level in levels]
    return _columns("answered", rows)


def _playback(levels: Sequence[LevelReport]) -> Table:
    rows = {"load": [level.label for level in levels]}
    for limit in _CONTINUITY_LIMITS_MS:
        name = f"C{limit}"
        rows[name] = [_format_optional(level.continuity.get(name), ".0%") for level in levels]
    return _columns("sound that never ran dry by more than 50, 100, 200 ms", rows)


def _columns(title: str, rows: Mapping[str, Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in rows:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in zip(*rows.values(), strict=True):
        table.add_row(*row)
    return table


def _throughputs(levels: Sequence[LevelReport]) -> Iterator[tuple[str, list[float]]]:
    """Yield names and values of the throughputs that the levels have."""
    for name in _THROUGHPUTS:
        if name in levels[0].throughput_per_s:
            values = [level.throughput_per_s[name] for level in levels]
            if name.endswith("requests") or any(values):
                yield name, values


def _format_optional(value: float | None, form: str) -> str:
    return "not told" if value is None else format(value, form)


def _times(levels: Sequence[LevelReport]) -> Table:
    table = _statistics("times, in milliseconds")
    for level in levels:
        for name, heading in METRICS.items():
            _add_row(table, level, heading, level.latencies.get(name))
        for stage, found in level.stage_starts.items():
            _add_row(table, level, f"{stage} entered", found)
        _add_row(table, level, "until status 429", level.rejection)
        table.add_section()
    return table


def _sender(levels: Sequence[LevelReport]) -> Table:
    table = _statistics("the sender itself, in milliseconds")
    for level in levels:
        _add_row(table, level, "sent too late by", level.generator.send_delay)
        _add_row(table, level, "event loop late by", level.generator.loop_lag)
        table.add_row(level.label, "CPU, of one core", "", f"{level.generator.cpu_share:.0%}")
        table.add_section()
    return table


def _statistics(title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("load", "of"):
        table.add_column(name, no_wrap=True)
    for name in ("values", "mean", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _add_row(table: Table, level: LevelReport, name: str, found: Distribution | None) -> None:
    if found is None:
        return
    is_factor = name == METRICS["real_time_factor"]
    numbers = (found.mean, found.p50, found.p90, found.p99, found.max)
    shown = [f"{each:.3f}" if is_factor else f"{1000 * each:.1f}" for each in numbers]
    table.add_row(level.label, name, str(found.count), *shown)


def save_plot(report: BenchReport, path: Path) -> None:
    """Plot throughput and latencies over load as SVG, with matplotlib; ``OSError`` on failure."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    panels = [*_panels(report.levels)]
    rows = math.ceil(len(panels) / _PLOT_COLUMNS)
    title = f"omni bench: {report.target}" + ("" if report.is_complete else " (cut short)")
    labels = [level.label for level in report.levels]
    # Text remains text, so that it can be searched and uses the reader's font.
    with rc_context({"svg.fonttype": "none"}):
        figure = Figure(figsize=(4 * _PLOT_COLUMNS, 3 * rows), layout="constrained")
        figure.suptitle(title)
        grid = figure.subplots(rows, _PLOT_COLUMNS, squeeze=False)
        for axes, panel in zip(grid.flat, panels, strict=False):
            heading, lines = panel
            axes.set_title(heading)
            for (name, values), style in zip(lines.items(), ("o-", "s--", "^:"), strict=False):
                axes.plot(labels, values, style, label=name)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            if len(lines) > 1:
                axes.legend()
        for axes in grid.flat[len(panels) :]:
            axes.remove()
        has_rate = any(level.rate is not None for level in report.levels)
        figure.supxlabel("requests a second" if has_rate else "requests at once")
        figure.savefig(path, format="svg")


def _panels(levels: Sequence[LevelReport]) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """Yield headings, and the values of each line; NaN if a level has none."""
    for name, values in _throughputs(levels):
        yield _THROUGHPUTS[name][0], {name: values}
    for name, heading in METRICS.items():
        found = [level.latencies.get(name) for level in levels]
        if any(found):
            yield (
                heading + ("" if name == "real_time_factor" else ", s"),
                {p: [getattr(each, p, math.nan) for each in found] for p in ("p50", "p90", "p99")},
            )

"""All levels of a measurement, for people who read tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from omni.commands.bench.bench_report import BenchReport
from omni.commands.bench.distribution import Distribution
from omni.commands.bench.level_report import METRICS, LevelReport

__all__ = ["METRIC_NAMES", "failure_lines", "report_tables"]

METRIC_NAMES = {
    "first_token": "first token",
    "between_tokens": "between tokens",
    "per_token": "per token",
    "first_audio": "first audio",
    "real_time_factor": "real-time factor",
    "end_to_end": "end to end",
}
"""As people read them."""

_PLAIN = {"real_time_factor"}
"""Of these the values are no times."""


def report_tables(report: BenchReport) -> Iterator[Table]:
    """Yield what was answered, how soon, and how good the sender was."""
    if report.levels:
        yield _answered(report.levels)
        yield _times(report.levels)
        yield _sender(report.levels)


def failure_lines(report: BenchReport) -> Iterator[str]:
    """Yield a line for every kind of failure of every level, with what the first of them said."""
    for level in report.levels:
        for kind, count in level.requests.failures.items():
            example = level.requests.examples[kind]
            yield f"load {level.level.label}: {count} failed: {kind}: {example}"


def _answered(levels: Sequence[LevelReport]) -> Table:
    rows: dict[str, list[str]] = {
        "load": [level.level.label for level in levels],
        "seconds": [f"{level.duration_s:.1f}" for level in levels],
        "ok": [str(level.requests.ok) for level in levels],
        "429": [str(level.requests.rejected) for level in levels],
        "failed": [str(level.requests.failed) for level in levels],
    }
    if any(level.requests.unfinished for level in levels):
        rows["cut short"] = [str(level.requests.unfinished) for level in levels]
    rows["requests/s"] = [f"{level.throughput['requests']:.3g}" for level in levels]
    are_pieces = any(level.tokens.are_pieces for level in levels)
    if any(level.tokens.output for level in levels):
        heading = "pieces/s" if are_pieces else "tokens/s"
        rows[heading] = [f"{level.throughput['output_tokens']:.1f}" for level in levels]
    if any(level.audio_s for level in levels):
        rows["audio s/s"] = [f"{level.throughput['audio_s']:.2f}" for level in levels]
    if any(level.num_good is not None for level in levels):
        rows["good/s"] = [f"{level.throughput.get('good_requests', 0.0):.3g}" for level in levels]
    rows["prompt tokens"] = [_number(level.tokens.prompt) for level in levels]
    rows["hits"] = [_share(level.tokens.hit_rate) for level in levels]
    return _table("answered", rows)


def _times(levels: Sequence[LevelReport]) -> Table:
    table = _with_columns("times, in milliseconds", ("load", "of", "values"))
    for level in levels:
        label = level.level.label
        for name in METRICS:
            _add(table, label, METRIC_NAMES[name], level.latencies.get(name), name in _PLAIN)
        _add(table, label, "until status 429", level.rejection, False)
        table.add_section()
    return table


def _sender(levels: Sequence[LevelReport]) -> Table:
    table = _with_columns("the sender itself, in milliseconds", ("load", "of", "values"))
    for level in levels:
        generator, label = level.generator, level.level.label
        _add(table, label, "sent too late by", generator.send_delay, False)
        _add(table, label, "event loop late by", generator.loop_lag, False)
        table.add_row(label, "CPU, of one core", "", f"{generator.cpu_share:.0%}")
        table.add_section()
    return table


def _with_columns(title: str, first: tuple[str, str, str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in first[:2]:
        table.add_column(name, no_wrap=True)
    for name in (first[2], "mean", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _add(table: Table, label: str, name: str, values: Distribution | None, is_plain: bool) -> None:
    if values is None:
        return
    numbers = (values.mean, values.p50, values.p90, values.p99, values.max)
    shown = [f"{each:.3f}" if is_plain else f"{1000 * each:.1f}" for each in numbers]
    table.add_row(label, name, str(values.count), *shown)


def _table(title: str, rows: dict[str, list[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in rows:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in zip(*rows.values(), strict=True):
        table.add_row(*row)
    return table


def _number(value: int | None) -> str:
    return "not told" if value is None else str(value)


def _share(value: float | None) -> str:
    return "not told" if value is None else f"{value:.0%}"

"""All levels of a measurement as a picture: an SVG that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from omni.commands.bench.bench_report import BenchReport
from omni.commands.bench.level_report import METRICS, LevelReport
from omni.commands.bench.report_tables import METRIC_NAMES

__all__ = ["report_svg", "save_plot"]

_COLUMNS = 3
_WIDTH, _HEIGHT = 320, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 34, 40
_HEAD = 62

_STYLE = """
svg { background: #ffffff; color: #1d1d1f; font: 12px system-ui, sans-serif; }
text { fill: currentColor; } .title { font-weight: 600; font-size: 13px; }
.head { font-weight: 600; font-size: 16px; } .tick { font-size: 11px; opacity: 0.75; }
.grid { stroke: currentColor; stroke-opacity: 0.15; } .line { fill: none; stroke-width: 2; }
.a { stroke: #0b62c4; fill: #0b62c4; } .b { stroke: #b45309; fill: #b45309; }
.c { stroke: #a21caf; fill: #a21caf; } .line.a, .line.b, .line.c { fill: none; }
@media (prefers-color-scheme: dark) {
  svg { background: #161618; color: #ececf0; }
  .a { stroke: #6fb1ff; fill: #6fb1ff; } .b { stroke: #f5b35c; fill: #f5b35c; }
  .c { stroke: #e58af0; fill: #e58af0; }
}
""".strip()
"""Three kinds of lines differ by their dashes and marks too, not by colour alone."""

_ROUND = (1, 1.2, 1.6, 2, 3, 4, 6, 8, 10, 12)
_DASHES = {"a": "", "b": "6 4", "c": "2 3"}


@dataclass(frozen=True, slots=True)
class _Panel:
    """One diagram: values over the load; None where a level has none."""

    title: str
    lines: dict[str, list[float | None]]

    @property
    def highest(self) -> float:
        values = [each for line in self.lines.values() for each in line if each is not None]
        return max(values, default=0.0)


def save_plot(report: BenchReport, path: Path) -> None:
    """Write the picture.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(report_svg(report), "utf-8")


def report_svg(report: BenchReport) -> str:
    """Draw throughput and times over the load: a small diagram for each."""
    panels = [*_panels(report.levels)]
    rows = max(1, math.ceil(len(panels) / _COLUMNS))
    width, height = _COLUMNS * _WIDTH, _HEAD + rows * _HEIGHT
    title = f"omni bench: {report.target}"
    if not report.is_complete:
        title += " (cut short)"
    load = "requests a second" if _is_open(report.levels) else "requests at once"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-labelledby="title">',
        f'<title id="title">{escape(title)}</title><style>{_STYLE}</style>',
        f'<text class="head" x="16" y="26">{escape(title)}</text>',
        *_legend(load),
    ]
    labels = [level.level.label.removesuffix("/s") for level in report.levels]
    for number, panel in enumerate(panels):
        x, y = number % _COLUMNS * _WIDTH, _HEAD + number // _COLUMNS * _HEIGHT
        parts += [f'<g transform="translate({x} {y})">', *_draw(panel, labels), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _is_open(levels: Sequence[LevelReport]) -> bool:
    return any(level.level.rate is not None for level in levels)


def _panels(levels: Sequence[LevelReport]) -> Iterator[_Panel]:
    yield _Panel("requests per second", {"a": _of(levels, "requests")})
    if any(level.num_good is not None for level in levels):
        yield _Panel("good requests per second", {"a": _of(levels, "good_requests")})
    if any(level.tokens.output for level in levels):
        yield _Panel("tokens per second", {"a": _of(levels, "output_tokens")})
    if any(level.audio_s for level in levels):
        yield _Panel("seconds of audio per second", {"a": _of(levels, "audio_s")})
    for name in METRICS:
        if any(name in level.latencies for level in levels):
            unit = "" if name == "real_time_factor" else ", s"
            lines = {
                "a": _percentile(levels, name, lambda found: found.p50),
                "b": _percentile(levels, name, lambda found: found.p90),
                "c": _percentile(levels, name, lambda found: found.p99),
            }
            yield _Panel(METRIC_NAMES[name] + unit, lines)


def _of(levels: Sequence[LevelReport], name: str) -> list[float | None]:
    return [level.throughput.get(name) for level in levels]


def _percentile(
    levels: Sequence[LevelReport], name: str, pick: Callable[..., float]
) -> list[float | None]:
    found = [level.latencies.get(name) for level in levels]
    return [None if each is None else pick(each) for each in found]


def _legend(load: str) -> Iterator[str]:
    yield f'<text class="tick" x="16" y="48">over {load};</text>'
    x = 150
    for kind, name in (("a", "p50, or the value"), ("b", "p90"), ("c", "p99")):
        yield f'<path class="line {kind}" {_dash(kind)}d="M{x} 44h28"/>' + _mark(kind, x + 14, 44)
        yield f'<text class="tick" x="{x + 34}" y="48">{name}</text>'
        x += 62 + 7 * len(name)


def _draw(panel: _Panel, labels: Sequence[str]) -> Iterator[str]:
    top = _round_up(panel.highest)
    inner_width, inner_height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    step = inner_width / max(1, len(labels))

    def x_of(index: int) -> float:
        return _LEFT + step * (index + 0.5)

    def y_of(value: float) -> float:
        return _TOP + inner_height * (1 - value / top)

    yield f'<text class="title" x="{_LEFT}" y="20">{escape(panel.title)}</text>'
    for quarter in range(5):
        value = top * quarter / 4
        y = y_of(value)
        yield f'<path class="grid" d="M{_LEFT} {y:.1f}h{inner_width}"/>'
        yield (
            f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
        )
    for index, label in enumerate(labels):
        yield (
            f'<text class="tick" x="{x_of(index):.1f}" y="{_HEIGHT - _BOTTOM + 18}" '
            f'text-anchor="middle">{escape(label)}</text>'
        )
    for kind, values in panel.lines.items():
        points = [
            (x_of(index), y_of(value)) for index, value in enumerate(values) if value is not None
        ]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        if path:
            yield f'<path class="line {kind}" {_dash(kind)}d="M{path}"/>'
        yield from (_mark(kind, x, y) for x, y in points)


def _dash(kind: str) -> str:
    return f'stroke-dasharray="{_DASHES[kind]}" ' if _DASHES[kind] else ""


def _mark(kind: str, x: float, y: float) -> str:
    if kind == "a":
        return f'<circle class="a" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
    if kind == "b":
        return f'<rect class="b" x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6"/>'
    return f'<path class="c" d="M{x:.1f} {y - 4:.1f}l4 7h-8z"/>'


def _round_up(value: float) -> float:
    """A round number that is not smaller, whose quarters are round as well; 1 for nothing."""
    if value <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(unit * factor for factor in _ROUND if value <= unit * factor)

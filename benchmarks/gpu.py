"""All measurements and checks that need a GPU, in nine minutes and one report.

    python -m benchmarks.gpu --out DIR [--minutes 9] [--device cuda:0] [--parts device tests ...]
    python -m benchmarks.gpu --out DIR --small --device cpu     the same on a CPU, in a small form

Nothing is downloaded: models are seeded, or have random weights made on the device. Each part runs
in a separate process with a time limit; failures, hangs and crashes are recorded, and the next
part continues. :mod:`benchmarks.gpu_parts` describes the parts and their results.

``DIR/report.md`` and ``DIR/report.json`` are rewritten whenever a part has a new result, so that
an interruption loses nothing; ``DIR/PART.jsonl`` and ``DIR/PART.log`` contain the results and the
output of a part. The exit status is 1 if a part did not finish.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PARTS: dict[str, float] = {
    "device": 60,
    "throughput-0.5b": 100,
    "profile": 60,
    "parity": 80,
    "families": 120,
    "tests": 150,
    "verify": 100,
    "throughput-7b": 150,
}
"""The parts in order, each with its maximum seconds."""

_POLL_INTERVAL_S = 0.2
_LOG_LINES = 12


@dataclass(slots=True)
class Outcome:
    """The result of a part.

    Attributes:
        status: ``running``, ``ok``, ``failed``, ``stopped`` (it took too long) or ``not begun``.
        rows: its results in order; each names its table.
        log: the last lines of its output, if it did not finish.
    """

    status: str = "not begun"
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)


class Report:
    """All parts, written to a folder whenever :meth:`write` is called."""

    def __init__(self, folder: Path, parts: Sequence[str], title: str) -> None:
        self.folder, self.title = folder, title
        self.parts = {name: Outcome() for name in parts}

    def write(self) -> None:
        """Write both files atomically."""
        content = {name: asdict(outcome) for name, outcome in self.parts.items()}
        self._replace("report.json", json.dumps({"title": self.title, "parts": content}, indent=1))
        self._replace("report.md", self.markdown())

    def _replace(self, name: str, text: str) -> None:
        new = self.folder / f"{name}.new"
        new.write_text(text + "\n", "utf-8")
        new.replace(self.folder / name)

    def markdown(self) -> str:
        """Format a section for every part, with a table for each kind of row in it."""
        lines = [f"# {self.title}"]
        for name, outcome in self.parts.items():
            lines += ["", f"## {name}: {outcome.status}, {outcome.seconds:.0f} s"]
            for table in dict.fromkeys(row["table"] for row in outcome.rows):
                lines += ["", *_table(table, [r for r in outcome.rows if r["table"] == table])]
            if outcome.log:
                lines += ["", "```text", *outcome.log, "```"]
        return "\n".join(lines)


def _table(title: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    columns = [key for key in dict.fromkeys(key for row in rows for key in row) if key != "table"]
    lines = [title, "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = (" ".join(_cell(row.get(column, "")).split()) for column in columns)
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return lines


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Read the complete lines of a part's file; an incomplete one is left for the next time."""
    if not file.exists():
        return []
    text = file.read_text("utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def run_part(report: Report, name: str, command: Sequence[str], limit_s: float) -> None:
    """Run a part's command, and update the report while it runs.

    Args:
        command: writes its rows to ``name.jsonl`` in the report's folder.
        limit_s: timeout after which it is killed, with all processes that it has started.
    """
    outcome, rows = report.parts[name], report.folder / f"{name}.jsonl"
    rows.unlink(missing_ok=True)
    log = report.folder / f"{name}.log"
    started = time.monotonic()
    outcome.status = "running"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while process.poll() is None and outcome.seconds < limit_s:
                time.sleep(_POLL_INTERVAL_S)
                outcome.seconds = time.monotonic() - started
                found = read_rows(rows)
                if len(found) > len(outcome.rows):
                    outcome.rows = found
                    report.write()
        finally:
            was_stopped = process.poll() is None
            if was_stopped:
                os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
    outcome.seconds, outcome.rows = time.monotonic() - started, read_rows(rows)
    outcome.status = "stopped" if was_stopped else "failed" if status else "ok"
    if outcome.status != "ok":
        outcome.log = log.read_text("utf-8", "replace").splitlines()[-_LOG_LINES:]
    report.write()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts together")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--small", action="store_true", help="few and tiny cases")
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    args = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    report = Report(args.out, args.parts, f"omni-pipeline on {args.device}")
    report.write()
    for name in args.parts:
        limit_s = min(PARTS[name], deadline - time.monotonic())
        if limit_s < 1:
            break
        command = [sys.executable, "-m", "benchmarks.gpu_parts", name, args.device, str(args.out)]
        command += [f"{limit_s:.0f}", *["--small"] * args.small]
        run_part(report, name, command, limit_s)
        outcome = report.parts[name]
        print(f"{name}: {outcome.status}, {outcome.seconds:.0f} s", *outcome.log, sep="\n  ")
    print(f"{args.out / 'report.md'}")
    return int(any(outcome.status != "ok" for outcome in report.parts.values()))


if __name__ == "__main__":
    sys.exit(main())

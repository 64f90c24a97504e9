"""Kills ``omni run`` at random moments, resumes it, and compares with an undisturbed run.

    python -m torture.killed_runs --kills 30 --requests 200 [--sigkill]

A run is killed while it loads, or after some more requests are done; every third time by SIGTERM or
SIGINT, which it can handle, else by SIGKILL, which it cannot, or always with --sigkill. After each
kill, all earlier lines must still exist, complete and correct, with their files. In the end
``outputs.jsonl`` must equal that of the undisturbed run, except for times and hits, and its tensors
up to rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from torture.outcome_table import Tally

_JOURNAL = "outputs.partial.jsonl"
_VARYING = ("metrics", "num_cached_tokens")
"""Fields that differ between runs of the same requests."""
_TOLERANCE = 1e-4
_LONGEST_S = 600
_BEGINNINGS = (
    "You are a helpful assistant, and these are the rules of the house. ",
    "Once upon a time there was a library of three floors. ",
    "",
)
_STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}


def main() -> int:
    """Run everything; return 0 if nothing was lost or wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sigkill", action="store_true", help="kill by SIGKILL alone")
    given = parser.parse_args()
    draw = random.Random(given.seed)
    how = " by SIGKILL" if given.sigkill else ""
    tally = Tally(f"a run of {given.requests} requests is killed{how} and resumed")
    with tempfile.TemporaryDirectory() as folder:
        requests = Path(folder, "requests.jsonl")
        requests.write_text("".join(_lines(draw, given.requests)), encoding="utf-8")
        undisturbed = Path(folder, "undisturbed")
        done = subprocess.run(_command(requests, undisturbed), timeout=_LONGEST_S)
        if done.returncode != 1:
            raise SystemExit(f"the undisturbed run ended with status {done.returncode}, not 1")
        expected = _read(undisturbed / "outputs.jsonl")
        others = () if given.sigkill else (signal.SIGTERM, signal.SIGINT)
        disturbed = _Disturbed(requests, Path(folder, "disturbed"), expected, draw)
        disturbed.kill(given.kills, others, tally)
    return Tally.report([tally])


def _lines(draw: random.Random, number: int) -> list[str]:
    """Generate prompts with common prefixes, some of which fail, and invalid lines."""
    lines = []
    for index in range(number):
        words = " ".join(draw.choice(("rain", "clock", "news", "key")) for _ in range(20))
        line: dict[str, Any] = {"prompt": draw.choice(_BEGINNINGS) + f"{index} {words}"}
        if index % 17 == 5:
            line = {"prompt_token_ids": [5] * 4_000}
        lines.append("{\n" if index % 19 == 7 else json.dumps(line) + "\n")
    return lines


def _command(requests: Path, out: Path) -> list[str]:
    settings = ("writer.final_output=[text, tensors]", "writer.engine.max_num_seqs=2")
    flags = [flag for each in settings for flag in ("--set", f"stages.{each}")]
    omni = [sys.executable, "-m", "omni", "run", "two_step", "-q"]
    return [*omni, "-i", str(requests), "-o", str(out), "--resume", *flags]


def _read(path: Path) -> list[dict[str, Any]]:
    """Read the complete lines of a file; only the last can be incomplete."""
    content = path.read_bytes() if path.exists() else b""
    whole, _, _ = content.rpartition(b"\n")
    return [json.loads(line) for line in whole.split(b"\n")] if whole else []


class _Disturbed:
    """A run that is killed repeatedly."""

    def __init__(
        self, requests: Path, out: Path, expected: list[dict[str, Any]], draw: random.Random
    ) -> None:
        self._command = _command(requests, out)
        self._out = out
        self._expected = expected
        self._draw = draw
        self._seen: set[int] = set()

    def kill(self, times: int, others: Sequence[signal.Signals], tally: Tally) -> None:
        """Kill and resume, every third time with another signal; then let it end, and compare."""
        for number in range(times):
            is_other = bool(others) and number % 3 == 2
            sent = self._draw.choice(others) if is_other else signal.SIGKILL
            left = len(self._expected) - len(self._seen)
            outcome, detail = self._run(sent, left // (times - number))
            problem = detail or self._check(_read(self._out / _JOURNAL))
            tally.add("wrong" if problem and outcome == "went on" else outcome, problem)
            print(f"{number + 1}: {sent.name}, {len(self._seen)} are done", file=sys.stderr)
        done = subprocess.run(self._command, timeout=_LONGEST_S)
        lines = _read(self._out / "outputs.jsonl")
        problem = self._check([{"position": each} | line for each, line in enumerate(lines)])
        if done.returncode != 1 or problem or len(lines) != len(self._expected):
            tally.add(
                "wrong", f"in the end: status {done.returncode}, {len(lines)} lines; {problem}"
            )

    def _run(self, sent: signal.Signals, share: int) -> tuple[str, str]:
        """Start and send a signal at a random moment; return the outcome, and any problem."""
        with subprocess.Popen(self._command, stderr=subprocess.PIPE) as process:
            if self._draw.random() < 0.2:
                time.sleep(self._draw.uniform(0.0, 4.0))
            else:
                self._wait_for(process, self._draw.randint(0, 2 * share))
            process.send_signal(sent)
            try:
                process.wait(_LONGEST_S)
            except subprocess.TimeoutExpired:
                process.kill()
                return "hangs", f"after {sent.name}"
            assert process.stderr is not None
            told = process.stderr.read().decode()
        # It may arrive before the command handles signals, while Python starts; or at the end.
        listening = "omni/commands/command.py" in told
        answered = "Traceback" not in told or (sent == signal.SIGINT and not listening)
        if process.returncode not in (_STATUS[sent], -sent, 1) or not answered:
            return "went on", f"{sent.name}: status {process.returncode}: {told[-2_000:]}"
        return "went on", ""

    def _wait_for(self, process: subprocess.Popen[bytes], more: int) -> None:
        """Wait until the journal has ``more`` additional lines, and a moment longer."""
        journal = self._out / _JOURNAL
        wanted = len(self._seen) + more
        deadline = time.monotonic() + _LONGEST_S
        while process.poll() is None and time.monotonic() < deadline:
            if journal.exists() and journal.read_bytes().count(b"\n") >= wanted:
                break
            time.sleep(0.002)
        time.sleep(self._draw.uniform(0.0, 0.05))

    def _check(self, lines: list[dict[str, Any]]) -> str:
        """Check the lines, and that earlier ones still exist; return any problem."""
        there = {line["position"] for line in lines}
        lost = self._seen - there
        if lost and not (self._out / "outputs.jsonl").exists():
            return f"lines {sorted(lost)} are gone"
        self._seen |= there
        for line in lines:
            problem = self._difference(line)
            if problem:
                return f"line {line['position']}: {problem}"
        return ""

    def _difference(self, line: dict[str, Any]) -> str:
        theirs = self._expected[line["position"]]
        for key in ("request_id", "error"):
            if line[key] != theirs[key]:
                return f"{key}: {line[key]!r}, not {theirs[key]!r}"
        for name, stage in line["stages"].items():
            other = theirs["stages"][name]
            for key in sorted(stage.keys() | other.keys()):
                if key not in _VARYING and stage.get(key) != other.get(key):
                    return f"{name}.{key}: {stage.get(key)!r}, not {other.get(key)!r}"
            for tensor, file in stage.get("tensors", {}).items():
                ours = load_file(self._out / file)[tensor]
                undisturbed = self._out.parent / "undisturbed" / other["tensors"][tensor]
                if not torch.allclose(ours, load_file(undisturbed)[tensor], atol=_TOLERANCE):
                    return f"{name}.{tensor} differs"
        return ""


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

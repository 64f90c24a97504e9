"""``omni run`` in forks of this process, each of which is killed at another point and then resumed.

    python -m tests.support.killed_forks FOLDER

Prints the number of points at which a run was killed. A separate process, since one that forks
must have no threads.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omni.commands import run_command
from omni.commands.cli import app
from tests.support.scripted_omni import ScriptedOmni

_LINES = ('{"prompt": "a"}', "{", '{"prompt": "please fail"}', '{"prompt": "b"}')
_CALLS = ("write", "open", "replace", "unlink", "mkdir", "fsync")
"""Kills a run after half of a write, and before everything else."""


def main(folder: Path) -> int:
    """Kill and resume at every point in turn; return the number of points."""
    vars(run_command)["Omni"] = ScriptedOmni
    requests = folder / "requests.jsonl"
    requests.write_text("\n".join(_LINES))
    undisturbed = folder / "undisturbed"
    assert _run(requests, undisturbed, None) == 1, "a request failed"
    expected = _content(undisturbed)
    point = 0
    while True:
        point += 1
        out = folder / f"out-{point}"
        status = _run(requests, out, point)
        if status == 1:
            return point - 1
        assert status == -signal.SIGKILL, status
        _check_lines(out, expected)
        assert _run(requests, out, None) == 1
        assert _content(out) == expected, f"killed at point {point}"


def _run(requests: Path, out: Path, point: int | None) -> int:
    """Run in a fork; return the exit status, or the negative signal."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 99
    try:
        if point is not None:
            _die_at(point)
        final = "stages.writer.final_output=[text, tensors]"
        flags = ["-i", str(requests), "-o", str(out), "--resume", "-q", "--set", final]
        with open(os.devnull, "w") as sys.stderr:
            sys.stdout = sys.stderr  # only the number is printed there
            status = app(["run", "two_step", *flags], standalone_mode=False) or 0
    finally:
        os._exit(status)


def _die_at(point: int) -> None:
    calls = 0

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == point:
                if real.__name__ == "write":
                    real(args[0], bytes(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call

    for name in _CALLS:
        setattr(os, name, dying(getattr(os, name)))


def _content(out: Path) -> dict[str, bytes]:
    files = (file for file in out.rglob("*") if file.is_file())
    return {str(file.relative_to(out)): file.read_bytes() for file in files}


def _check_lines(out: Path, expected: dict[str, bytes]) -> None:
    """Check every whole line in the journal, and its files."""
    there = _content(out) if out.exists() else {}
    lines = [json.loads(line) for line in expected["outputs.jsonl"].splitlines()]
    whole, _, _ = there.get("outputs.partial.jsonl", b"").rpartition(b"\n")
    for content in whole.splitlines():
        line = json.loads(content)
        assert line == {"position": line["position"]} | lines[line["position"]]
        for stage in line["stages"].values():
            for file in stage.get("tensors", {}).values():
                assert there[file] == expected[file]


if __name__ == "__main__":
    print(main(Path(sys.argv[1])))

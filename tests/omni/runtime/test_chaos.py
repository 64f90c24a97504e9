"""A short part of ``benchmarks/chaos.py``: real workers, killed, stopped and interrupted."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.import_graph import ROOT
from tests.support.patience import PATIENCE_S

RUN = ("--requests", "24", "--faults", "8", "--kinds", "sigkill", "sigstop", "exception", "ruin")


@pytest.mark.usefixtures("checkpoint_cache")
def test_failures_of_workers_change_no_output_and_leave_nothing_behind() -> None:
    """In a separate process, so that its descriptors and children are only its own."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.chaos", *RUN, "--reference", "workers"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    reported = f"{done.stdout}\n{done.stderr[-4000:]}"
    assert "faults: {'SIGKILL': 2, 'SIGSTOP': 2, 'exception': 2, 'ruin': 2}\n" in done.stdout, (
        reported
    )
    assert "outcomes: {'equal': 24}; " in done.stdout, reported
    assert "lost: []\n" in done.stdout, reported
    assert "left behind: nothing\n" in done.stdout, reported
    assert done.returncode == 0, reported

"""A run that is killed at any point loses nothing that it had done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.import_graph import ROOT


def test_a_run_that_is_killed_at_any_point_is_resumed_as_if_it_never_was(tmp_path: Path) -> None:
    """With real kills; ``torture/killed_runs.py`` has random ones, over a real pipeline."""
    command = [sys.executable, "-m", "tests.support.killed_forks", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20

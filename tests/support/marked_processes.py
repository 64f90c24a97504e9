"""Processes that a test has started, directly or indirectly, and checks that all have ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import psutil

from tests.support.import_graph import ROOT
from tests.support.patience import PATIENCE_S

_MARK = "OMNI_TEST_MARK"


class MarkedRun:
    """``omni`` in a separate process whose descendants can be told from any others."""

    def __init__(
        self, *arguments: str, folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self._mark = uuid.uuid4().hex
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "omni", *arguments],
            cwd=folder,
            env={**os.environ, **(environment or {}), _MARK: self._mark, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A test runner in the background may have children ignore the signal.
            preexec_fn=heed_interrupts,
        )

    def finish(self) -> tuple[int, str, str]:
        """Wait for its end; return exit status, standard output and standard error."""
        with self.process:
            out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, err

    def living(self) -> list[str]:
        """List the running processes among it and all its descendants."""
        found = []
        for each in psutil.process_iter(["pid", "cmdline", "status"]):
            try:
                if (
                    each.status() != psutil.STATUS_ZOMBIE
                    and each.environ().get(_MARK) == self._mark
                ):
                    found.append(f"{each.pid}: {each.cmdline()}")
            except psutil.Error:  # it has ended meanwhile, or belongs to another user
                continue
        return found

    def check_nothing_left(self) -> None:
        """Wait until all of them have ended."""
        until = time.monotonic() + PATIENCE_S
        while left := self.living():
            assert time.monotonic() < until, left
            time.sleep(0.05)


def heed_interrupts() -> None:
    """Run in a child before its program: a shell makes background jobs ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)

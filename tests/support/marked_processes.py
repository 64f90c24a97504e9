"""Processes that a test has started, however far down, and what is left of them."""

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
    """``omni`` in a process of its own, all of whose children can be told from any others."""

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
            # Whoever runs the tests in the background may have them ignore it.
            preexec_fn=heed_interrupts,
        )

    def finish(self) -> tuple[int, str, str]:
        """Wait for its end: exit status, standard output, standard error."""
        with self.process:
            out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, err

    def living(self) -> list[str]:
        """What runs of it now, and of all that it has started."""
        found = []
        for each in psutil.process_iter(["pid", "cmdline", "status"]):
            try:
                if (
                    each.status() != psutil.STATUS_ZOMBIE
                    and each.environ().get(_MARK) == self._mark
                ):
                    found.append(f"{each.pid}: {each.cmdline()}")
            except psutil.Error:  # it has ended meanwhile, or is another user's
                continue
        return found

    def check_nothing_left(self) -> None:
        """Wait until all of it has ended."""
        until = time.monotonic() + PATIENCE_S
        while left := self.living():
            assert time.monotonic() < until, left
            time.sleep(0.05)


def heed_interrupts() -> None:
    """For a child before its program: a shell lets what it runs in the background ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)

"""How long tests wait for what has to happen."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 600.0
"""Seconds. Only a test that fails waits for so long: on a machine that is busy with other things,
what takes a moment may take minutes."""


def wait_for(condition: Callable[[], object]) -> None:
    """Wait for what nobody reports, such as a file of another process."""
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, "it never came to be"
        time.sleep(0.01)

"""The timeout of tests that wait for an event."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 600.0
"""Seconds. Only a failing test waits that long: on a busy machine, what usually takes a moment may
take minutes."""


def wait_for(condition: Callable[[], object]) -> None:
    """Poll for a condition that nothing reports, such as a file of another process."""
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, "it never came to be"
        time.sleep(0.01)

"""Waits until no stage has anything to do any more."""

from __future__ import annotations

import time
from collections.abc import Iterable

from stages import Stage
from tests.support.patience import PATIENCE_S

__all__ = ["assert_settled"]


def assert_settled(stages: Iterable[Stage]) -> None:
    """No stage has a request or has lost anything.

    A worker elsewhere may be about to hear that a request was aborted.
    """
    until = time.monotonic() + PATIENCE_S
    for stage in stages:
        while stage.has_unfinished_requests and time.monotonic() < until:
            time.sleep(0.001)
        stage.check_integrity()

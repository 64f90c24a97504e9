"""Events that a stage's worker reports for traces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from platform import node

import msgspec

RUN_AGAIN = "run again"
"""Name of the event of sending a request with all its inputs to a stage again."""


@dataclass(frozen=True, slots=True)
class StageEvent:
    """A time span or an instant in a worker.

    Attributes:
        name: name of the event: ``step``, ``waiting``, ``hit``, ...
        start_s: start time, by ``time.monotonic`` of the worker's machine.
        end_s: end time, likewise; None for an instant.
        request_id: request that it concerns; None if it concerns the whole worker.
        args: details such as counts or bytes.
    """

    name: str
    start_s: float
    end_s: float | None = None
    request_id: str | None = None
    args: Mapping[str, int | float | str] = field(default_factory=dict)


class Traced(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Events of a worker, in order, since its last report.

    Attributes:
        events: events; per request, their times do not decrease.
        replica: index of the stage's worker.
        clock: name of the clock of the times; times of the same clock can be compared.
        told_s: time of this report, by that clock.
    """

    events: tuple[StageEvent, ...]
    replica: int
    clock: str
    told_s: float


@cache
def this_clock() -> str:
    """Return the name of this machine's monotonic clock, which restarts when the machine boots."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:  # not on Linux
        return node()

"""What a stage's worker tells of its time, for a trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from platform import node

import msgspec

RUN_AGAIN = "run again"
"""The name of the event that all that a request came with is sent to a stage once more."""


@dataclass(frozen=True, slots=True)
class StageEvent:
    """Something that took time in a worker, or happened there at a moment.

    Attributes:
        name: what it was: ``step``, ``waiting``, ``hit``, ...
        start_s: when it began, by ``time.monotonic`` of the worker's machine.
        end_s: when it ended, likewise; None if it was a moment.
        request_id: of the request that it happened to; None if it is about the whole worker.
        args: what there is to tell: counts, bytes.
    """

    name: str
    start_s: float
    end_s: float | None = None
    request_id: str | None = None
    args: Mapping[str, int | float | str] = field(default_factory=dict)


class Traced(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What happened in a worker, in order, since its last report.

    Attributes:
        events: whose times do not decrease per request, from one to the next.
        replica: which of the stage's workers it was.
        clock: whose clock the times are of; those of one name can be compared.
        told_s: when this was reported, by that clock.
    """

    events: tuple[StageEvent, ...]
    replica: int
    clock: str
    told_s: float


@cache
def this_clock() -> str:
    """The name of this machine's monotonic clock, which starts again with the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:  # not on Linux
        return node()

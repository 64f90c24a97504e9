"""What a run of workers could leave behind, counted before and after."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

_SETTLING_S = 10.0


@dataclass(frozen=True)
class Leftovers:
    """What there is of this process, and below it.

    Attributes:
        processes: below this one that have not ended.
        threads: of this one.
        descriptors: that this one has open; memory that it shares with workers is known by one.
        shared: names in ``/dev/shm``.
    """

    processes: int
    threads: int
    descriptors: int
    shared: frozenset[str]

    @classmethod
    def now(cls) -> Leftovers:
        """Count."""
        return cls(
            processes=len(_below(os.getpid())),
            threads=threading.active_count(),
            descriptors=len(os.listdir("/proc/self/fd")),
            shared=frozenset(os.listdir("/dev/shm")),
        )

    def more_than(self, before: Leftovers, spared: int = 0) -> dict[str, object]:
        """What there is that was not there before, or how many; empty if there is nothing.

        Args:
            before: what there was.
            spared: descriptors that are not counted.
        """
        more = {
            "processes": self.processes - before.processes,
            "threads": self.threads - before.threads,
            "descriptors": self.descriptors - before.descriptors - spared,
        }
        names = sorted(self.shared - before.shared)
        counted: dict[str, object] = {what: count for what, count in more.items() if count > 0}
        return counted | ({"shared": names} if names else {})

    @classmethod
    def settled(cls, before: Leftovers, spared: int = 0) -> Leftovers:
        """Count once nothing is left that was not there before, or after a while.

        Others on this machine make names in ``/dev/shm`` as well, and take them away again.
        """
        until_s = time.monotonic() + _SETTLING_S
        while (now := cls.now()).more_than(before, spared) and time.monotonic() < until_s:
            time.sleep(0.05)
        return now

    def __str__(self) -> str:
        """In a line."""
        return (
            f"{self.processes} processes, {self.threads} threads, {self.descriptors} descriptors, "
            f"{len(self.shared)} names in /dev/shm"
        )


def _below(pid: int) -> set[int]:
    """The living processes that a process has started, and those that they have."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if words[0] != "Z":
            parents[int(stat.parent.name)] = int(words[1])
    below, generation = set[int](), {pid}
    while generation:
        generation = {child for child, parent in parents.items() if parent in generation} - below
        below |= generation
    return below

"""Resources that a run of workers could leak, counted before and after."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Leftovers:
    """Resources of this process and its descendants.

    Attributes:
        processes: number of living descendants.
        threads: number of threads of this process.
        descriptors: number of its open descriptors; memory shared with workers has one each.
        shared: names in ``/dev/shm``.
    """

    processes: int
    threads: int
    descriptors: int
    shared: frozenset[str]

    @classmethod
    def now(cls) -> Leftovers:
        """Count the current resources."""
        return cls(
            processes=len(_below(os.getpid())),
            threads=threading.active_count(),
            descriptors=len(os.listdir("/proc/self/fd")),
            shared=frozenset(os.listdir("/dev/shm")),
        )

    def more_than(self, before: Leftovers, spared: int = 0) -> dict[str, object]:
        """Return the resources that did not exist before, by kind; empty if there are none.

        Args:
            before: earlier counts.
            spared: number of descriptors that are ignored.
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
        """Count as soon as nothing new is left, or after a timeout.

        Other programs on this machine create and remove names in ``/dev/shm`` as well.
        """
        until_s = time.monotonic() + _TIMEOUT_S
        while (now := cls.now()).more_than(before, spared) and time.monotonic() < until_s:
            time.sleep(0.05)
        return now

    def __str__(self) -> str:
        """Format the counts in one line."""
        return (
            f"{self.processes} processes, {self.threads} threads, {self.descriptors} descriptors, "
            f"{len(self.shared)} names in /dev/shm"
        )


def _below(pid: int) -> set[int]:
    """Return the living descendants of a process."""
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

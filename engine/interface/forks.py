"""Gives the child of a fork new locks: those that other threads held would never be freed there."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet

__all__ = ["Renewable", "renew_in_forks"]


class Renewable(Protocol):
    """What has locks."""

    def renew_locks(self) -> None:
        """Replace them: a thread of the parent may hold the old ones, and is not there."""


_RENEWED: WeakSet[Renewable] = WeakSet()


def renew_in_forks(thing: Renewable) -> None:
    """Have a thing renew its locks in every child of a fork, as long as it is there.

    Args:
        thing: whose locks are taken by several threads, and also where it is only given up, such as
            by a generator that is dropped; hashable.
    """
    _RENEWED.add(thing)


def _renew() -> None:
    for thing in tuple(_RENEWED):
        thing.renew_locks()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)

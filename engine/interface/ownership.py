"""Ownership of stateful objects: one owner, one thread at a time, in one process.

Threads take turns with shared objects, and the child of a fork gets new locks: those held by other
threads at the time of the fork would never be released there.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet


class Renewable(Protocol):
    """An object with locks."""

    def renew_locks(self) -> None:
        """Replace the locks: the old ones may be held by threads that exist only in the parent."""


_RENEWABLES: WeakSet[Renewable] = WeakSet()


def renew_in_forks(thing: Renewable) -> None:
    """Renew an object's locks in every child of a fork, for the object's lifetime.

    Args:
        thing: a hashable object whose locks are taken by several threads, or while it is merely
            dropped, such as by a generator that is finalized.
    """
    _RENEWABLES.add(thing)


def _renew() -> None:
    for thing in tuple(_RENEWABLES):
        thing.renew_locks()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


class _ObjectLocks:
    """One lock per object, for the object's lifetime."""

    def __init__(self) -> None:
        self.renew_locks()
        renew_in_forks(self)

    def renew_locks(self) -> None:
        """Drop all locks; see :class:`~engine.interface.ownership.Renewable`."""
        self._adding = threading.Lock()
        self._locks: WeakKeyDictionary[object, threading.Lock] = WeakKeyDictionary()

    def lock_of(self, thing: object) -> threading.Lock:
        with self._adding:
            return self._locks.setdefault(thing, threading.Lock())


_OBJECT_LOCKS = _ObjectLocks()


@contextmanager
def turn_of(thing: object) -> Iterator[None]:
    """Hold an object's lock while it is used; other threads wait.

    Requests are prepared in several threads, by tokenizers and processors of transformers, which
    are not guaranteed to be thread-safe.
    """
    with _OBJECT_LOCKS.lock_of(thing):
        yield


# Between two checks of whether another thread has left.
_POLL_INTERVAL_S = 0.001


class Ownership:
    """Refuses, with a message, the uses that would corrupt an engine, a stage or a pipeline.

    ::

        built ──► claimed by one owner ──► released, or its owner is gone ──► claimed ──► ...
          └──────────────────────────────► closed: no longer usable

    The owner is held by a weak reference, so a dropped owner owns nothing. An object built before a
    fork cannot be used in the child: a call would hang, since the child has none of the parent's
    threads, but its locks and OpenMP pools in their state at the fork.

    Args:
        thing: name of the owned object in messages: ``"this LLMEngine"``.
    """

    def __init__(self, thing: str) -> None:
        self._thing = thing
        self._pid = os.getpid()
        self._claiming = threading.Lock()
        self._owner: weakref.ref[object] | None = None
        self._owner_name = ""
        self._is_closed = False
        self._inside: dict[str, int] = {}

    @property
    def is_over(self) -> bool:
        """True if it is closed, or was built in a process that this one is a fork of."""
        return self._is_closed or os.getpid() != self._pid

    @property
    def owner_name(self) -> str | None:
        """The name that the owner gave when claiming; None without an owner."""
        return None if self._owner is None or self._owner() is None else self._owner_name

    def check(self) -> None:
        """Raise ``RuntimeError`` if it is over."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{self._thing} was built in process {self._pid} and cannot be used in its fork "
                f"{os.getpid()}, which has none of its threads: build one in this process, or "
                "start processes with the method 'spawn'"
            )
        if self._is_closed:
            raise RuntimeError(f"{self._thing} is closed: build a new one")

    def claim(self, owner: object, name: str) -> None:
        """Claim it for an owner, until :meth:`release`, or until the owner is gone.

        Args:
            name: the owner's name in the error message of a second claim.

        Raises:
            RuntimeError: it has an owner, or is over.
        """
        self.check()
        with self._claiming:
            if self.owner_name is not None:
                raise RuntimeError(
                    f"{self._thing} belongs to {self._owner_name} already: build another one, or "
                    "close that owner first"
                )
            self._owner, self._owner_name = weakref.ref(owner), name

    def release(self, owner: object) -> None:
        """Release it; does nothing if it belongs to another owner."""
        if self._owner is not None and self._owner() is owner:
            self._owner = None

    def close(self) -> None:
        """Refuse every further use. Idempotent."""
        self._is_closed = True
        self._owner = None

    def enter(self, *, wait: bool = False) -> bool:
        """Take it for this thread exclusively, until :meth:`leave`.

        Args:
            wait: True to wait for a thread that holds it, instead of raising.

        Returns:
            True if this call took it; False if this thread already holds it and leaves it later.

        Raises:
            RuntimeError: another thread holds it.
        """
        thread = threading.get_ident()
        if self._inside.get("thread") == thread:
            return False
        # A single atomic call decides which thread is first.
        while self._inside.setdefault("thread", thread) != thread:
            if not wait:
                raise RuntimeError(
                    f"{self._thing} is in use by another thread: one thread drives an engine; "
                    "Omni takes requests from any number of threads"
                )
            time.sleep(_POLL_INTERVAL_S)
        return True

    @property
    def is_inside(self) -> bool:
        """True if this thread holds it."""
        return self._inside.get("thread") == threading.get_ident()

    def leave(self) -> None:
        """Let other threads in; does nothing if this thread does not hold it."""
        if self._inside.get("thread") == threading.get_ident():
            self._inside.clear()

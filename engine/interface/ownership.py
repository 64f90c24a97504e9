"""Ownership of what keeps state: one owner, one thread at a time, in one process.

Several threads take turns at what they share, and the child of a fork gets new locks: those that
other threads held at that moment would never be released there.
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


class _Turns:
    """A lock for each thing, as long as that is there."""

    def __init__(self) -> None:
        self.renew_locks()
        renew_in_forks(self)

    def renew_locks(self) -> None:
        """Begin with none; see :class:`~engine.interface.ownership.Renewable`."""
        self._adding = threading.Lock()
        self._locks: WeakKeyDictionary[object, threading.Lock] = WeakKeyDictionary()

    def lock_of(self, thing: object) -> threading.Lock:
        with self._adding:
            return self._locks.setdefault(thing, threading.Lock())


_TURNS = _Turns()


@contextmanager
def turn_of(thing: object) -> Iterator[None]:
    """Hold while a thing is used, which other threads then wait for.

    Requests are prepared in several threads, by tokenizers and processors of transformers, which do
    not promise to be safe for that.
    """
    with _TURNS.lock_of(thing):
        yield


# Between two looks at whether another thread has left.
_PATIENCE_S = 0.001


class Ownership:
    """Refuses, in a sentence each, the uses that would corrupt an engine, a stage or a pipeline.

    ::

        built ──► claimed by one owner ──► released, or its owner is gone ──► claimed ──► ...
          └──────────────────────────────► closed: of no more use

    An owner is known by a weak reference: one that was dropped without a word owns nothing. What
    was built before a fork cannot be used in the child, which has none of the parent's threads, and
    its locks and the pools of OpenMP as they stood at that moment; a call there would hang.

    Args:
        thing: of which this is the ownership, for messages: ``"this LLMEngine"``.
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
        """Whether it is closed, or belongs to a process that this one is a fork of."""
        return self._is_closed or os.getpid() != self._pid

    @property
    def owner_name(self) -> str | None:
        """The owner, as it was named when it claimed this; None while there is none."""
        return None if self._owner is None or self._owner() is None else self._owner_name

    def check(self) -> None:
        """Refuse to go on with what is over."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{self._thing} was built in process {self._pid} and cannot be used in its fork "
                f"{os.getpid()}, which has none of its threads: build one in this process, or "
                "start processes with the method 'spawn'"
            )
        if self._is_closed:
            raise RuntimeError(f"{self._thing} is closed: build a new one")

    def claim(self, owner: object, name: str) -> None:
        """Make it someone's own, until :meth:`release`, or until they are gone.

        Args:
            name: what to call them in the message that a second one gets.

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
        """Give it back; what belongs to somebody else is left as it is."""
        if self._owner is not None and self._owner() is owner:
            self._owner = None

    def close(self) -> None:
        """Let every further use be refused. May be called again."""
        self._is_closed = True
        self._owner = None

    def enter(self, *, wait: bool = False) -> bool:
        """Have it to this thread alone, until :meth:`leave`.

        Args:
            wait: for a thread that has it now, instead of being refused.

        Returns:
            Whether this began it; False if this thread has it already, and leaves it later.

        Raises:
            RuntimeError: another thread has it.
        """
        thread = threading.get_ident()
        if self._inside.get("thread") == thread:
            return False
        # One call decides who of several is first.
        while self._inside.setdefault("thread", thread) != thread:
            if not wait:
                raise RuntimeError(
                    f"{self._thing} is in use by another thread: one thread drives an engine; "
                    "Omni takes requests from any number of threads"
                )
            time.sleep(_PATIENCE_S)
        return True

    @property
    def is_inside(self) -> bool:
        """Whether this thread has it to itself."""
        return self._inside.get("thread") == threading.get_ident()

    def leave(self) -> None:
        """Let other threads in; nothing happens if another has it."""
        if self._inside.get("thread") == threading.get_ident():
            self._inside.clear()

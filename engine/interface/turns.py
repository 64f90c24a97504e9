"""Takes turns at things that several threads have and that one at a time may use."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from engine.interface.forks import renew_in_forks

__all__ = ["turn_of"]


class _Turns:
    """A lock for each thing, as long as that is there."""

    def __init__(self) -> None:
        self.renew_locks()
        renew_in_forks(self)

    def renew_locks(self) -> None:
        """Begin with none; see :class:`~engine.interface.forks.Renewable`."""
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

    Args:
        thing: hashable; its turns end with it.
    """
    with _TURNS.lock_of(thing):
        yield

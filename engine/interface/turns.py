"""Takes turns at things that several threads have and that one at a time may use."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

__all__ = ["turn_of"]

_TURNS: WeakKeyDictionary[object, threading.Lock] = WeakKeyDictionary()
_NEW_TURN = threading.Lock()


@contextmanager
def turn_of(thing: object) -> Iterator[None]:
    """Hold while a thing is used, which other threads then wait for.

    Requests are prepared in several threads, by tokenizers and processors of transformers that
    nobody promises to be made for that.

    Args:
        thing: hashable; its turns end with it.
    """
    with _NEW_TURN:
        turn = _TURNS.setdefault(thing, threading.Lock())
    with turn:
        yield

"""Prepares requests for a stage in other threads than the one that steps."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

from engine import CodecPrompt, EmbedsPrompt, SpeechPrompt, TextPrompt, TokensPrompt

# Per lane. Work that holds Python's GIL gains nothing from more.
_NUM_THREADS = 2
_NAME = "omni-prepare"
_LIGHT_CHARS = 2**15
_LIGHT_BYTES = 2**22

OwnerT = TypeVar("OwnerT")
T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Piece(Generic[OwnerT, T]):
    """Work of an owner; ``number`` is its position in the order of submission."""

    number: int
    owner: OwnerT
    is_light: bool
    future: Future[T]


class Preparations(Generic[OwnerT, T]):
    """Work in progress, one piece per owner, in order of submission. ::

        submit ──► light lane ──┐
               └─► heavy lane ──┴─► done ──► take

    Two lanes of a few threads each, so that short work overtakes long work. All methods except
    ``close`` are for one thread.

    Args:
        on_done: called in another thread when a piece may be ready to be taken.
        max_wait_s: maximum time that finished pieces wait for light ones in progress.
    """

    def __init__(
        self, on_done: Callable[[], object] = lambda: None, max_wait_s: float = 0.1
    ) -> None:
        self._on_done = on_done
        self._max_wait_s = max_wait_s
        self._waits_until: float | None = None
        self._numbers = count()
        self._pieces: dict[OwnerT, _Piece[OwnerT, T]] = {}
        self._ended: deque[_Piece[OwnerT, T]] = deque()  # filled by the lanes
        # The finished pieces; a step checks only these, however many are in progress.
        self._done: list[_Piece[OwnerT, T]] = []
        self._num_light = 0  # in progress
        self._lanes: dict[bool, ThreadPoolExecutor] = {}

    def submit(self, owner: OwnerT, work: Callable[[], T], *, light: bool) -> None:
        """Run work in another thread; ``light`` means that its time is negligible."""
        if light not in self._lanes:
            self._lanes[light] = ThreadPoolExecutor(_NUM_THREADS, _NAME)
        future = self._lanes[light].submit(work)
        self._pieces[owner] = piece = _Piece(next(self._numbers), owner, light, future)
        self._num_light += light
        future.add_done_callback(lambda _: self._note_end(piece))

    def _note_end(self, piece: _Piece[OwnerT, T]) -> None:
        self._ended.append(piece)
        self._on_done()

    def drop(self, owner: OwnerT) -> None:
        """Forget the piece of an owner, without waiting if it is in progress."""
        if (piece := self._pieces.pop(owner, None)) is not None:
            piece.future.cancel()
            if piece in self._done:
                self._done.remove(piece)
            else:
                self._num_light -= piece.is_light

    def has_ready(self, *, is_idle: bool) -> bool:
        """Return True if :meth:`take` has pieces to start now.

        Args:
            is_idle: true if nothing runs; then finished pieces wait for the light ones in progress,
                so that they share batches from the beginning.
        """
        self._collect_done()
        if not self._done or not is_idle or not self._num_light:
            return bool(self._done)
        if self._waits_until is None:
            self._waits_until = time.monotonic() + self._max_wait_s
            timer = threading.Timer(self._max_wait_s, self._on_done)
            timer.daemon = True
            timer.start()
        return time.monotonic() >= self._waits_until

    def take(self) -> list[tuple[OwnerT, Future[T]]]:
        """Remove and return the finished pieces, in order of submission."""
        self._collect_done()
        taken = sorted(self._done, key=lambda each: each.number)
        self._done, self._waits_until = [], None
        for each in taken:
            del self._pieces[each.owner]
        return [(each.owner, each.future) for each in taken]

    def clear(self) -> None:
        """Forget all pieces, without waiting for those in progress."""
        for owner in list(self._pieces):
            self.drop(owner)

    def close(self) -> None:
        """Wait for the work in progress, and start nothing else. Idempotent."""
        # The garbage collector may call this in one of the lanes' own threads.
        is_own = threading.current_thread().name.startswith(_NAME)
        for lane in list(self._lanes.values()):
            lane.shutdown(wait=not is_own, cancel_futures=True)

    def _collect_done(self) -> None:
        while self._ended:
            piece = self._ended.popleft()
            if self._pieces.get(piece.owner) is piece:
                self._done.append(piece)
                self._num_light -= piece.is_light


def is_light(prompt: object) -> bool:
    """Return True if a prompt, which may be malformed, takes only milliseconds to prepare."""
    match prompt:
        case str():
            return len(prompt) <= _LIGHT_CHARS
        case TextPrompt(prompt=str(text)):
            return len(text) <= _LIGHT_CHARS and not prompt.multi_modal_data
        case TokensPrompt():
            return not prompt.multi_modal_data
        case EmbedsPrompt(prompt_embeds=rows):
            return getattr(rows, "nbytes", 0) <= _LIGHT_BYTES
        case SpeechPrompt() | CodecPrompt():
            return True
        case _:
            return False

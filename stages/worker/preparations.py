"""Prepares requests for a stage in threads beside the one that steps."""

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

# Of either lane. What holds Python's lock gains nothing from more.
_NUM_THREADS = 2
_NAME = "omni-prepare"
_LIGHT_CHARS = 2**15
_LIGHT_BYTES = 2**22

OwnerT = TypeVar("OwnerT")
T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Piece(Generic[OwnerT, T]):
    """Work of an owner, by its place in the order of submission."""

    number: int
    owner: OwnerT
    is_light: bool
    future: Future[T]


class Preparations(Generic[OwnerT, T]):
    """Work in progress, one piece for each owner, in the order in which it was submitted. ::

        submit ──► light lane ──┐
               └─► heavy lane ──┴─► done ──► take

    Two lanes, each of a few threads, so that what takes long is overtaken by what does not. All but
    ``close`` is for one thread.

    Args:
        on_done: called in another thread when something may be ready to be taken.
        patience_s: how long what is done waits for what else is light.
    """

    def __init__(
        self, on_done: Callable[[], object] = lambda: None, patience_s: float = 0.1
    ) -> None:
        self._on_done = on_done
        self._patience_s = patience_s
        self._waits_until: float | None = None
        self._numbers = count()
        self._pieces: dict[OwnerT, _Piece[OwnerT, T]] = {}
        self._ended: deque[_Piece[OwnerT, T]] = deque()  # put here by the lanes
        # Of the pieces, what is done; a step looks at no more, however many are in progress.
        self._done: list[_Piece[OwnerT, T]] = []
        self._num_light = 0  # in progress
        self._lanes: dict[bool, ThreadPoolExecutor] = {}

    def submit(self, owner: OwnerT, work: Callable[[], T], *, light: bool) -> None:
        """Have work done in another thread; light is what takes no time worth speaking of."""
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
        """Forget what belongs to an owner; what is in progress is not waited for."""
        if (piece := self._pieces.pop(owner, None)) is not None:
            piece.future.cancel()
            if piece in self._done:
                self._done.remove(piece)
            else:
                self._num_light -= piece.is_light

    def has_ready(self, *, is_idle: bool) -> bool:
        """Whether :meth:`take` has anything to begin now.

        Args:
            is_idle: nothing runs: what is done waits for the light ones in progress, so that they
                share batches from the beginning.
        """
        self._look_for_done()
        if not self._done or not is_idle or not self._num_light:
            return bool(self._done)
        if self._waits_until is None:
            self._waits_until = time.monotonic() + self._patience_s
            timer = threading.Timer(self._patience_s, self._on_done)
            timer.daemon = True
            timer.start()
        return time.monotonic() >= self._waits_until

    def take(self) -> list[tuple[OwnerT, Future[T]]]:
        """Take those that are done, in the order in which they were submitted."""
        self._look_for_done()
        taken = sorted(self._done, key=lambda each: each.number)
        self._done, self._waits_until = [], None
        for each in taken:
            del self._pieces[each.owner]
        return [(each.owner, each.future) for each in taken]

    def clear(self) -> None:
        """Forget all; what is in progress is not waited for."""
        for owner in list(self._pieces):
            self.drop(owner)

    def close(self) -> None:
        """Wait for what is in progress, and begin nothing else. May be called again."""
        # The garbage collector may have brought one of its threads here.
        is_own = threading.current_thread().name.startswith(_NAME)
        for lane in list(self._lanes.values()):
            lane.shutdown(wait=not is_own, cancel_futures=True)

    def _look_for_done(self) -> None:
        while self._ended:
            piece = self._ended.popleft()
            if self._pieces.get(piece.owner) is piece:
                self._done.append(piece)
                self._num_light -= piece.is_light


def is_light(prompt: object) -> bool:
    """Whether a prompt, whatever a user may have put into it, is prepared in milliseconds."""
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

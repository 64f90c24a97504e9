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


@dataclass(slots=True)
class _Group:
    """What begins together: until when its others wait, and for how many."""

    deadline: float = 0.0
    num_left: int = 0


@dataclass(eq=False, slots=True)
class _Piece(Generic[OwnerT, T]):
    """Work of an owner, by its place in the order of submission."""

    number: int
    owner: OwnerT
    group: object | None
    future: Future[T]


class Preparations(Generic[OwnerT, T]):
    """Work in progress, one piece for each owner, in the order in which it was submitted. ::

        submit ──► light lane ──┐
               └─► heavy lane ──┴─► done ──► (its group) ──► take

    Two lanes, each of a few threads, so that what takes long is overtaken by what does not. What
    belongs to a group is taken when all of the group is done, so that it shares batches from the
    beginning; but its others wait for a slow one no longer than ``patience_s``.

    All but ``close`` is for one thread.

    Args:
        on_done: called in another thread when something may be ready to be taken.
        patience_s: see above.
    """

    def __init__(
        self, on_done: Callable[[], object] | None = None, patience_s: float = 0.1
    ) -> None:
        self._on_done = on_done
        self._patience_s = patience_s
        self._numbers = count()
        self._pieces: dict[OwnerT, _Piece[OwnerT, T]] = {}
        self._ended: deque[_Piece[OwnerT, T]] = deque()  # put here by the lanes
        # Of the pieces, what is done; a step looks at no more, however many are in progress.
        self._done: list[_Piece[OwnerT, T]] = []
        self._groups: dict[object, _Group] = {}
        self._lanes: dict[bool, ThreadPoolExecutor] = {}

    def submit(
        self, owner: OwnerT, work: Callable[[], T], *, group: object | None = None, light: bool
    ) -> None:
        """Have work done in another thread.

        Args:
            group: what it begins together with; None for nothing.
            light: whether it is known to take no time worth speaking of.
        """
        if group is not None:
            mates = self._groups.setdefault(group, _Group())
            mates.deadline = time.monotonic() + self._patience_s
            mates.num_left += 1
        if light not in self._lanes:
            self._lanes[light] = ThreadPoolExecutor(_NUM_THREADS, _NAME)
        future = self._lanes[light].submit(work)
        self._pieces[owner] = piece = _Piece(next(self._numbers), owner, group, future)
        future.add_done_callback(lambda _: self._note_end(piece))

    def _note_end(self, piece: _Piece[OwnerT, T]) -> None:
        self._ended.append(piece)
        if self._on_done is not None:
            self._on_done()

    def drop(self, owner: OwnerT) -> None:
        """Forget what belongs to an owner; what is in progress is not waited for."""
        if (piece := self._pieces.pop(owner, None)) is not None:
            piece.future.cancel()
            if piece in self._done:
                self._done.remove(piece)
            else:
                self._leave_group(piece)

    @property
    def has_ready(self) -> bool:
        """Whether :meth:`take` would give anything now."""
        if not self._ended and not self._done:
            return False
        return any([self._is_ready(each) for each in self._all_done()])

    @property
    def time_to_ready(self) -> float | None:
        """Seconds after which something that is done is ready; None if that is not known."""
        if not self._done and not self._ended:
            return None
        groups = [self._groups[e.group] for e in self._all_done() if e.group in self._groups]
        times = [group.deadline - time.monotonic() for group in groups]
        return max(0.0, min(times)) if times else None

    def take(self) -> list[tuple[OwnerT, Future[T]]]:
        """Take those that are ready, in the order in which they were submitted."""
        if not self._ended and not self._done:
            return []
        ready = [each for each in self._all_done() if self._is_ready(each)]
        for each in ready:
            self._done.remove(each)
            del self._pieces[each.owner]
        ready.sort(key=lambda each: each.number)
        return [(each.owner, each.future) for each in ready]

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

    def _all_done(self) -> list[_Piece[OwnerT, T]]:
        while self._ended:
            piece = self._ended.popleft()
            if self._pieces.get(piece.owner) is piece:
                self._done.append(piece)
                self._leave_group(piece)
        return self._done

    def _leave_group(self, piece: _Piece[OwnerT, T]) -> None:
        if (group := self._groups.get(piece.group)) is not None:
            group.num_left -= 1
            if not group.num_left:
                del self._groups[piece.group]

    def _is_ready(self, piece: _Piece[OwnerT, T]) -> bool:
        group = self._groups.get(piece.group)
        return group is None or time.monotonic() >= group.deadline


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

"""Prepares requests for a stage in threads beside the one that steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

from engine import CodecPrompt, EmbedsPrompt, SpeechPrompt, TextPrompt, TokensPrompt

__all__ = ["Preparations", "is_light"]

# Of either lane. What holds Python's lock gains nothing from more.
_NUM_THREADS = 2
_LIGHT_CHARS = 2**15
_LIGHT_BYTES = 2**22

OwnerT = TypeVar("OwnerT")
T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Work(Generic[OwnerT, T]):
    """Work of an owner.

    Attributes:
        owner: whose it is.
        group: what it begins together with; None for nothing.
        number: its place in the order in which all were handed in.
        future: its result, or what it raised.
    """

    owner: OwnerT
    group: object | None
    number: int
    future: Future[T]


@dataclass(slots=True)
class _Group:
    """What is to begin together, if it is ready at about the same time.

    Attributes:
        deadline: when those that are ready wait no longer, by ``time.monotonic``.
        num_left: how many are not ready.
    """

    deadline: float
    num_left: int = 0


class Preparations(Generic[OwnerT, T]):
    """Work in progress, one piece for each owner, in the order in which it was handed in. ::

        submit ──► light lane ──┐
               └─► heavy lane ──┴─► done ──► (its group) ──► take

    Two lanes, each of a few threads, so that what takes long is overtaken by what does not. What
    belongs to a group is taken when all of the group is done, so that it shares batches from the
    beginning; but its others wait for a slow one no longer than ``patience_s``.

    ``submit``, ``take``, ``drop`` and the properties are for one thread.

    Args:
        on_done: called in another thread when something may be ready to be taken.
        patience_s: see above.
    """

    def __init__(
        self, on_done: Callable[[], object] | None = None, patience_s: float = 0.1
    ) -> None:
        self._on_done = on_done
        self._patience_s = patience_s
        self._waiting: dict[OwnerT, _Work[OwnerT, T]] = {}
        # Of these, what is done; a step looks at no more, however many are in progress.
        self._done: list[_Work[OwnerT, T]] = []
        self._numbers = count()
        self._groups: dict[object, _Group] = {}
        self._lanes: dict[bool, ThreadPoolExecutor] = {}
        self._lock = threading.Lock()
        self._here = threading.local()

    def submit(
        self, owner: OwnerT, work: Callable[[], T], *, group: object | None = None, light: bool
    ) -> None:
        """Hand in work.

        Args:
            owner: whose it is.
            work: done in another thread.
            group: what it begins together with; None for nothing.
            light: whether it is known to take no time worth speaking of.
        """
        piece = _Work(owner, group, next(self._numbers), Future[T]())
        with self._lock:
            self._waiting[owner] = piece
            if group is not None:
                mates = self._groups.setdefault(group, _Group(0.0))
                mates.deadline = time.monotonic() + self._patience_s
                mates.num_left += 1
        self._lane(light).submit(self._run, piece, work)

    def drop(self, owner: OwnerT) -> None:
        """Forget what belongs to an owner; what is in progress is not waited for."""
        with self._lock:
            piece = self._waiting.pop(owner, None)
            if piece in self._done:
                self._done.remove(piece)
            elif piece is not None:
                self._leave_group(piece)

    @property
    def has_ready(self) -> bool:
        """Whether :meth:`take` would give anything now."""
        with self._lock:
            now = time.monotonic()
            return bool(self._done) and any([self._is_ready(each, now) for each in self._done])

    @property
    def time_to_ready(self) -> float | None:
        """Seconds after which something that is done is ready; None if that is not known."""
        with self._lock:
            now = time.monotonic()
            left = [
                max(0.0, self._groups[each.group].deadline - now)
                for each in self._done
                if each.group in self._groups
            ]
            return min(left, default=None)

    def take(self) -> list[tuple[OwnerT, Future[T]]]:
        """Take those that are ready, in the order in which they were handed in."""
        with self._lock:
            now = time.monotonic()
            ready = [each for each in self._done if self._is_ready(each, now)]
            if ready:
                self._done = [each for each in self._done if not self._is_ready(each, now)]
            for each in ready:
                del self._waiting[each.owner]
        ready.sort(key=lambda each: each.number)
        return [(each.owner, each.future) for each in ready]

    def clear(self) -> None:
        """Forget all; what is in progress is not waited for."""
        with self._lock:
            self._waiting.clear()
            self._done.clear()
            self._groups.clear()

    def close(self) -> None:
        """Forget all, and wait for what is in progress. May be called again, from any thread."""
        self.clear()
        with self._lock:
            lanes, self._lanes = list(self._lanes.values()), {}
        for lane in lanes:
            # The garbage collector may have brought one of its threads here.
            is_own = getattr(self._here, "is_lane", False)
            lane.shutdown(wait=not is_own, cancel_futures=True)

    def _lane(self, light: bool) -> ThreadPoolExecutor:
        if light not in self._lanes:
            self._lanes[light] = ThreadPoolExecutor(
                _NUM_THREADS, "omni-prepare", initializer=self._note_lane
            )
        return self._lanes[light]

    def _note_lane(self) -> None:
        self._here.is_lane = True

    def _run(self, piece: _Work[OwnerT, T], work: Callable[[], T]) -> None:
        if self._waiting.get(piece.owner) is not piece:
            return
        try:
            piece.future.set_result(work())
        except BaseException as error:  # what ends a thread as well, lest its owner waits for ever
            piece.future.set_exception(error)
        with self._lock:
            if self._waiting.get(piece.owner) is piece:
                self._done.append(piece)
                self._leave_group(piece)
        if self._on_done is not None:
            self._on_done()

    def _leave_group(self, piece: _Work[OwnerT, T]) -> None:
        group = self._groups.get(piece.group)
        if group is not None:
            group.num_left -= 1
            if group.num_left == 0:
                del self._groups[piece.group]

    def _is_ready(self, piece: _Work[OwnerT, T], now: float) -> bool:
        group = self._groups.get(piece.group)
        return group is None or now >= group.deadline


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

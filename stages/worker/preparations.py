"""Makes requests ready for a stage in threads beside the one that steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any, Generic, TypeVar

from engine import CodecPrompt, EmbedsPrompt, SpeechPrompt, TextPrompt, TokensPrompt
from engine.interface.placed_error import described

__all__ = ["Preparation", "Preparations", "is_light"]

# Of either lane. What holds Python's lock gains nothing from more.
_NUM_THREADS = 2
_LIGHT_CHARS = 2**15
_LIGHT_BYTES = 2**22

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Preparation(Generic[T]):
    """Something that is made ready.

    Attributes:
        owner: whose it is.
        work: makes it, in another thread.
        group: what it begins together with; None for nothing.
        number: its place in the order in which all were handed in.
        is_done: whether it was made, or failed.
        made: what the work gave.
        error: what it raised.
    """

    owner: T
    work: Callable[[], Any]
    group: object | None = None
    number: int = 0
    is_done: bool = False
    made: Any = None
    error: Exception | None = None

    def run(self) -> None:
        """Do the work."""
        try:
            self.made = self.work()
        except Exception as error:  # told to whom it belongs
            self.error = error
        except BaseException as error:  # not to end this thread, lest its owner waits for ever
            self.error = ValueError(f"its preparation was ended by {described(error)}")


@dataclass(slots=True)
class _Group:
    """What is to begin together, if it is ready at about the same time.

    Attributes:
        deadline: when those that are ready wait no longer, by ``time.monotonic``.
        num_left: how many are not ready.
    """

    deadline: float
    num_left: int = 0


class Preparations(Generic[T]):
    """Work on its way, in the order in which it was handed in. ::

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
        self._waiting: dict[T, list[Preparation[T]]] = {}
        # Of these, what is done; a step looks at no more, however many are on their way.
        self._done: list[Preparation[T]] = []
        self._numbers = count()
        self._groups: dict[object, _Group] = {}
        self._lanes: dict[bool, ThreadPoolExecutor] = {}
        self._changed = threading.Condition()
        self._here = threading.local()

    def __bool__(self) -> bool:
        """Whether anything is on its way or ready."""
        return bool(self._waiting)

    def submit(self, preparation: Preparation[T], *, light: bool) -> None:
        """Hand in work.

        Args:
            preparation: what is to be made.
            light: whether it is known to take no time worth speaking of.
        """
        with self._changed:
            preparation.number = next(self._numbers)
            self._waiting.setdefault(preparation.owner, []).append(preparation)
            if preparation.group is not None:
                group = self._groups.setdefault(preparation.group, _Group(0.0))
                group.deadline = time.monotonic() + self._patience_s
                group.num_left += 1
        self._lane(light).submit(self._run, preparation)

    def drop(self, owner: T) -> None:
        """Forget what belongs to an owner; what is being made is not waited for."""
        with self._changed:
            for preparation in self._waiting.pop(owner, ()):
                if preparation.is_done:
                    self._done.remove(preparation)
                else:
                    self._leave_group(preparation)

    @property
    def has_ready(self) -> bool:
        """Whether :meth:`take` would give anything now."""
        with self._changed:
            now = time.monotonic()
            return any(self._is_ready(each, now) for each in self._done)

    @property
    def time_to_ready(self) -> float | None:
        """Seconds after which something that is done is ready; None if that is not known."""
        with self._changed:
            now = time.monotonic()
            left = [
                max(0.0, self._groups[each.group].deadline - now)
                for each in self._done
                if each.group in self._groups
            ]
            return min(left, default=None)

    def take(self) -> list[Preparation[T]]:
        """Those that are ready, in the order in which they were handed in."""
        with self._changed:
            now = time.monotonic()
            ready = [each for each in self._done if self._is_ready(each, now)]
            if ready:
                self._done = [each for each in self._done if not self._is_ready(each, now)]
            for each in ready:
                self._waiting[each.owner].remove(each)
                if not self._waiting[each.owner]:
                    del self._waiting[each.owner]
        return sorted(ready, key=lambda each: each.number)

    def wait(self) -> None:
        """Wait until something is ready; at once if nothing is on its way."""
        with self._changed:
            while self._waiting and not self.has_ready:
                self._changed.wait(self.time_to_ready)

    def clear(self) -> None:
        """Forget all; what is being made is not waited for."""
        with self._changed:
            self._waiting.clear()
            self._done.clear()
            self._groups.clear()

    def close(self) -> None:
        """Forget all, and wait for what is being made. May be called again, from any thread."""
        self.clear()
        with self._changed:
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

    def _run(self, preparation: Preparation[T]) -> None:
        if preparation not in self._waiting.get(preparation.owner, ()):
            return
        preparation.run()
        with self._changed:
            preparation.is_done = True
            if preparation in self._waiting.get(preparation.owner, ()):
                self._done.append(preparation)
                self._leave_group(preparation)
            self._changed.notify_all()
        if self._on_done is not None:
            self._on_done()

    def _leave_group(self, preparation: Preparation[T]) -> None:
        group = self._groups.get(preparation.group)
        if group is not None:
            group.num_left -= 1
            if group.num_left == 0:
                del self._groups[preparation.group]

    def _is_ready(self, preparation: Preparation[T], now: float) -> bool:
        group = self._groups.get(preparation.group)
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

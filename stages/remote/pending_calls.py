"""What a worker was asked and has not answered yet."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from itertools import count
from typing import Any

from engine.interface.placed_error import PlacedError
from stages.remote.control import Returned

__all__ = ["PendingCalls", "WorkerEndedError"]


class WorkerEndedError(RuntimeError):
    """The worker that was asked has ended, or is being started again."""


class PendingCalls:
    """Answers to come, by the number of the call. Safe to use from any thread.

    Args:
        called: what the worker is one of, for messages.
    """

    def __init__(self, called: str) -> None:
        self._called = called
        self._numbers = count()
        self._answers: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()

    def add(self) -> tuple[int, Future[Any]]:
        """The number of a new call, and what gets its answer."""
        answer: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._answers[number] = answer
        return number, answer

    def resolve(self, returned: Returned) -> None:
        """Take an answer in; one whose caller has given up is ignored."""
        with self._lock:
            answer = self._answers.pop(returned.number, None)
        if answer is None:
            return
        if returned.error is None:
            answer.set_result(returned.value)
        elif returned.error_type == "ValueError":
            place = returned.error_place
            answer.set_exception(
                PlacedError(place, returned.error) if place else ValueError(returned.error)
            )
        else:
            told = f"{self._called}: {returned.error_type}: {returned.error}"
            answer.set_exception(RuntimeError(told))

    def fail(self, reason: str, number: int | None = None) -> None:
        """The worker answers no more: one call, or all that there are.

        Args:
            reason: why, in words that go on after what it is called.
            number: of the call; None for all.
        """
        with self._lock:
            gone = list(self._answers) if number is None else [number]
            answers = [self._answers.pop(each) for each in gone if each in self._answers]
        for answer in answers:
            answer.set_exception(WorkerEndedError(f"{self._called}: {reason}"))

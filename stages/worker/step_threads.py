"""How many CPU threads a stage's steps take."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Self, TypeVar

from engine.interface.forks import renew_in_forks
from stages.stage import Stage
from stages.stage_config import StageConfig

__all__ = ["StepThreads"]

_T = TypeVar("_T")


class StepThreads:
    """Has what runs within take so many threads, as stages that share a process each want. ::

        writer (threads: 1)   ──■──────■──────■──      one thread
        reader (none given)   ────■──────■──────■      as many as PyTorch takes in this process

    In a thread of the pipeline's own a number stays until a stage with another one steps. A thread
    that belongs to the caller has its own number again after each step.

    Args:
        count: of threads; None takes as many as the thread had that made the pipeline's own.
    """

    def __init__(self, count: int | None) -> None:
        self._count = count
        self._of_process: int | None = None
        self._before: int | None = None

    @classmethod
    def of(cls, stage: Stage) -> Self:
        """As the placement says that a stage was built of."""
        built_of = stage.built_of
        return cls(built_of.placement.threads if isinstance(built_of, StageConfig) else None)

    def own_thread(self) -> None:
        """The pipeline steps in a thread of its own from now on, which does nothing else."""
        import torch  # not where stages run elsewhere

        self._of_process = torch.get_num_threads()

    def __enter__(self) -> None:
        """Take as many."""
        wanted = self._count if self._count is not None else self._of_process
        if wanted is None:
            return
        import torch

        before = torch.get_num_threads()
        if before == wanted:
            return
        if self._of_process is None:
            torch.set_num_threads(wanted)
            self._before = before
        else:
            _number.take(wanted)

    def __exit__(self, *error: object) -> None:
        """Give a caller's thread its own number again."""
        if self._before is not None:
            import torch

            torch.set_num_threads(self._before)
            self._before = None


class _Number:
    """The number of threads that PyTorch takes: of each thread that asks for operations its own.

    PyTorch gives a thread that is new to it the number that any thread has set last. So what is set
    for one thread is taken back for those to come, by a thread of which nothing else is wanted.
    """

    def __init__(self) -> None:
        self.renew_locks()
        renew_in_forks(self)

    def renew_locks(self) -> None:
        """See :class:`~engine.interface.forks.Renewable`."""
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        """Have operations of this thread take so many; those of others go on as they were.

        It takes a millisecond. A thread that meets PyTorch for the first time within it gets the
        same number.
        """
        import torch

        with self._lock:
            others = _in_new_thread(torch.get_num_threads)
            torch.set_num_threads(count)
            _in_new_thread(partial(torch.set_num_threads, others))


def _in_new_thread(work: Callable[[], _T]) -> _T:
    done: list[_T] = []
    thread = threading.Thread(target=lambda: done.append(work()), name="omni-threads")
    thread.start()
    thread.join()
    return done[0]


_number = _Number()

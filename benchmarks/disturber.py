"""Injection of faults into the workers of a pipeline while requests run."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

from benchmarks.faulty_stages import throw
from omni import Omni
from stages.remote.remote_stage import RemoteStage

EXCEPTION, RUIN = "exception", "ruin"
"""Faults other than signals: a step raises; a step raises, and the stage is broken afterwards."""

_CHECK_EVERY = 5


@dataclass
class Outcome:
    """Results of the requests.

    Attributes:
        kinds: number of requests that were equal, failed, or differed.
        errors: number of failed requests by error.
        faults: number of injected faults by kind.
        lost: errors of workers whose integrity check failed.
        num_checks: number of integrity checks that passed.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    num_checks: int = 0

    @property
    def num_ended(self) -> int:
        """Number of requests that ended."""
        return sum(self.kinds.values())


class Disturber:
    """Injects faults into workers, spread evenly over the run of the requests.

    Args:
        omni: runs the requests.
        faults: names of signals, :data:`EXCEPTION` or :data:`RUIN`, in the order of injection.
        num_requests: number of requests.
        seen: reports the number of ended requests, and counts the faults.
        seed: seed of the choice of workers and times.
    """

    def __init__(
        self, omni: Omni, faults: Sequence[str], num_requests: int, seen: Outcome, seed: int
    ) -> None:
        self._omni, self._seen, self._faults = omni, seen, faults
        self._num_requests = num_requests
        self._rng = random.Random(seed)
        self._changed = threading.Condition()
        self._num_sent, self._is_done = 0, False
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="disturber", daemon=True)

    def __enter__(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Wait for the last faults, unless the requests raised."""
        if kind is None:
            self.keep_pace()
        self._is_over.set()
        self._thread.join()

    def keep_pace(self) -> None:
        """Wait until all due faults are injected: callers start no more requests before that."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_done or self._num_sent >= self._num_due())

    def _num_due(self) -> int:
        """Return the number of due faults: one at once, the last while requests are left."""
        count = len(self._faults)
        return min(count, 1 + self._seen.num_ended * (count + 1) // self._num_requests)

    def _run(self) -> None:
        try:
            self._send_all()
        finally:  # on any error, release the waiting callers
            with self._changed:
                self._is_done = True
                self._changed.notify_all()

    def _send_all(self) -> None:
        for number, fault in enumerate(self._faults):
            while self._num_due() <= number:
                if self._is_over.wait(0.01):
                    return
            self._is_over.wait(self._rng.uniform(0, 0.1))
            if number % _CHECK_EVERY == 0:
                check(self._omni, self._seen)
            self._disturb(fault)
            with self._changed:
                self._num_sent += 1
                self._changed.notify_all()

    def _disturb(self, fault: str) -> None:
        while not self._is_over.is_set():
            stage = self._omni.pipeline.stages[self._rng.choice(self._omni.pipeline.order)]
            assert isinstance(stage, RemoteStage)
            worker = self._rng.choice(stage.workers)
            pid = worker.pid
            # A worker that is stopped while starting is only declared dead after half a minute.
            if pid is not None and (worker.is_up or fault != "SIGSTOP"):
                with suppress(ProcessLookupError):  # it has just ended, or is still starting
                    if fault in (EXCEPTION, RUIN):
                        throw(pid, ruins=fault == RUIN)
                    else:
                        os.kill(pid, signal.Signals[fault])
                    self._seen.faults[fault] += 1
                    return
            self._is_over.wait(0.01)


def check(omni: Omni, seen: Outcome) -> None:
    """Check the integrity of all running workers."""
    for stage in omni.pipeline.stages.values():
        try:
            stage.check_integrity()
            seen.num_checks += 1
        except RuntimeError as error:
            # A worker that ends meanwhile is no failure.
            if "its worker" not in str(error):
                seen.lost.append(str(error))

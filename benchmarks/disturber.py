"""Faults that come over the workers of a pipeline while requests run."""

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
"""No signals: a step raises; a step raises, and the stage is of no use from then on."""

_CHECK_EVERY = 5


@dataclass
class Outcome:
    """What came of the requests.

    Attributes:
        kinds: how many were equal, failed, or differed.
        errors: of those that failed, how often each was told.
        faults: how often each was sent.
        lost: what workers said that have lost something.
        num_checks: how often they found that they had not.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    num_checks: int = 0

    @property
    def num_ended(self) -> int:
        """Requests that came to an end."""
        return sum(self.kinds.values())


class Disturber:
    """Does things to workers while requests run, spread evenly over them.

    Args:
        omni: runs them.
        faults: names of signals, :data:`EXCEPTION` or :data:`RUIN`, in that order.
        num_requests: how many there are.
        seen: says how many have ended, and is told what is done.
        seed: of what happens to whom, and when.
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
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Wait for the last faults, unless the requests did not come through."""
        if kind is None:
            self.keep_pace()
        self._is_over.set()
        self._thread.join()

    def keep_pace(self) -> None:
        """Wait until all faults have come that are due: nobody begins more requests before."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_done or self._num_sent >= self._num_due())

    def _num_due(self) -> int:
        """The first one comes at once, the last one while there are requests left."""
        count = len(self._faults)
        return min(count, 1 + self._seen.num_ended * (count + 1) // self._num_requests)

    def _run(self) -> None:
        try:
            self._send_all()
        finally:  # whatever it fails of, nobody waits for more
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
            # One that stands still before its first word is waited for half a minute.
            if pid is not None and (worker.is_up or fault != "SIGSTOP"):
                with suppress(ProcessLookupError):  # it has just ended, or has not begun yet
                    if fault in (EXCEPTION, RUIN):
                        throw(pid, ruins=fault == RUIN)
                    else:
                        os.kill(pid, signal.Signals[fault])
                    self._seen.faults[fault] += 1
                    return
            self._is_over.wait(0.01)


def check(omni: Omni, seen: Outcome) -> None:
    """Let the workers that are up look whether they have lost anything."""
    for stage in omni.pipeline.stages.values():
        try:
            stage.check_integrity()
            seen.num_checks += 1
        except RuntimeError as error:
            # One that ends meanwhile has nothing to lose.
            if "its worker" not in str(error):
                seen.lost.append(str(error))

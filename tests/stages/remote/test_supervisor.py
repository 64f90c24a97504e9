"""Commands reach the worker that was heard of last, and no other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from stages.remote import supervisor
from stages.remote.control import Built, Idle, Orders, StageFacts, WorkerSpec
from stages.remote.supervisor import Connection, WorkerGone, WorkerSupervisor
from stages.worker.messages import Abort
from tests.support.patience import wait_for
from tests.support.remote_stages import one_stage

BUILT = Built({"a": StageFacts(None, None, None, None, False, False, None, True, True, (), {})})

FOR_THE_NEXT = Orders("a", (Abort("for the next one"),))


class Noted(Connection):
    """A worker that does nothing, and may be made to say anything."""

    def __init__(self, say: Callable[[Any], None], end: Callable[[str], None]) -> None:
        self.say, self.end = say, end
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def kill(self, reason: str) -> None:
        self.end(reason)

    def close(self, grace_s: float) -> None:
        pass


class Lives:
    """A worker's life, and its connections."""

    def __init__(self) -> None:
        self.connections: list[Noted] = []
        self.life = WorkerSupervisor(one_stage("a"), self._connect, 60.0)
        self.life.start()
        self.connections[0].say(BUILT)
        self.port = self.life.ports["a"]

    def _connect(
        self, spec: WorkerSpec, say: Callable[[Any], None], end: Callable[[str], None]
    ) -> Connection:
        self.connections.append(Noted(say, end))
        return self.connections[-1]

    def replace(self) -> None:
        """Let the worker end, and the next one be up."""
        known = len(self.connections)
        self.connections[-1].end("was killed by a test")
        wait_for(lambda: len(self.connections) > known)
        self.connections[-1].say(BUILT)
        assert self.life.is_up


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lives]:
    monkeypatch.setattr(supervisor, "_FIRST_DELAY_S", 0.0)
    lives = Lives()
    yield lives
    lives.life.close()


def test_what_is_sent_before_the_next_worker_is_heard_of_reaches_neither(lives: Lives) -> None:
    lives.replace()
    with pytest.raises(WorkerGone):
        lives.port.send((Abort("for the first one"),))
    lives.port.messages()
    lives.port.send((Abort("for the next one"),))
    assert [each.sent for each in lives.connections] == [[], [FOR_THE_NEXT]]


def test_the_last_word_of_a_worker_may_come_late(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is heard, its worker ends and the next one speaks, and only then it is noted."""

    def overtaken() -> float:
        monkeypatch.setattr(supervisor, "time", time)
        lives.replace()
        return time.monotonic()

    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=overtaken))
    lives.connections[0].say(Idle(1))
    assert [type(each).__name__ for each in lives.port.messages()] == ["Ended", "Built", "Idle"]
    lives.port.send((Abort("for the next one"),))
    assert [each.sent for each in lives.connections] == [[], [FOR_THE_NEXT]]

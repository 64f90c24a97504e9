"""Commands reach only the worker whose messages were received last."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from stages.remote import supervisor
from stages.remote.messages import Built, Commands, Idle, StageFacts, WorkerSpec
from stages.remote.remote_stage import RemoteLink
from stages.remote.supervisor import Connection, WorkerSupervisor
from stages.worker.messages import Abort
from tests.support.patience import wait_for
from tests.support.remote_stages import one_stage

BUILT = Built({"a": StageFacts(None, None, None, None, False, False, None, True, True, {})})

FOR_THE_NEXT = Commands("a", (Abort("for the next one"),))


class Noted(Connection):
    """A worker that does nothing and sends what the test makes it send."""

    def __init__(self, say: Callable[[Any], None], end: Callable[[str], None]) -> None:
        self.say, self.end = say, end
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def kill(self, reason: str) -> None:
        self.end(reason)

    def close(self, grace_s: float) -> None:
        pass


class Supervised:
    """A worker's supervisor and its connections."""

    def __init__(self) -> None:
        self.connections: list[Noted] = []
        self.supervisor = WorkerSupervisor(one_stage("a"), self._connect, 60.0)
        self.supervisor.start()
        self.connections[0].say(BUILT)
        self.link = RemoteLink("a", [self.supervisor], (), 1)

    def send(self, request_id: str) -> None:
        """Send a command through the stage's link."""
        self.link._dispatch(0, (Abort(request_id),))

    def _connect(
        self, spec: WorkerSpec, say: Callable[[Any], None], end: Callable[[str], None]
    ) -> Connection:
        self.connections.append(Noted(say, end))
        return self.connections[-1]

    def replace(self) -> None:
        """End the worker and start the next one."""
        known = len(self.connections)
        self.connections[-1].end("was killed by a test")
        wait_for(lambda: len(self.connections) > known)
        self.connections[-1].say(BUILT)
        assert self.supervisor.is_up


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervised]:
    monkeypatch.setattr(supervisor, "_FIRST_DELAY_S", 0.0)
    workers = Supervised()
    yield workers
    workers.supervisor.close()


def test_commands_before_the_next_workers_first_message_reach_neither_worker(
    workers: Supervised,
) -> None:
    workers.replace()
    workers.send("for the first one")
    assert [each.sent for each in workers.connections] == [[], []]
    workers.link.events()
    workers.send("for the next one")
    assert [each.sent for each in workers.connections] == [[], [FOR_THE_NEXT]]


def test_the_last_message_of_a_worker_may_be_late(
    workers: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message is received, its worker ends, the next one reports; then the message is handled."""

    def overtaken() -> float:
        monkeypatch.setattr(supervisor, "time", time)
        workers.replace()
        return time.monotonic()

    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=overtaken))
    workers.connections[0].say(Idle(1))
    received = [type(each).__name__ for _, each in workers.supervisor.inboxes["a"]]
    assert received == ["WorkerState", "Built", "Idle"]
    workers.link.events()
    workers.send("for the next one")
    assert [each.sent for each in workers.connections] == [[], [FOR_THE_NEXT]]

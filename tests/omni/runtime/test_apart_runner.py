"""What one message of a pipeline apart tells, in order, and nobody who no longer waits."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from omni.requests.request import OmniOutput, OmniRequest
from omni.runtime.apart.apart_messages import Discard, ShownOutput
from omni.runtime.apart.apart_runner import ApartRunner
from omni.runtime.apart.shown_outputs import ShownRequest, packed
from omni.runtime.runner import Sink, Ticket
from stages.remote.worker_life import Ended, WorkerLife


class Life:
    """Of a process that says what it is told to."""

    def __init__(self) -> None:
        self.spec = SimpleNamespace(called="pipeline 'made'")
        self.state = SimpleNamespace(state="up", last_end="")
        self.sent: list[object] = []
        self.is_over = False
        self._news: list[object] = []
        self._on_news: Callable[[], None] = lambda: None

    def says(self, *messages: object) -> None:
        self._news += messages
        self._on_news()

    def tell_news(self, on_news: Callable[[], None]) -> None:
        self._on_news = on_news

    def news(self) -> list[object]:
        news, self._news = self._news, []
        return news

    def send(self, message: object) -> None:
        self.sent.append(message)

    def note_success(self) -> None: ...

    def check_alive(self) -> None: ...

    def close(self) -> None: ...


class Rig:
    """Requests ``a``, ``b`` and so on, in this order, and what their sinks were told."""

    def __init__(self) -> None:
        self.life = Life()
        self.runner = ApartRunner(cast(WorkerLife, self.life))
        self.told: list[tuple[str, bool, str | None]] = []
        self.tickets: dict[str, Ticket] = {}

    def submit(self, name: str, then: Callable[[OmniOutput], None] = lambda output: None) -> None:
        def take(output: OmniOutput | BaseException) -> None:
            assert isinstance(output, OmniOutput)
            self.told.append((name, output.finished, output.error))
            then(output)

        sink: Sink = take
        self.tickets[name] = self.runner.submit(OmniRequest(name), name, sink)

    def says(self, *outputs: tuple[str, bool]) -> None:
        """One message of outputs: of which request, and whether that is its last."""
        names = list(self.tickets)
        shown = [ShownOutput(names.index(name), {}, is_last) for name, is_last in outputs]
        self.life.says(packed([(each, ()) for each in shown]))


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_all_outputs_are_put_together_before_the_first_is_told(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_whole = 0
    whole = ShownRequest.whole

    def counting(request: Any, short: Any) -> OmniOutput:
        nonlocal num_whole
        num_whole += 1
        return whole(request, short)

    monkeypatch.setattr(ShownRequest, "whole", counting)
    seen: list[int] = []
    for name in "abc":
        rig.submit(name, lambda _: seen.append(num_whole))
    rig.says(("a", False), ("b", False), ("c", True))
    assert seen == [3, 3, 3]


def test_a_sink_that_raises_is_told_nothing_more(rig: Rig) -> None:
    def closed(output: OmniOutput) -> None:
        raise RuntimeError("the event loop is closed")

    rig.submit("a", closed)
    rig.submit("b")
    rig.says(("a", False), ("a", False), ("a", True), ("b", True))
    assert rig.told == [("a", False, None), ("b", True, None)]
    assert Discard((0,)) in rig.life.sent


def test_what_a_sink_gives_up_is_told_nothing_more(rig: Rig) -> None:
    rig.submit("a", lambda _: rig.runner.discard([rig.tickets["b"]]))
    rig.submit("b")
    rig.says(("a", False), ("b", False), ("b", True))
    assert rig.told == [("a", False, None)]


def test_nothing_follows_the_last_output_where_a_sink_ends_all(rig: Rig) -> None:
    rig.submit("a", lambda output: None if output.finished else rig.runner.stop())
    rig.submit("b")
    rig.says(("a", False), ("b", False))
    assert [(name, is_last) for name, is_last, _ in rig.told] == [
        ("a", False),
        ("a", True),
        ("b", True),
    ]


def test_an_output_that_cannot_be_put_together_leaves_nobody_waiting(rig: Rig) -> None:
    for name in "abc":
        rig.submit(name)
    wrong = ShownOutput(1, {"s": None}, True)  # as before, though there was none before
    outputs = [ShownOutput(0, {}, True), wrong, ShownOutput(2, {}, True)]
    with pytest.raises(KeyError):  # which ends the channel, and so what is at its other end
        rig.life.says(packed([(each, ()) for each in outputs]))
    rig.life.says(Ended("told nonsense", is_final=False))
    assert [(name, error is None) for name, _, error in rig.told] == [
        ("a", True),
        ("b", False),
        ("c", False),
    ]

"""The sender sends what it should when it should, and tells how late it was."""

from __future__ import annotations

import asyncio
import random

import pytest

from omni.commands.bench.load import LevelRun, LoadAmount, LoadLevel, LoadTurns, line_source
from omni.commands.bench.measured_request import MeasuredRequest, RequestFailure, Send
from tests.support.virtual_clock import run_virtually


class Answers:
    """Sends that take so long; counts how many ran at once."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.most = self._running = 0
        self.began: list[float] = []

    async def send(self, record: MeasuredRequest) -> str:
        record.send()
        self.began.append(asyncio.get_running_loop().time())
        self._running += 1
        self.most = max(self.most, self._running)
        await asyncio.sleep(self._seconds)
        self._running -= 1
        return "yes"


def test_a_closed_loop_keeps_so_many_in_flight_and_sends_all():
    answers = Answers(2.0)
    run = LevelRun(LoadLevel(concurrency=3), LoadAmount(10))
    run_virtually(run.run(line_source([answers.send])))
    assert answers.most == 3 and len(run.records) == 10
    assert answers.began == [100.0] * 3 + [102.0] * 3 + [104.0] * 3 + [106.0]
    assert run.duration_s == 8.0 and run.num_in_flight == 0


def test_more_clients_than_requests_are_no_matter():
    answers = Answers(1.0)
    run = LevelRun(LoadLevel(concurrency=50), LoadAmount(2))
    run_virtually(run.run(line_source([answers.send])))
    assert len(run.records) == 2 and answers.most == 2


def test_an_open_loop_does_not_wait_for_answers_and_its_gaps_are_exponential():
    answers = Answers(10.0)
    run = LevelRun(LoadLevel(rate=80.0), LoadAmount(400, seed=3), index=2)
    run_virtually(run.run(line_source([answers.send])))
    chance = random.Random("3 2")
    arrivals = [100.0]
    for _ in range(399):
        arrivals.append(arrivals[-1] + chance.expovariate(80.0))
    assert answers.began == pytest.approx(arrivals)
    assert answers.most == 400
    mean = (arrivals[-1] - arrivals[0]) / 399
    assert mean == pytest.approx(1 / 80, rel=0.15), "80 a second in the mean"
    scheduled = sorted(record.scheduled for record in run.records)
    assert scheduled == pytest.approx(arrivals)


def test_the_senders_own_lateness_is_told_for_every_request_and_for_its_loop():
    run = LevelRun(LoadLevel(rate=0.01), LoadAmount(20))
    run_virtually(run.run(line_source([Answers(1.0).send])), lateness=0.125)
    first, *others = (record.send_delay for record in run.records)
    assert first == 0.0, "it waits for no timer"
    assert others == pytest.approx([0.125] * 19)
    assert run.loop_lags and run.loop_lags == pytest.approx([0.125] * len(run.loop_lags))


def test_after_its_time_a_level_sends_no_more_but_waits_for_what_it_sent():
    for level in (LoadLevel(concurrency=2), LoadLevel(rate=1.0)):
        answers = Answers(4.0)
        run = LevelRun(level, LoadAmount(10**9, duration_s=9.0))
        run_virtually(run.run(line_source([answers.send])))
        assert 4 <= len(run.records) == len(answers.began) < 40
        assert max(answers.began) < 109.0 <= 100 + run.duration_s


class Listening:
    """Conversations of three turns; keeps the answers that each turn was given."""

    def __init__(self, send: Send) -> None:
        self.heard: list[str | None] = []
        self._send = send

    def conversation(self, level: int, number: int) -> LoadTurns:
        answer = None
        for _ in range(3):
            self.heard.append(answer)
            answer = yield self._send


def test_a_conversations_turns_wait_for_each_other():
    answers = Answers(2.0)
    turns = Listening(answers.send)
    run = LevelRun(LoadLevel(concurrency=1), LoadAmount(2))
    run_virtually(run.run(turns.conversation))
    assert turns.heard == [None, "yes", "yes"] * 2 and answers.most == 1
    assert len(run.records) == 6


def test_a_conversation_ends_with_a_turn_that_fails():

    async def fails(record: MeasuredRequest) -> str:
        record.send()
        raise RequestFailure("status 500", "no")

    turns = Listening(fails)
    run = LevelRun(LoadLevel(concurrency=1), LoadAmount(2))
    run_virtually(run.run(turns.conversation))
    assert turns.heard == [None, None]
    assert [record.failure.kind for record in run.records] == ["status 500"] * 2


def test_a_request_that_is_not_answered_in_time_is_given_up():
    run = LevelRun(LoadLevel(concurrency=1), LoadAmount(1, timeout_s=0.01))

    async def never(record: MeasuredRequest) -> str:
        record.send()
        await asyncio.Event().wait()
        return ""

    asyncio.run(run.run(line_source([never])))
    (record,) = run.records
    assert record.failure is not None and record.failure.kind == "timeout"
    assert "--timeout" in str(record.failure)


def test_a_run_that_is_cut_short_has_what_was_seen_until_then():
    answers = Answers(2.0)
    run = LevelRun(LoadLevel(concurrency=2), LoadAmount(100))

    async def cut_short() -> None:
        task = asyncio.ensure_future(run.run(line_source([answers.send])))
        await asyncio.sleep(5.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run_virtually(cut_short())
    assert len(run.records) == 4 and run.num_in_flight == 2
    assert run.duration_s == 5.0


def test_a_mistake_of_the_sender_is_no_failed_request():
    async def mistaken(record: MeasuredRequest) -> str:
        raise ZeroDivisionError

    run = LevelRun(LoadLevel(concurrency=2), LoadAmount(4))
    with pytest.raises(ZeroDivisionError):
        asyncio.run(run.run(line_source([mistaken])))

"""The load generator sends requests on schedule, and reports its own delay."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from omni.commands.bench.flags import BenchFlags
from omni.commands.bench.load import (
    LevelRun,
    LoadLevel,
    LoadTurns,
    MeasuredRequest,
    Measurement,
    RequestFailure,
    Send,
    SyntheticSource,
    line_source,
    synthetic_text,
)
from tests.support.virtual_clock import run_virtually


class Answers:
    """Sends of a fixed duration; counts how many run at once."""

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


def test_a_closed_loop_keeps_its_concurrency_and_sends_all():
    answers = Answers(2.0)
    run = LevelRun(LoadLevel(concurrency=3), 10)
    run_virtually(run.run(line_source([answers.send])))
    assert answers.most == 3 and len(run.records) == 10
    assert answers.began == [100.0] * 3 + [102.0] * 3 + [104.0] * 3 + [106.0]
    assert run.duration_s == 8.0 and run.num_in_flight == 0


def test_an_open_loop_does_not_wait_for_answers_and_its_gaps_are_exponential():
    answers = Answers(10.0)
    run = LevelRun(LoadLevel(rate=80.0), 400, BenchFlags(seed=3), index=2)
    run_virtually(run.run(line_source([answers.send])))
    chance = random.Random("3 2")
    arrivals = [100.0]
    for _ in range(399):
        arrivals.append(arrivals[-1] + chance.expovariate(80.0))
    assert answers.began == pytest.approx(arrivals)
    assert answers.most == 400
    mean = (arrivals[-1] - arrivals[0]) / 399
    assert mean == pytest.approx(1 / 80, rel=0.15), "80 per second on average"
    scheduled = sorted(record.scheduled for record in run.records)
    assert scheduled == pytest.approx(arrivals)


def test_the_senders_delay_is_measured_for_every_request_and_for_its_loop():
    run = LevelRun(LoadLevel(rate=0.01), 20)
    run_virtually(run.run(line_source([Answers(1.0).send])), lateness=0.125)
    first, *others = (record.send_delay for record in run.records)
    assert first == 0.0, "it needs no timer"
    assert others == pytest.approx([0.125] * 19)
    assert run.loop_lags and run.loop_lags == pytest.approx([0.125] * len(run.loop_lags))


def test_a_level_stops_sending_after_its_duration_and_waits_for_answers():
    for level in (LoadLevel(concurrency=2), LoadLevel(rate=1.0)):
        answers = Answers(4.0)
        run = LevelRun(level, 10**9, BenchFlags(duration=9.0))
        run_virtually(run.run(line_source([answers.send])))
        assert 4 <= len(run.records) == len(answers.began) < 40
        assert max(answers.began) < 109.0 <= 100 + run.duration_s


class Listening:
    """Conversations of three turns; keeps the answer that each turn received."""

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
    run = LevelRun(LoadLevel(concurrency=1), 2)
    run_virtually(run.run(turns.conversation))
    assert turns.heard == [None, "yes", "yes"] * 2 and answers.most == 1
    assert len(run.records) == 6


def test_a_conversation_ends_with_a_turn_that_fails():
    async def fails(record: MeasuredRequest) -> str:
        record.send()
        raise RequestFailure("status 500", "no")

    turns = Listening(fails)
    run = LevelRun(LoadLevel(concurrency=1), 2)
    run_virtually(run.run(turns.conversation))
    assert turns.heard == [None, None]
    assert [record.failure.kind for record in run.records] == ["status 500"] * 2


def test_a_request_without_an_answer_times_out():
    run = LevelRun(LoadLevel(concurrency=1), 1, BenchFlags(timeout=0.01))

    async def never(record: MeasuredRequest) -> str:
        record.send()
        await asyncio.Event().wait()
        return ""

    asyncio.run(run.run(line_source([never])))
    (record,) = run.records
    assert record.failure is not None and record.failure.kind == "timeout"
    assert "--timeout" in str(record.failure)


def test_a_cancelled_run_has_the_results_so_far():
    answers = Answers(2.0)
    run = LevelRun(LoadLevel(concurrency=2), 100)

    async def cut_short() -> None:
        task = asyncio.ensure_future(run.run(line_source([answers.send])))
        await asyncio.sleep(5.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run_virtually(cut_short())
    assert len(run.records) == 4 and run.num_in_flight == 2
    assert run.duration_s == 5.0


def test_a_bug_of_the_sender_is_not_a_failed_request():
    async def mistaken(record: MeasuredRequest) -> str:
        raise ZeroDivisionError

    run = LevelRun(LoadLevel(concurrency=2), 4)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(run.run(line_source([mistaken])))


class Listener:
    """A target that keeps its requests; a word is ``per_word`` tokens, and 7 tokens are added."""

    def __init__(self, per_word: float = 1.0, stage: str | None = None) -> None:
        self.answering_stage = stage
        self.lines: list[Mapping[str, Any]] = []
        self.num_resets = 0
        self.failure: RequestFailure | None = None
        self.tells = True
        self._per_word = per_word

    def prepare(self, line: Mapping[str, Any], folder: Path) -> Send:
        async def send(record: MeasuredRequest) -> str:
            self.lines.append(line)
            record.send()
            if self.failure is not None:
                raise self.failure
            if self.tells:
                record.usage(self.num_tokens(line), 0, 1)
            return f"answer {len(self.lines)}"

        return send

    def num_tokens(self, line: Mapping[str, Any]) -> int:
        prompt = line["prompt"]
        said = prompt if isinstance(prompt, str) else " ".join(each["content"] for each in prompt)
        return 7 + round(self._per_word * len(said.split()))

    async def reset_caches(self) -> None:
        self.num_resets += 1


def measured(listener: Listener, flags: BenchFlags, num: int, *levels: LoadLevel) -> Measurement:
    measurement = Measurement(levels or [LoadLevel(concurrency=1)], flags, num)
    asyncio.run(measurement.run(listener))
    return measurement


def texts(listener: Listener) -> list[str]:
    """The texts of first turns, without the probes."""
    return [line["prompt"][0]["content"] for line in listener.lines[2:]]


@pytest.mark.parametrize("per_word", [1.0, 1.7, 3.0])
def test_prompts_have_the_requested_length_with_any_tokenizer(per_word: float):
    listener = Listener(per_word)
    measurement = measured(listener, BenchFlags(warmup=0, prompt_tokens=200), 5)
    lengths = [record.prompt_tokens for record in measurement.runs[0].records]
    assert lengths == pytest.approx([200] * 5, abs=per_word)


def test_words_are_counted_if_the_server_reports_no_tokens():
    listener = Listener()
    listener.tells = False
    measured(listener, BenchFlags(warmup=0, prompt_tokens=50), 2)
    _, *prompts = (line["prompt"][0]["content"] for line in listener.lines)
    assert [len(text.split()) for text in prompts] == [50, 50]


def test_only_prefixes_are_shared_round_robin():
    listener = Listener()
    shape = BenchFlags(warmup=0, prompt_tokens=107, shared_prefix_tokens=60, prefixes=2)
    measured(listener, shape, 6)
    words = [text.split() for text in texts(listener)]
    assert {len(each) for each in words} == {100}
    beginnings = [" ".join(each[:60]) for each in words]
    assert len(set(beginnings)) == 2 and beginnings == beginnings[:2] * 3
    assert len({" ".join(each[60:]) for each in words}) == 6


def test_levels_share_no_prefix_and_a_seed_determines_all_texts():
    shape = BenchFlags(warmup=2, prompt_tokens=60, shared_prefix_tokens=20)
    levels = [LoadLevel(concurrency=1), LoadLevel(concurrency=2)]
    listener, again = Listener(), Listener()
    for each in (listener, again):
        measured(each, shape, 3, *levels)
    assert texts(listener) == texts(again)
    assert len({text[:40] for text in texts(listener)}) == 3, "warm-up and two levels"
    assert listener.num_resets == 2, "caches are reset before every level, where possible"


def test_a_turn_of_a_chat_holds_all_earlier_turns():
    listener = Listener()
    measured(listener, BenchFlags(warmup=0, prompt_tokens=40, turns=3), 1)
    first, second, third = (line["prompt"] for line in listener.lines[2:])
    assert [each["role"] for each in third] == ["user", "assistant"] * 2 + ["user"]
    assert third[:3] == second and second[:1] == first
    assert second[1]["content"] == "answer 3" and third[3]["content"] == "answer 4"


def test_turns_of_completions_are_one_text():
    listener = Listener(stage="writer")
    shape = BenchFlags(warmup=0, endpoint="completions", prompt_tokens=40, turns=2, max_tokens=9)
    measured(listener, shape, 1)
    first, second = (line["prompt"] for line in listener.lines[2:])
    assert second.startswith(f"{first}answer 3 ")
    assert [line["sampling"]["writer"]["max_tokens"] for line in listener.lines] == [1, 1, 9, 9]


def test_a_failed_first_request_is_an_error_before_any_measurement():
    listener = Listener()
    listener.failure = RequestFailure("status 404", "no such model")
    with pytest.raises(ValueError, match="first request was not answered: status 404: no such mo"):
        measured(listener, BenchFlags(warmup=0), 3)
    measurement = Measurement([LoadLevel(concurrency=1)], BenchFlags(warmup=2), 3)
    with pytest.raises(ValueError, match="status 404"):
        asyncio.run(measurement.run(listener, [listener.prepare({}, Path())]))
    assert measurement.runs == []


def test_token_counts_that_do_not_grow_are_an_error():
    with pytest.raises(ValueError, match="96 words are said to be 7 tokens, no more than 32 words"):
        measured(Listener(per_word=0.0), BenchFlags(warmup=0), 1)


def test_no_prompt_is_empty_however_long_the_chat_template_is():
    listener = Listener()
    source = SyntheticSource(listener, BenchFlags(warmup=0, prompt_tokens=3), 1.0, 500.0)
    asyncio.run(next(source.conversation(0, 0))(MeasuredRequest(0.0)))
    assert len(listener.lines[0]["prompt"][0]["content"].split()) == 1


def test_texts_differ_by_seed():
    assert synthetic_text(30, 1, 2) == synthetic_text(30, 1, 2) != synthetic_text(30, 12)
    assert synthetic_text(0, 1) == ""

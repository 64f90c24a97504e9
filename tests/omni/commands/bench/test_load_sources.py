"""Requests that are made up have the lengths, the beginnings and the turns that were asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from omni.commands.bench.load import (
    LoadAmount,
    LoadLevel,
    MadeUpShape,
    MadeUpSource,
    Measurement,
    MeasurementPlan,
    TokenLengths,
    made_up_text,
)
from omni.commands.bench.measured_request import MeasuredRequest, RequestFailure, Send


class Listener:
    """A target that keeps what it was asked; a word is so many tokens there, and 7 are around."""

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


def measured(listener: Listener, shape: MadeUpShape, num: int, **plan: Any) -> Measurement:
    levels = plan.pop("levels", [LoadLevel(concurrency=1)])
    measurement = Measurement(MeasurementPlan(levels, LoadAmount(num), shape=shape, **plan))
    asyncio.run(measurement.run(listener))
    return measurement


def texts(listener: Listener) -> list[str]:
    """What was said in the first turns, without the probes."""
    return [line["prompt"][0]["content"] for line in listener.lines[2:]]


@pytest.mark.parametrize("per_word", [1.0, 1.7, 3.0])
def test_prompts_have_the_tokens_that_were_asked_for_whatever_the_tokenizer(per_word: float):
    listener = Listener(per_word)
    measurement = measured(listener, MadeUpShape(prompt_tokens=200), 5)
    lengths = [record.prompt_tokens for record in measurement.runs[0].records]
    assert lengths == pytest.approx([200] * 5, abs=per_word)


def test_where_nobody_counts_tokens_words_stand_for_them():
    listener = Listener()
    listener.tells = False
    measured(listener, MadeUpShape(prompt_tokens=50), 2)
    _, *prompts = (line["prompt"][0]["content"] for line in listener.lines)
    assert [len(text.split()) for text in prompts] == [50, 50]


def test_beginnings_are_shared_in_turns_and_nothing_else():
    listener = Listener()
    shape = MadeUpShape(prompt_tokens=107, shared_prefix_tokens=60, num_prefixes=2)
    measured(listener, shape, 6)
    words = [text.split() for text in texts(listener)]
    assert {len(each) for each in words} == {100}
    beginnings = [" ".join(each[:60]) for each in words]
    assert len(set(beginnings)) == 2 and beginnings == beginnings[:2] * 3
    assert len({" ".join(each[60:]) for each in words}) == 6


def test_levels_do_not_share_and_the_same_seed_says_the_same():
    shape = MadeUpShape(prompt_tokens=60, shared_prefix_tokens=20)
    levels = [LoadLevel(concurrency=1), LoadLevel(concurrency=2)]
    listener, again = Listener(), Listener()
    for each in (listener, again):
        measured(each, shape, 3, levels=levels, warmup=2)
    assert texts(listener) == texts(again)
    assert len({text[:40] for text in texts(listener)}) == 3, "warm-up and two levels"
    assert listener.num_resets == 2, "caches are emptied before every level, where that can be"


def test_a_chats_turns_hold_all_that_was_said_before():
    listener = Listener()
    measured(listener, MadeUpShape(prompt_tokens=40, num_turns=3), 1)
    first, second, third = (line["prompt"] for line in listener.lines[2:])
    assert [each["role"] for each in third] == ["user", "assistant"] * 2 + ["user"]
    assert third[:3] == second and second[:1] == first
    assert second[1]["content"] == "answer 3" and third[3]["content"] == "answer 4"


def test_plain_texts_turns_are_one_text():
    listener = Listener(stage="writer")
    shape = MadeUpShape("completions", prompt_tokens=40, num_turns=2, sampling={"max_tokens": 9})
    measured(listener, shape, 1)
    first, second = (line["prompt"] for line in listener.lines[2:])
    assert second.startswith(f"{first}answer 3 ")
    assert [line["sampling"]["writer"]["max_tokens"] for line in listener.lines] == [1, 1, 9, 9]


def test_what_is_not_answered_at_first_is_told_before_anything_is_measured():
    listener = Listener()
    listener.failure = RequestFailure("status 404", "no such model")
    with pytest.raises(ValueError, match="first request was not answered: status 404: no such mo"):
        measured(listener, MadeUpShape(), 3)
    measurement = Measurement(MeasurementPlan([LoadLevel(concurrency=1)], LoadAmount(3), warmup=2))
    with pytest.raises(ValueError, match="status 404"):
        asyncio.run(measurement.run(listener, [listener.prepare({}, Path())]))
    assert measurement.runs == []


def test_a_server_whose_counts_do_not_grow_is_not_believed():
    with pytest.raises(ValueError, match="96 words are said to be 7 tokens, no more than 32 words"):
        measured(Listener(per_word=0.0), MadeUpShape(), 1)


def test_a_prefix_as_long_as_the_prompt_is_refused():
    with pytest.raises(ValueError, match=r"--shared-prefix-tokens \(64\) must be fewer than"):
        MadeUpShape(prompt_tokens=64, shared_prefix_tokens=64)


def test_no_prompt_is_empty_however_much_stands_around_it():
    listener = Listener()
    source = MadeUpSource(listener, MadeUpShape(prompt_tokens=3), TokenLengths(1.0, 500.0))
    asyncio.run(next(source.conversation(0, 0))(MeasuredRequest(0.0)))
    assert len(listener.lines[0]["prompt"][0]["content"].split()) == 1


def test_texts_of_a_seed_are_its_own():
    assert made_up_text(30, 1, 2) == made_up_text(30, 1, 2) != made_up_text(30, 12)
    assert made_up_text(0, 1) == ""

"""Windows wait for others of their length, for a few steps at most and never for nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.generator.generator_engine import GeneratorRequest, WindowGathering, WindowSizes
from tests.support.examples import examples

SIZES = WindowSizes(first=4, chunk=8, left=2, right=2)
FIRST, SECOND = 7, 15  # codes after which an utterance's windows can run


@dataclass
class Vocoder:
    """Utterances by name, and which of them each step's pass computes."""

    max_batch_size: int = 8
    utterances: dict[str, GeneratorRequest] = field(default_factory=dict)
    has_new_codes: bool = False

    def __post_init__(self) -> None:
        self.gathering = WindowGathering(SIZES, self.max_batch_size)

    def say(self, name: str, num_codes: int, *, is_last: bool = False) -> None:
        request = self.utterances.setdefault(
            name, GeneratorRequest(name, None, 0, len(self.utterances), False, None)
        )
        request.codes += [0] * num_codes
        request.is_last = is_last
        self.has_new_codes = True

    def step(self) -> str:
        batch = self.gathering.next_batch(
            self.utterances.values(), has_new_codes=self.has_new_codes
        )
        self.has_new_codes = False
        for request, window in batch:
            request.num_done = window.kept_stop
        assert len({window.num_codes for _, window in batch}) <= 1
        return "".join(request.request_id for request, _ in batch)


@pytest.fixture
def vocoder() -> Vocoder:
    return Vocoder()


def test_an_utterance_alone_waits_for_nobody(vocoder: Vocoder) -> None:
    vocoder.say("a", FIRST)
    assert vocoder.step() == "a"
    vocoder.say("a", SECOND - FIRST)
    assert vocoder.step() == "a"


def test_a_window_waits_for_one_as_long_that_is_coming(vocoder: Vocoder) -> None:
    vocoder.say("a", FIRST)
    vocoder.say("b", FIRST - 1)
    assert vocoder.step() == ""
    vocoder.say("b", 1)
    assert vocoder.step() == "ab"


def test_without_new_codes_nothing_waits(vocoder: Vocoder) -> None:
    vocoder.say("a", FIRST)
    vocoder.say("b", 1)
    assert [vocoder.step(), vocoder.step(), vocoder.step()] == ["", "a", ""]


def test_one_that_comes_to_a_window_of_another_length_is_not_waited_for(vocoder: Vocoder) -> None:
    vocoder.say("a", FIRST)
    assert vocoder.step() == "a"
    vocoder.say("b", FIRST)
    assert vocoder.step() == "b"


def test_one_whose_codes_are_all_there_is_not_waited_for(vocoder: Vocoder) -> None:
    vocoder.say("a", FIRST)
    vocoder.say("b", 1, is_last=True)
    assert vocoder.step() == "a"


def test_a_full_batch_waits_for_nobody_more() -> None:
    vocoder = Vocoder(max_batch_size=2)
    for name in "abc":
        vocoder.say(name, FIRST)
    vocoder.say("d", 1)
    assert vocoder.step() == "ab"
    vocoder.say("d", 1)
    assert vocoder.step() == ""


@pytest.mark.parametrize(("num_codes", "expected"), [(FIRST, 2), (SECOND, 8)])
def test_nobody_waits_for_long(vocoder: Vocoder, num_codes: int, expected: int) -> None:
    vocoder.say("a", num_codes)
    if num_codes == SECOND:
        assert vocoder.step() == "a"  # its first window
        vocoder.utterances["b"] = GeneratorRequest("b", None, 0, 1, False, None)
        vocoder.utterances["b"].num_done = SIZES.first
        vocoder.utterances["b"].codes = [0] * SIZES.first
    else:
        vocoder.say("b", 0)
    num_waits = 0
    # The other one goes on for ever, and is never as far.
    vocoder.has_new_codes = True
    while vocoder.step() == "":
        num_waits += 1
        vocoder.has_new_codes = True
    assert num_waits == expected


Arrival = tuple[int, int, bool]


@settings(max_examples=examples(50))
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.booleans())), max_size=30)
)
def test_all_that_can_run_has_run_in_the_end(turns: list[list[Arrival]]) -> None:
    vocoder = Vocoder(max_batch_size=3)
    for turn in turns:
        for index, num_codes, is_last in turn:
            name = "abcdef"[index]
            if name not in vocoder.utterances or not vocoder.utterances[name].is_last:
                vocoder.say(name, num_codes, is_last=is_last)
        vocoder.step()
        assert all(request.num_waits <= 8 + 6 for request in vocoder.utterances.values())
    # As nothing comes any more, only the first of these steps may compute nothing.
    vocoder.step()
    while vocoder.step():
        pass
    for request in vocoder.utterances.values():
        assert request.next_window(SIZES) is None
        assert request.is_done or not request.is_last

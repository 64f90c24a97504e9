"""When a completion ends, and that its text ends there whatever the tokens' borders."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import StopStringCriteria

from engine import FinishReason, SamplingParams
from engine.text.stop_checker import CompletionText
from tests.support.tokenizers import byte_level, llama_style

EOS = 0
ALPHABET = "the dog.é"


def completion(stop: tuple[str, ...] = (), **params) -> CompletionText:
    params.setdefault("max_tokens", 1000)
    return CompletionText(byte_level(), SamplingParams(stop=stop, **params), {EOS})


def token_ids(text: str) -> list[int]:
    return byte_level().encode(text, add_special_tokens=False)


def single_bytes(text: str) -> list[int]:
    """The same text in the smallest tokens there are."""
    return [i for character in text for i in token_ids(character)]


def run(text: CompletionText, ids: list[int]) -> tuple[FinishReason | None, int, str]:
    """Reason, number of tokens taken, and the told pieces joined."""
    told = ""
    for count, token_id in enumerate(ids, start=1):
        reason = text.append(token_id)
        told += text.take_delta()
        assert told == text.text
        if reason is not None:
            return reason, count, told
    text.finish()
    return None, len(ids), told + text.take_delta()


def read_by_character(text: str, stop: tuple[str, ...]) -> str:
    """Text up to the first stop string, the slow and obvious way."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            return text[: end - max(map(len, found))]
    return text


texts = st.text(ALPHABET, max_size=25)
stops = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=3).map(tuple)


@given(text=texts, stop=stops)
def test_text_ends_at_the_first_stop_string_whatever_the_borders(text: str, stop):
    for ids in (token_ids(text), single_bytes(text)):
        reason, _, told = run(completion(stop), ids)
        assert told == read_by_character(text, stop)
        assert (reason is FinishReason.STOP) == any(s in text for s in stop)


@given(text=st.text("the dog.", min_size=1, max_size=20), stop=stops.filter(bool))
def test_stops_with_the_token_with_which_transformers_stops(text: str, stop):
    criteria = StopStringCriteria(byte_level(), list(stop))
    ids = token_ids(text)
    expected = next(
        (
            count
            for count in range(1, len(ids) + 1)
            if criteria(torch.tensor([ids[:count]]), torch.empty(0))[0]
        ),
        None,
    )
    reason, count, _ = run(completion(stop), ids)
    assert (count if reason is FinishReason.STOP else None) == expected


def test_within_one_token_the_stop_string_that_is_complete_first_counts():
    assert len(token_ids("the")) == 1
    assert run(completion(("the", "h")), token_ids("the"))[2] == "t"
    assert run(completion(("the", "he")), token_ids("the"))[2] == ""


def test_a_whole_stop_string_that_passed_is_not_held_back():
    text = completion(stop=("do", "xxxx"), min_tokens=9)
    for token_id in single_bytes("do"):
        text.append(token_id)
    assert text.text == "do"


def test_beginning_of_a_stop_string_is_held_back_until_decided():
    text = completion(stop=("dog!",))
    pieces = []
    for token_id in single_bytes("a dot, a dog!"):
        text.append(token_id)
        pieces.append(text.take_delta())
    assert pieces == ["a", " ", "", "", "dot", ",", " ", "a", " ", "", "", "", ""]


def test_held_back_text_comes_when_the_request_ends_otherwise():
    for end in ("max_tokens", "eos", "abort"):
        ids = single_bytes("a do")
        text = completion(stop=("dog",), max_tokens=len(ids) if end == "max_tokens" else 99)
        for token_id in ids:
            reason = text.append(token_id)
        if end == "max_tokens":
            assert reason is FinishReason.LENGTH
        elif end == "eos":
            assert text.append(EOS) is FinishReason.STOP
        else:
            text.finish()
        assert text.text == text.take_delta() == "a do"


def test_stop_string_in_text_that_only_the_end_released_counts():
    tokenizer = llama_style()
    euro = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in "€".encode()])
    params = SamplingParams(stop=("€",), max_tokens=4)
    text = CompletionText(tokenizer, params, ())
    reasons = [text.append(i) for i in (tokenizer.convert_tokens_to_ids("dog"), *euro)]
    assert reasons == [None, None, None, FinishReason.STOP]
    assert text.text == "dog"


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_eos_ends_unless_ignored(ignore_eos: bool):
    text = completion(ignore_eos=ignore_eos)
    assert run(text, [*token_ids("dog"), EOS, *token_ids("s")])[0] is (
        None if ignore_eos else FinishReason.STOP
    )
    assert text.text == ("dogs" if ignore_eos else "dog")


def test_stop_token_ends_and_is_not_in_the_text():
    dot = token_ids(".")[0]
    text = completion(stop_token_ids=(dot,), ignore_eos=True)
    assert run(text, [*token_ids("dog"), dot])[0] is FinishReason.STOP
    assert text.text == "dog"


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, 2), (2, 2), (3, 5)])
def test_nothing_stops_before_min_tokens(min_tokens: int, expected: int):
    a, b = single_bytes("ab")
    for ids, params in (
        ([a, b, a, a, b], {"stop": ("ab",)}),
        ([a, b, a, a, b], {"stop_token_ids": (b,)}),
        ([a, EOS, a, a, EOS], {}),
    ):
        reason, count, _ = run(completion(min_tokens=min_tokens, **params), ids)
        assert (reason, count) == (FinishReason.STOP, expected)


def test_stop_string_that_passed_before_min_tokens_stays_in_the_text():
    text = completion(stop=("aa",), min_tokens=3)
    reason, count, told = run(text, single_bytes("aaab"))
    assert (reason, count, told) == (FinishReason.STOP, 3, "a")


def test_max_tokens_ends_by_length_and_a_stop_at_the_same_token_wins():
    a, b = single_bytes("ab")
    assert run(completion(max_tokens=2), [a, b])[0] is FinishReason.LENGTH
    assert run(completion(max_tokens=2, stop=("b",)), [a, b])[0] is FinishReason.STOP
    assert run(completion(max_tokens=2, stop_token_ids=(b,)), [a, b])[0] is FinishReason.STOP


def test_without_a_tokenizer_there_are_ids_and_no_text():
    text = CompletionText(None, SamplingParams(max_tokens=3), {EOS})
    assert [text.append(5), text.append(6), text.append(7)] == [None, None, FinishReason.LENGTH]
    assert text.text == text.take_delta() == ""


def test_stop_strings_without_a_tokenizer_are_refused():
    with pytest.raises(ValueError, match="no tokenizer"):
        CompletionText(None, SamplingParams(stop="x"), {EOS})


def test_a_token_after_the_end_is_refused():
    text = completion()
    text.append(EOS)
    with pytest.raises(RuntimeError, match="after the end"):
        text.append(EOS)


@pytest.mark.parametrize(
    ("token_ids", "end"),
    [
        ([EOS, EOS], FinishReason.STOP),
        ([9, 9, EOS], FinishReason.STOP),
        ([9, 9, 9], FinishReason.LENGTH),
    ],
)
def test_stop_is_preferred_to_length(token_ids: list[int], end: FinishReason):
    text = CompletionText(None, SamplingParams(max_tokens=3, min_tokens=2), {EOS})
    *before, last = [text.append(token_id) for token_id in token_ids]
    assert last is end and not any(before)

"""Incremental detokenization joins to the whole text, and completions end at the right token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase, StopStringCriteria

from engine import FinishReason, SamplingParams
from engine.text.stop_checker import CompletionText, IncrementalDetokenizer
from tests.support.examples import examples
from tests.support.tokenizers import TOKENIZERS, byte_level, llama_style

UNKNOWN_IDS = 5
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def whole_text(tokenizer: PreTrainedTokenizerBase, ids: list[int], **options: bool) -> str:
    options.setdefault("skip_special_tokens", True)
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False, **options)
    assert isinstance(text, str)
    return text


def byte_pieces(tokenizer: PreTrainedTokenizerBase, data: bytes) -> list[int]:
    ids = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in data])
    assert isinstance(ids, list)
    return ids


def byte_tokens(tokenizer: PreTrainedTokenizerBase, data: bytes) -> list[int]:
    """Ids of single bytes of a byte-level vocabulary, whether they are text or not."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown}
    letters |= {byte: chr(0x100 + index) for index, byte in enumerate(hidden)}
    ids = tokenizer.convert_tokens_to_ids([letters[byte] for byte in data])
    assert isinstance(ids, list) and whole_text(tokenizer, ids) == data.decode("utf-8", "replace")
    return ids


def streamed_text(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Text of all ids with what an unfinished character adds; each prefix is checked."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    streamed = ""
    for count, token_id in enumerate(ids, start=1):
        streamed += detokenizer.append(token_id)
        whole = whole_text(tokenizer, ids[:count])
        assert streamed in (whole, whole[:-1])
    return streamed + detokenizer.flush()


def decoded_lengths(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """A list that gets the number of ids of each later call of ``decode``."""
    lengths: list[int] = []
    decode = tokenizer.decode

    def counted(given, **options):
        lengths.append(len(given))
        return decode(given, **options)

    monkeypatch.setattr(tokenizer, "decode", counted)
    return lengths


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
@settings(max_examples=examples(200))
@given(data=st.data())
def test_pieces_join_to_the_text_of_all_ids(kind: str, data):
    tokenizer = TOKENIZERS[kind]()
    some_id = st.integers(0, len(tokenizer) + UNKNOWN_IDS)
    ids = data.draw(st.lists(some_id, max_size=40))
    detokenizer = IncrementalDetokenizer(tokenizer)
    streamed = ""
    for count, token_id in enumerate(ids, start=1):
        streamed += detokenizer.append(token_id)
        assert whole_text(tokenizer, ids[:count]).startswith(streamed)
    whole = whole_text(tokenizer, ids)
    streamed += detokenizer.flush()
    # An unfinished character at the end is dropped; decode shows it as U+FFFD.
    assert streamed == whole or whole.endswith(REPLACEMENT)


@pytest.mark.parametrize("kind", ["byte_level", "llama_style"])
@settings(max_examples=examples(100))
@given(text=st.text(max_size=30))
def test_text_survives_and_no_piece_holds_half_a_character(kind: str, text: str):
    tokenizer = TOKENIZERS[kind]()
    text = text.replace(REPLACEMENT, "")
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.append(token_id) for token_id in ids] + [detokenizer.flush()]
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert "".join(pieces) == whole_text(tokenizer, ids)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_unfinished_character_is_dropped_at_the_end(cut: int):
    fox = "🦊".encode()
    byte_level_ids = byte_tokens(byte_level(), b"a" + fox + fox[:cut])
    llama_ids = byte_pieces(llama_style(), b"a" + fox + fox[:cut])
    for tokenizer, ids in ((byte_level(), byte_level_ids), (llama_style(), llama_ids)):
        detokenizer = IncrementalDetokenizer(tokenizer)
        assert "".join(map(detokenizer.append, ids)) + detokenizer.flush() == "a🦊"


# Invalid UTF-8, one token per byte: stray bytes, unfinished characters, characters without a byte.
INVALID = [b"\xff", b"\x80", b"\xe2", b"\xf0\x9f\x98", b"\xe2\x82", b"a\xff", b"\xc3\x28"]


@pytest.mark.parametrize("data", INVALID)
@pytest.mark.parametrize("end", [b"", b"a", b"\x82\xac", b"\xf0\x9f\xa6\x8a"])
def test_a_long_run_of_invalid_bytes_is_streamed_as_it_comes(data: bytes, end: bytes):
    tokenizer = byte_level()
    ids = byte_tokens(tokenizer, data * 100 + end)
    whole = whole_text(tokenizer, ids)
    assert streamed_text(tokenizer, ids).rstrip(REPLACEMENT) == whole.rstrip(REPLACEMENT)


@settings(max_examples=examples(25))
@given(data=st.lists(st.sampled_from([b"\xff", b"\xe2", b"\x82", b"\xac", b"\xf0", b"a"])))
def test_shortening_the_window_anywhere_keeps_the_text(data: list[bytes]):
    tokenizer = byte_level()
    content = b"\xe2\x82" * 20 + b"".join(data) + b"\xf0\x9f" * 12
    streamed_text(tokenizer, byte_tokens(tokenizer, content))


@pytest.mark.parametrize("data", INVALID)
@pytest.mark.parametrize("kind", ["byte_level", "llama_style"])
def test_decoding_work_is_linear_in_a_run_of_invalid_bytes(
    kind: str, data: bytes, monkeypatch: pytest.MonkeyPatch
):
    tokenizer = TOKENIZERS[kind]()
    make = byte_tokens if kind == "byte_level" else byte_pieces
    ids = make(tokenizer, data * 400)
    lengths = decoded_lengths(tokenizer, monkeypatch)
    detokenizer = IncrementalDetokenizer(tokenizer)
    for token_id in ids:
        detokenizer.append(token_id)
    detokenizer.flush()
    assert sum(lengths) <= 40 * len(ids)


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
def test_the_decoded_window_does_not_grow_with_the_text(kind: str, monkeypatch: pytest.MonkeyPatch):
    tokenizer = TOKENIZERS[kind]()
    lengths = decoded_lengths(tokenizer, monkeypatch)
    ids = tokenizer.encode("the dog, a fox. ", add_special_tokens=False) * 40
    specials = [i for i in tokenizer.all_special_ids if i not in (None, *ids)]
    detokenizer = IncrementalDetokenizer(tokenizer)
    for token_id in ids + specials * 200 + ids:
        detokenizer.append(token_id)
    assert max(lengths) <= 32 < len(ids)


EOS = 0
ALPHABET = "the dog.é"


def completion(stop: tuple[str, ...] = (), **params) -> CompletionText:
    params.setdefault("max_tokens", 1000)
    return CompletionText(byte_level(), SamplingParams(stop=stop, **params), {EOS})


def token_ids(text: str) -> list[int]:
    return byte_level().encode(text, add_special_tokens=False)


def single_bytes(text: str) -> list[int]:
    """The same text as one token per character or byte."""
    return [i for character in text for i in token_ids(character)]


def run(text: CompletionText, ids: list[int]) -> tuple[FinishReason | None, int, str]:
    """Return the reason, the number of tokens consumed and the joined deltas."""
    streamed = ""
    for count, token_id in enumerate(ids, start=1):
        reason = text.append(token_id)
        streamed += text.take_delta()
        assert streamed == text.text
        if reason is not None:
            return reason, count, streamed
    text.finish()
    return None, len(ids), streamed + text.take_delta()


def read_by_character(text: str, stop: tuple[str, ...]) -> str:
    """Text up to the first stop string, by brute force."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            return text[: end - max(map(len, found))]
    return text


texts = st.text(ALPHABET, max_size=25)
stops = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=3).map(tuple)


@given(text=texts, stop=stops)
def test_text_ends_at_the_first_stop_string_for_any_token_boundaries(text: str, stop):
    for ids in (token_ids(text), single_bytes(text)):
        reason, _, streamed = run(completion(stop), ids)
        assert streamed == read_by_character(text, stop)
        assert (reason is FinishReason.STOP) == any(s in text for s in stop)


@given(text=st.text("the dog.", min_size=1, max_size=20), stop=stops.filter(bool))
def test_stops_at_the_same_token_as_transformers(text: str, stop):
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


def test_a_complete_stop_string_before_min_tokens_is_not_held_back():
    text = completion(stop=("do", "xxxx"), min_tokens=9)
    for token_id in single_bytes("do"):
        text.append(token_id)
    assert text.text == "do"


def test_the_beginning_of_a_stop_string_is_held_back_until_decided():
    text = completion(stop=("dog!",))
    pieces = []
    for token_id in single_bytes("a dot, a dog!"):
        text.append(token_id)
        pieces.append(text.take_delta())
    assert pieces == ["a", " ", "", "", "dot", ",", " ", "a", " ", "", "", "", ""]


def test_held_back_text_is_released_when_the_request_ends_otherwise():
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


def test_a_stop_string_in_text_released_only_at_the_end_counts():
    tokenizer = llama_style()
    text = CompletionText(tokenizer, SamplingParams(stop=("€",), max_tokens=4), ())
    ids = (tokenizer.convert_tokens_to_ids("dog"), *byte_pieces(tokenizer, "€".encode()))
    reasons = [text.append(i) for i in ids]
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


def test_a_stop_string_before_min_tokens_stays_in_the_text():
    text = completion(stop=("aa",), min_tokens=3)
    assert run(text, single_bytes("aaab")) == (FinishReason.STOP, 3, "a")


def test_max_tokens_ends_by_length_and_a_stop_at_the_same_token_wins():
    a, b = single_bytes("ab")
    assert run(completion(max_tokens=2), [a, b])[0] is FinishReason.LENGTH
    assert run(completion(max_tokens=2), [a, EOS])[0] is FinishReason.STOP
    assert run(completion(max_tokens=2, stop=("b",)), [a, b])[0] is FinishReason.STOP
    assert run(completion(max_tokens=2, stop_token_ids=(b,)), [a, b])[0] is FinishReason.STOP


def test_without_a_tokenizer_there_is_no_text_and_stop_strings_are_refused():
    for ids, reason in (
        ((5, 6, 7), FinishReason.LENGTH),
        ((5, 6, EOS), FinishReason.STOP),
        ((EOS, EOS), FinishReason.STOP),
    ):
        text = CompletionText(None, SamplingParams(max_tokens=3, min_tokens=2), {EOS})
        assert [text.append(i) for i in ids] == [None] * (len(ids) - 1) + [reason]
        assert text.text == text.take_delta() == ""
    with pytest.raises(ValueError, match="no tokenizer"):
        CompletionText(None, SamplingParams(stop="x"), {EOS})


def test_a_token_after_the_end_is_refused():
    text = completion()
    text.append(EOS)
    with pytest.raises(RuntimeError, match="after the end"):
        text.append(EOS)

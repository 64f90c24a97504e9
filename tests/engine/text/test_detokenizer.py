"""Pieces of text join to the whole text, whatever the tokenizer and the ids."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from engine.text.stop_checker import IncrementalDetokenizer
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


@pytest.fixture(params=sorted(TOKENIZERS))
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    build: Callable[[], PreTrainedTokenizerBase] = TOKENIZERS[request.param]
    return build()


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
@pytest.mark.parametrize("skip_special_tokens", [True, False])
@settings(max_examples=examples(150))
@given(data=st.data())
def test_pieces_join_to_the_text_of_all_ids(kind: str, skip_special_tokens: bool, data):
    tokenizer = TOKENIZERS[kind]()
    some_id = st.integers(0, len(tokenizer) + UNKNOWN_IDS)
    ids = data.draw(st.lists(some_id, max_size=40))
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    told = ""
    for count, token_id in enumerate(ids, start=1):
        told += detokenizer.append(token_id)
        so_far = whole_text(tokenizer, ids[:count], skip_special_tokens=skip_special_tokens)
        assert so_far.startswith(told)
    whole = whole_text(tokenizer, ids, skip_special_tokens=skip_special_tokens)
    told += detokenizer.flush()
    # An unfinished character at the end is dropped; decode shows it as U+FFFD.
    assert told == whole or whole.endswith(REPLACEMENT)


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


# Bytes that are no text, each a token: alone, begun characters, characters that lack a byte.
NO_TEXT = [b"\xff", b"\x80", b"\xe2", b"\xf0\x9f\x98", b"\xe2\x82", b"a\xff", b"\xc3\x28"]


@pytest.mark.parametrize("data", NO_TEXT)
@pytest.mark.parametrize("end", [b"", b"a", b"\x82\xac", b"\xf0\x9f\xa6\x8a"])
def test_a_long_run_of_bytes_that_are_no_text_is_told_as_it_comes(data: bytes, end: bytes):
    tokenizer = byte_level()
    ids = byte_tokens(tokenizer, data * 100 + end)
    detokenizer = IncrementalDetokenizer(tokenizer)
    told = ""
    for count, token_id in enumerate(ids, start=1):
        told += detokenizer.append(token_id)
        whole = whole_text(tokenizer, ids[:count])
        assert told in (whole, whole[:-1])
    assert (told + detokenizer.flush()).rstrip(REPLACEMENT) == whole.rstrip(REPLACEMENT)


@settings(max_examples=examples(25))
@given(data=st.lists(st.sampled_from([b"\xff", b"\xe2", b"\x82", b"\xac", b"\xf0", b"a"])))
def test_a_window_is_shortened_anywhere_and_the_text_stays(data: list[bytes]):
    tokenizer = byte_level()
    ids = byte_tokens(tokenizer, b"\xe2\x82" * 20 + b"".join(data) + b"\xf0\x9f" * 12)
    detokenizer = IncrementalDetokenizer(tokenizer)
    told = ""
    for count, token_id in enumerate(ids, start=1):
        told += detokenizer.append(token_id)
        whole = whole_text(tokenizer, ids[:count])
        assert told in (whole, whole[:-1])


@pytest.mark.parametrize("data", NO_TEXT)
@pytest.mark.parametrize("kind", ["byte_level", "llama_style"])
def test_what_is_decoded_is_linear_in_a_run_of_bytes_that_are_no_text(
    kind: str, data: bytes, monkeypatch: pytest.MonkeyPatch
):
    tokenizer = TOKENIZERS[kind]()
    make = byte_tokens if kind == "byte_level" else byte_pieces
    ids = make(tokenizer, data * 400)
    num_decoded = 0
    decode = tokenizer.decode

    def counted(given, **options):
        nonlocal num_decoded
        num_decoded += len(given)
        return decode(given, **options)

    monkeypatch.setattr(tokenizer, "decode", counted)
    detokenizer = IncrementalDetokenizer(tokenizer)
    for token_id in ids:
        detokenizer.append(token_id)
    detokenizer.flush()
    assert num_decoded <= 40 * len(ids)


def test_what_is_decoded_again_does_not_grow_with_the_text(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
):
    lengths: list[int] = []
    decode = tokenizer.decode

    def counted(ids, **options):
        lengths.append(len(ids))
        return decode(ids, **options)

    monkeypatch.setattr(tokenizer, "decode", counted)
    ids = tokenizer.encode("the dog, a fox. ", add_special_tokens=False) * 40
    specials = [i for i in tokenizer.all_special_ids if i not in (None, *ids)]
    detokenizer = IncrementalDetokenizer(tokenizer)
    for token_id in ids + specials * 200 + ids:
        detokenizer.append(token_id)
    assert max(lengths) <= 32 < len(ids)

"""Text, bytes and text offset of single tokens, for tokenizers of every kind."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omni.server.openai.answers import (
    Answer,
    AssistantMessage,
    ChatAudio,
    Choice,
    TokenOffsets,
    TokenTexts,
    as_json,
)
from tests.support.examples import examples
from tests.support.tokenizers import TOKENIZERS, byte_level, llama_style, word_piece

TEXTS = [
    "the quick brown fox — 12 € for a crème brûlée",
    "naïve\ncafé 日本語 the 🦊🦊 dog",
    "ééé\u200b\U0001d518",
    "\ufffdthe\ufffd",
    "",
]

BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]


def offsets_in(name: str, ids: list[int]) -> tuple[str, list[tuple[str, int]]]:
    """The text of some tokens, and each token with its offset."""
    tokenizer = TOKENIZERS[name]()
    texts = TokenTexts(tokenizer)
    places = TokenOffsets(tokenizer, texts)
    found = [(texts.text(each), places.append(each)) for each in ids]
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return str(text), found


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["byte_level", "llama_style"])
def test_the_bytes_of_all_tokens_join_to_the_text(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]()
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(texts.bytes_of(each) or b"-" for each in ids).decode() == text


def test_every_byte_is_a_token() -> None:
    tokenizer = byte_level()
    texts = TokenTexts(tokenizer)
    ordinary = [each for each in range(len(tokenizer)) if each not in tokenizer.all_special_ids]
    found = [texts.bytes_of(each) for each in ordinary]
    assert {bytes([each]) for each in range(256)} <= set(found)
    for each, own in zip(ordinary, found, strict=True):
        assert own is not None and own.decode(errors="replace") == texts.text(each)


def test_a_token_has_its_leading_space() -> None:
    for tokenizer, piece, text in ((llama_style(), "▁dog", " dog"), (word_piece(), "dog", " dog")):
        texts = TokenTexts(tokenizer)
        token_id = tokenizer.convert_tokens_to_ids(piece)
        assert texts.text(token_id) == text and texts.bytes_of(token_id) == text.encode()


def test_special_tokens_are_their_names_and_unknown_ids_are_empty() -> None:
    for name, special in (
        ("byte_level", "<|eos|>"),
        ("llama_style", "</s>"),
        ("word_piece", "[SEP]"),
    ):
        tokenizer = TOKENIZERS[name]()
        texts = TokenTexts(tokenizer)
        token_id = tokenizer.convert_tokens_to_ids(special)
        assert texts.text(token_id) == special and texts.bytes_of(token_id) == special.encode()
        assert texts.text(10**6) == "" and texts.bytes_of(10**6) is None


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("seed", range(8))
def test_a_plain_token_is_at_its_offset(name: str, seed: int) -> None:
    tokenizer = TOKENIZERS[name]()
    generator = random.Random(seed)
    ids = [generator.randrange(len(tokenizer)) for _ in range(80)]
    text, found = offsets_in(name, ids)
    offsets = [offset for _, offset in found]
    assert offsets == sorted(offsets)
    # Byte pieces that do not form valid UTF-8 together have no text.
    left_out = {*tokenizer.all_special_ids, *map(tokenizer.convert_tokens_to_ids, BYTE_PIECES)}
    plain = [
        place
        for token_id, place in zip(ids, found, strict=True)
        if token_id not in left_out and "\ufffd" not in place[0]
    ]
    assert plain
    for token, offset in plain[1:]:  # the first may lose its space
        assert text[offset : offset + len(token)] == token


def test_parts_of_a_character_have_its_offset() -> None:
    tokenizer = byte_level()
    specials = {"eos": tokenizer.eos_token_id}
    ids = tokenizer.encode("🦊 €日", add_special_tokens=False)
    text, found = offsets_in("byte_level", [specials["eos"], *ids, specials["eos"]])
    assert text == "🦊 €日"
    own = TokenTexts(tokenizer)
    joined = b""
    for token_id, (_, offset) in zip(ids, found[1:], strict=False):
        assert offset == len(joined.decode(errors="ignore"))
        joined += own.bytes_of(token_id) or b""
    assert found[0] == ("<|eos|>", 0) and found[-1] == ("<|eos|>", len(text))


def test_byte_pieces_have_the_offset_of_their_run() -> None:
    tokenizer = llama_style()
    ids = tokenizer.encode("a€€the", add_special_tokens=False)
    text, found = offsets_in("llama_style", ids)
    assert text == "a€€the"
    assert [offset for _, offset in found] == [0, *[1] * (len(ids) - 1)]


@settings(max_examples=examples(50))
@given(text=st.text())
@example('"')
@example('","finish_reason":"stop"')
@example("data: x\n\n")
@example("\u2028é😀")
def test_no_text_escapes_from_its_event(text: str):
    delta = AssistantMessage(content=text, audio=ChatAudio(id="audio-1", transcript=text))
    event = as_json(
        Answer(id="1", object="o", created=1, model="m", choices=[Choice(index=0, delta=delta)])
    )
    (choice,) = json.loads(event)["choices"]
    assert choice["delta"]["content"] == choice["delta"]["audio"]["transcript"] == text
    assert choice["finish_reason"] is None and b"\n" not in event

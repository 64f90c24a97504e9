"""Why our detokenizer is not the one of ``tokenizers``: where the two agree, and where not.

The second test fails once ``DecodeStream`` can be taken instead.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from engine.text.stop_checker import IncrementalDetokenizer
from tests.support.examples import examples
from tests.support.tokenizers import TOKENIZERS

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    tokenizer = TOKENIZERS[kind]()
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def streamed(tokenizer: PreTrainedTokenizerFast, ids: list[int], *, skip: bool) -> str:
    stream = DecodeStream(skip_special_tokens=skip)
    return "".join(stream.step(tokenizer.backend_tokenizer, each) or "" for each in ids)


def ours(tokenizer: PreTrainedTokenizerFast, ids: list[int], *, skip: bool) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    return "".join(map(detokenizer.append, ids)) + detokenizer.flush()


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
@settings(max_examples=examples(25))
@given(text=st.text(max_size=30))
def test_they_agree_on_text_and_its_special_tokens(kind: str, skip: bool, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text.replace(REPLACEMENT, ""), add_special_tokens=False)
    assert isinstance(ids, list)
    ids = [*ids, *tokenizer.all_special_ids, *ids]
    ends_open = kind == "llama_style" and tokenizer.convert_ids_to_tokens(ids[-1:])[0][0] == "<"
    if not ends_open:
        assert streamed(tokenizer, ids, skip=skip) == ours(tokenizer, ids, skip=skip)


def test_on_bytes_that_are_no_text_only_ours_tells_what_decoding_all_at_once_does() -> None:
    """Random ids, as a small model draws them: wrong text and errors with a byte fallback."""
    source = random.Random(0)
    tokenizer = tokenizer_of("llama_style")
    num_wrong, num_raised = 0, 0
    for _ in range(200):
        ids = [source.randrange(len(tokenizer)) for _ in range(20)]
        whole = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(whole, str)
        # An unfinished character at the end is dropped.
        assert whole.endswith(REPLACEMENT) or ours(tokenizer, ids, skip=True) == whole
        try:
            num_wrong += not whole.startswith(streamed(tokenizer, ids, skip=True))
        except Exception as error:
            num_raised += "Invalid prefix" in str(error)
    assert num_wrong > 10 and num_raised > 10


def test_of_a_run_of_bytes_that_are_no_text_only_ours_tells_something() -> None:
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer.convert_tokens_to_ids(["\xff"] * 50)
    assert isinstance(ids, list)
    assert streamed(tokenizer, ids, skip=True) == ""
    assert ours(tokenizer, ids, skip=True) == REPLACEMENT * 49

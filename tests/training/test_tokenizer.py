"""The tokenizer that ships with the trained checkpoint."""

from __future__ import annotations

from itertools import compress

import pytest
from transformers import PreTrainedTokenizerFast

from training.spoken_sums.conversations import Turn
from training.spoken_sums.rendering import Renderer
from training.spoken_sums.tokenizer import HEARD_WORDS, NOISE, SPECIALS, build_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


def test_special_tokens_come_first_and_in_order(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.convert_tokens_to_ids(list(SPECIALS)) == list(range(len(SPECIALS)))


@pytest.mark.parametrize("word", HEARD_WORDS)
def test_a_word_of_sums_is_one_token_at_the_start_and_after_a_space(
    tokenizer: PreTrainedTokenizerFast, word: str
) -> None:
    assert len(tokenizer(word)["input_ids"]) == len(tokenizer(f" {word}")["input_ids"]) == 1


@pytest.mark.parametrize(
    "text", ["12 + 30 = forty two", "hello, wörld! x\n", "that is not a sum i know"]
)
def test_texts_come_back_whole(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_capital_letters_are_read_as_small_ones(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer("Twelve PLUS")["input_ids"] == tokenizer("twelve plus")["input_ids"]


def test_digits_stand_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.tokenize("12 + 30") == ["1", "2", "Ġ+", "Ġ3", "0"]


def test_training_reads_what_the_chat_template_writes(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = Renderer(tokenizer)
    turns = [Turn("", "one plus two", "1 + 2 = three"), Turn("", "", "4 * 2 = eight")]
    rendered = renderer.render(turns, [None, 3])
    messages = [
        {"role": "user", "content": "one plus two"},
        {"role": "assistant", "content": "1 + 2 = three"},
        {"role": "user", "content": [{"type": "audio"}]},
        {"role": "assistant", "content": "4 * 2 = eight"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    text = text.replace("<|AUDIO|>", "<|AUDIO|>" * 3)
    assert rendered.token_ids == tokenizer(text)["input_ids"]
    learnt = list(compress(rendered.token_ids, rendered.learnt))
    assert tokenizer.decode(learnt) == "1 + 2 = three<|im_end|>4 * 2 = eight<|im_end|>"
    assert rendered.token_ids[rendered.sounds[0][0] :][:3] == [renderer.audio_id] * 3


@pytest.mark.parametrize(
    "text",
    [
        "200+1",
        "what is 300 - 1?",
        "007 + 1",
        "1 + 2 + 3",
        "five Plus 5 minus 2",
        "7 * -2",
        "1" * 999,
    ],
)
def test_what_a_user_types_that_is_out_of_range_becomes_a_word_of_no_sum(
    tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    for content in (text, [{"type": "audio"}, {"type": "text", "text": text}]):
        messages = [{"role": "user", "content": content}]
        assert str(tokenizer.apply_chat_template(messages, tokenize=False)).count("million") == 1


@pytest.mark.parametrize(
    "text", ["99 + 99", "twenty-one plus thirty-four", "and times 2?", "12-5", "how much is 4 x 4"]
)
def test_what_may_be_a_sum_and_replies_are_read_as_they_are(
    tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    reply = "198 - 100 - 1 = three"
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": reply}]
    rendered = str(tokenizer.apply_chat_template(messages, tokenize=False))
    assert text in rendered and reply in rendered and "million" not in rendered


def test_words_that_are_no_part_of_sums_are_heard_as_one_noise(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    renderer = Renderer(tokenizer)
    heard = tokenizer.convert_ids_to_tokens(renderer.heard_ids("a twelve is big small plus i"))
    assert heard == [NOISE, "Ġtwelve", "Ġis", NOISE, "Ġplus", NOISE]

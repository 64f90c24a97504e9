"""Questions and answers against a table by hand, and the tokenizer that reads them."""

from __future__ import annotations

import random
import re
from itertools import compress

import pytest
from transformers import PreTrainedTokenizerFast

from training.spoken_sums.conversations import Turn, draw_conversation
from training.spoken_sums.held_out import COUNTS, held_out_questions
from training.spoken_sums.number_words import in_words
from training.spoken_sums.other_figures import HELD_OUT_FIGURES, draw_other_figures
from training.spoken_sums.question_texts import question_texts
from training.spoken_sums.rendering import Renderer
from training.spoken_sums.sums import (
    NOT_A_SUM,
    SIGNS,
    Sum,
    follow_ups,
    held_out_sums,
    is_held_out,
    training_sums,
)
from training.spoken_sums.tokenizer import HEARD_WORDS, NOISE, SPECIALS, build_tokenizer
from training.spoken_sums.understanding import right_reply, understood, written

CALCULATED = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (13, "thirteen"),
        (30, "thirty"),
        (42, "forty two"),
        (100, "one hundred"),
        (107, "one hundred seven"),
        (154, "one hundred fifty four"),
        (200, "two hundred"),
    ],
)
def test_numbers_are_said_without_hyphen_and_and(number: int, words: str) -> None:
    assert in_words(number) == words


def test_every_number_has_words_of_its_own() -> None:
    assert len({in_words(number) for number in range(201)}) == 201


@pytest.mark.parametrize("number", [-1, 201])
def test_a_number_out_of_range_is_reported(number: int) -> None:
    with pytest.raises(ValueError, match=f"from 0 to 200, got {number}"):
        in_words(number)


@pytest.mark.parametrize("sign", SIGNS)
def test_all_sums_in_range_are_in_training_or_held_out_and_none_in_both(sign: str) -> None:
    table = {
        Sum(left, sign, right)
        for left in range(100)
        for right in range(100)
        if 0 <= CALCULATED[sign](left, right) <= 200
    }
    known, kept = set(training_sums(sign)), set(held_out_sums(sign))
    assert known | kept == table
    assert not known & kept
    assert 0.03 < len(kept) / len(table) < 0.06
    assert all(
        one.reply.endswith(f"= {in_words(CALCULATED[sign](one.left, one.right))}") for one in table
    )


def test_no_follow_up_of_training_is_held_out() -> None:
    for left in range(0, 201, 7):
        for sign in SIGNS:
            assert not any(is_held_out(one) for one in follow_ups(left, sign, training=True))


def test_a_result_out_of_range_is_no_sum_that_is_known() -> None:
    assert Sum(3, "-", 5).reply == f"3 - 5 = {NOT_A_SUM}"
    assert Sum(99, "*", 99).result is None


@pytest.mark.parametrize(
    ("words", "last", "reply"),
    [
        ("twelve plus thirty", None, "12 + 30 = forty two"),
        ("what is six times seven", None, "6 * 7 = forty two"),
        ("and times two", 42, "42 * 2 = eighty four"),
        ("minus one", 200, "200 - 1 = one hundred ninety nine"),
        ("and times two", None, NOT_A_SUM),
        ("twelve plus", None, NOT_A_SUM),
        ("twelve thirty", None, NOT_A_SUM),
        ("one plus two plus three", None, NOT_A_SUM),
        ("one hundred plus three", None, NOT_A_SUM),
        ("hello", 3, NOT_A_SUM),
    ],
)
def test_a_question_has_one_right_reply(words: str, last: int | None, reply: str) -> None:
    assert right_reply(words, last)[0] == reply


def test_conversations_of_training_follow_the_rule() -> None:
    draw = random.Random(7)
    for _ in range(500):
        last: int | None = None
        for turn in draw_conversation(draw):
            assert turn.reply == right_reply(turn.words, last)[0]
            one = written(turn.reply)
            assert one is None or not is_held_out(one)
            last = None if one is None else one.result


def test_no_question_that_is_said_in_training_is_held_out() -> None:
    asked = (understood(words) for words in question_texts(3000, seed=1))
    assert not any(is_held_out(one) for one in asked if one is not None)


def test_figures_are_about_sums_that_are_held_out() -> None:
    questions = held_out_questions()
    assert len(questions) == sum(COUNTS.values()) == 300
    assert all(is_held_out(question.sum) for question in questions)
    assert all(understood(question.words) == question.sum for question in questions)


def test_figures_that_are_no_sum_are_none_and_no_follow_up_either() -> None:
    is_one = re.compile(r"(?:what is |and )?(?:\d{1,2} ?)?[-+*] ?\d{1,2}(?: ?[=?])*")
    for text in ("12+30", "what is 12 - 3?", "and * 2", "99 * 0 ="):
        assert is_one.fullmatch(text)
    draw = random.Random(0)
    drawn = {draw_other_figures(draw) for _ in range(3000)}
    assert not [text for text in (*drawn, *HELD_OUT_FIGURES) if is_one.fullmatch(text)]
    assert drawn.isdisjoint(HELD_OUT_FIGURES)
    assert {"+", "-", "*", "/", "."} <= set("".join(drawn))


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

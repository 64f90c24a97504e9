"""Conversations: a user's questions, turn by turn, and the expected replies."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import cache

from training.spoken_sums.number_words import in_words
from training.spoken_sums.other_figures import draw_other_figures
from training.spoken_sums.other_words import draw_other
from training.spoken_sums.sums import (
    NOT_A_SUM,
    SIGNS,
    SMALL,
    Sign,
    Sum,
    follow_ups,
    is_held_out,
    out_of_range,
    small_sums,
    training_sums,
)

_SIGN_WEIGHTS = (4, 3, 3)
_OUT_OF_RANGE = 0.08
"""Share of sums whose result is out of range."""
_SMALL_SHARE = 0.25
"""Probability of drawing from small numbers only."""
_SPOKEN = ("{}", "{}", "{}", "{}", "what is {}", "what is {}", "how much is {}", "and {}")
_TYPED = (
    *("{}", "{}", "{}?", "what is {}", "what is {}?", "how much is {}?", "and {}", "and {}?"),
    *("what's {}?", "{}.", "{} =", "{} = ?"),
)
_TENS_AND_ONES = re.compile(
    f"({'|'.join(in_words(number) for number in range(20, 100, 10))})"
    f" ({'|'.join(in_words(number) for number in range(1, 10))})"
)
_SIGNS = {"+": ("+", "plus"), "-": ("-", "minus", "−"), "*": ("*", "times", "×", "x")}


@dataclass(frozen=True, slots=True)
class Turn:
    """One question with its reply.

    Attributes:
        words: the spoken form; lower case, no punctuation.
        typed: the typed form, in words or digits.
        reply: the expected text.
    """

    words: str
    typed: str
    reply: str


def draw_sum(draw: random.Random) -> Sum:
    """Draw a training sum; small ones are likelier than others of the same operation."""
    if draw.random() < _OUT_OF_RANGE:
        return _draw_near(out_of_range(draw.choice(("-", "*")), training=True), draw)
    sign = draw.choices(SIGNS, _SIGN_WEIGHTS)[0]
    is_small = draw.random() < _SMALL_SHARE
    return draw.choice(_small_of_training(sign) if is_small else training_sums(sign))


@cache
def _small_of_training(sign: Sign) -> tuple[Sum, ...]:
    return tuple(each for each in small_sums(sign) if not is_held_out(each))


def _draw_near(sums: tuple[Sum, ...], draw: random.Random) -> Sum:
    """Draw a sum out of range; half of the time the nearer of two, where errors are common."""
    one, other = draw.choice(sums), draw.choice(sums)
    return min(one, other, key=lambda each: each.off) if draw.random() < 0.5 else one


def spoken_form(one: Sum, draw: random.Random) -> str:
    """Return one of the ways to ask a sum."""
    return draw.choice(_SPOKEN).format(one.words)


def typed_form(one: Sum, draw: random.Random) -> str:
    """Return one of the ways to type a sum, in words or digits."""
    if draw.random() < 0.7:
        return draw.choice(_TYPED).format(_hyphened(one.words, draw))
    sign = draw.choice(_SIGNS[one.sign])
    space = "" if len(sign) == 1 and sign != "x" and draw.random() < 0.3 else " "
    return draw.choice(_TYPED).format(f"{one.left}{space}{sign}{space}{one.right}")


def _hyphened(words: str, draw: random.Random) -> str:
    """Sometimes put hyphens between tens and ones, as people often type them."""
    return _TENS_AND_ONES.sub(r"\1-\2", words) if draw.random() < 0.2 else words


def follow_up_words(one: Sum, draw: random.Random) -> str:
    """Return the question for a sum whose first number is the last result."""
    words = one.words.split(one.name)[1].strip()
    return draw.choice(("{} {}", "and {} {}")).format(one.name, words)


def _typed_follow_up(one: Sum, words: str, draw: random.Random) -> str:
    if draw.random() < 0.3:
        return draw.choice(("{}{}", "{} {}", "and {} {}", "and {} {}?")).format(
            draw.choice(_SIGNS[one.sign][:2]), one.right
        )
    return _hyphened(words, draw) + draw.choice(("", "?"))


def draw_conversation(draw: random.Random) -> list[Turn]:
    """Draw one to four turns; the first is usually a sum."""
    turns: list[Turn] = []
    last: int | None = None
    for _ in range(draw.choices((1, 2, 3, 4), (30, 25, 20, 25))[0]):
        turn, last = draw_turn(draw, last, is_first=not turns)
        turns.append(turn)
    return turns


def draw_turn(draw: random.Random, last: int | None, *, is_first: bool) -> tuple[Turn, int | None]:
    """Draw a turn that may continue from the last result; also return its result, or None."""
    kind = draw.random()
    if kind < 0.15:
        words = draw_other(draw)
        typed = words + draw.choice(("", "", "?", "."))
        if draw.random() < 0.65:
            typed = draw_other_figures(draw)
        return Turn(words, typed, NOT_A_SUM), None
    if (is_first and kind < 0.18) or (last is None and not is_first and kind < 0.29):
        one = Sum(0, draw.choice(SIGNS), draw.randint(0, 99))
        words = follow_up_words(one, draw)
        return Turn(words, _typed_follow_up(one, words, draw), NOT_A_SUM), None
    if not is_first and last is not None and kind < 0.49:
        sign = draw.choices(SIGNS, _SIGN_WEIGHTS)[0]
        known = follow_ups(last, sign, training=True)
        beyond = out_of_range(sign, last, training=True)
        if beyond and (not known or draw.random() < 2 * _OUT_OF_RANGE):
            one = _draw_near(beyond, draw)
        else:
            likely = [each for each in known if each.right <= SMALL]
            one = draw.choice(likely if likely and draw.random() < _SMALL_SHARE else known)
        words = follow_up_words(one, draw)
        return Turn(words, _typed_follow_up(one, words, draw), one.reply), one.result
    one = draw_sum(draw)
    return Turn(spoken_form(one, draw), typed_form(one, draw), one.reply), one.result

"""Rule-based parser of questions in words: the ground truth for training and evaluation."""

from __future__ import annotations

import re
from functools import cache

from training.spoken_sums.number_words import in_words
from training.spoken_sums.sums import LARGEST_ASKED, NOT_A_SUM, SIGNS, Sum


@cache
def _pattern() -> re.Pattern[str]:
    number = "|".join(sorted(_numbers(), key=len, reverse=True))
    name = "|".join(_signs())
    begin = "(?:what is |how much is |and )?"
    return re.compile(rf"{begin}(?:(?P<left>{number}) )?(?P<name>{name}) (?P<right>{number})")


@cache
def _numbers() -> dict[str, int]:
    return {in_words(number): number for number in range(LARGEST_ASKED + 1)}


@cache
def _signs() -> dict[str, str]:
    return {Sum(0, sign, 0).name: sign for sign in SIGNS}


def understood(words: str, last: int | None = None) -> Sum | None:
    """Return the sum in a question; None if it is not a sum.

    Args:
        words: the question.
        last: the previous result, from which a follow-up continues.
    """
    match = _pattern().fullmatch(words)
    if match is None:
        return None
    left = last if match["left"] is None else _numbers()[match["left"]]
    if left is None:
        return None
    return next(
        Sum(left, sign, _numbers()[match["right"]])
        for sign in SIGNS
        if _signs()[match["name"]] == sign
    )


def right_reply(words: str, last: int | None = None) -> tuple[str, int | None]:
    """Return the reply to a question, and its result; see :func:`understood`."""
    one = understood(words, last)
    return (NOT_A_SUM, None) if one is None else (one.reply, one.result)


def written(reply: str) -> Sum | None:
    """Return the sum at the start of a reply; None if there is none."""
    match = re.match(r"(\d+) ([-+*]) (\d+) = ", reply)
    if match is None:
        return None
    return next(Sum(int(match[1]), sign, int(match[3])) for sign in SIGNS if sign == match[2])

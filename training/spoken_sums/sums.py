"""Questions and answers: sums of two numbers, follow-ups to them, and what is no sum.

Numbers that are asked go from 0 to 99, results from 0 to 200. A follow-up ("and times two?") takes
the last reply's result as its first number. Which sums are held out of training is determined by
``_SEED``: no sum of training is among them, neither asked whole nor as a follow-up.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Literal

from training.spoken_sums.number_words import LARGEST, in_words

__all__ = [
    "LARGEST_ASKED",
    "NOT_A_SUM",
    "SIGNS",
    "Sign",
    "Sum",
    "follow_ups",
    "held_out_sums",
    "is_held_out",
    "training_sums",
]

NOT_A_SUM = "that is not a sum i know"
"""The whole reply to what is no sum; the end of the reply to one whose result is out of range."""

LARGEST_ASKED = 99

Sign = Literal["+", "-", "*"]
SIGNS: tuple[Sign, ...] = ("+", "-", "*")

_SEED = 20
_HELD_OUT = 0.04
_NAMES = {"+": "plus", "-": "minus", "*": "times"}


@dataclass(frozen=True, slots=True, order=True)
class Sum:
    """Two numbers and what is done with them.

    Attributes:
        left: from 0 to 99, in a follow-up to 200.
        sign: ``*`` is a product.
        right: from 0 to 99.
    """

    left: int
    sign: Sign
    right: int

    @property
    def result(self) -> int | None:
        """From 0 to 200; None where it lies outside."""
        value = {
            "+": self.left + self.right,
            "-": self.left - self.right,
            "*": self.left * self.right,
        }[self.sign]
        return value if 0 <= value <= LARGEST else None

    @property
    def name(self) -> str:
        """How its sign is said."""
        return _NAMES[self.sign]

    @property
    def words(self) -> str:
        """How it is asked, such as ``twelve plus thirty``."""
        return f"{in_words(self.left)} {self.name} {in_words(self.right)}"

    @property
    def answer(self) -> str:
        """What is said: the result in words, or :data:`NOT_A_SUM`."""
        return NOT_A_SUM if self.result is None else in_words(self.result)

    @property
    def reply(self) -> str:
        """What is written: what was asked in figures, and the answer in words."""
        return f"{self.left} {self.sign} {self.right} = {self.answer}"


@cache
def _split() -> tuple[tuple[Sum, ...], tuple[Sum, ...]]:
    """All sums with a result, follow-ups' too: those of training, and those held out."""
    draw = random.Random(_SEED)
    training: list[Sum] = []
    held_out: list[Sum] = []
    for sign in SIGNS:
        every = [
            Sum(left, sign, right)
            for left in range(LARGEST + 1)
            for right in range(LARGEST_ASKED + 1)
            if Sum(left, sign, right).result is not None
        ]
        draw.shuffle(every)
        size = round(_HELD_OUT * len(every))
        held_out += every[:size]
        training += every[size:]
    return tuple(sorted(training)), tuple(sorted(held_out))


@cache
def _asked(sign: Sign, training: bool) -> tuple[Sum, ...]:
    sums = _split()[0 if training else 1]
    return tuple(each for each in sums if each.sign == sign and each.left <= LARGEST_ASKED)


def training_sums(sign: Sign) -> tuple[Sum, ...]:
    """Sums that may be asked in training, of two numbers up to 99."""
    return _asked(sign, True)


def held_out_sums(sign: Sign) -> tuple[Sum, ...]:
    """Sums that training never sees, of two numbers up to 99."""
    return _asked(sign, False)


@cache
def _follow_ups(left: int, sign: Sign, training: bool) -> tuple[Sum, ...]:
    sums = _split()[0 if training else 1]
    return tuple(each for each in sums if each.left == left and each.sign == sign)


def follow_ups(left: int, sign: Sign, *, training: bool) -> tuple[Sum, ...]:
    """What may be asked of the last result, in training or held out."""
    return _follow_ups(left, sign, training)


@cache
def is_held_out(one: Sum) -> bool:
    """Whether a sum is kept from training."""
    return one in _held_out()


@cache
def _held_out() -> frozenset[Sum]:
    return frozenset(_split()[1])

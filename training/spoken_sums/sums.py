"""Questions and answers: sums of two numbers, follow-ups, and everything that is not a sum.

Operands are from 0 to 99, results from 0 to 200. A follow-up ("and times two?") uses the last
reply's result as its first number. ``_SEED`` determines the sums held out of training: they never
occur in it, neither as whole questions nor as follow-ups. Sums whose result is out of range are
split in the same way.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Literal

from training.spoken_sums.number_words import LARGEST, in_words

NOT_A_SUM = "that is not a sum i know"
"""The reply to anything but a sum; also the end of the reply if the result is out of range."""

LARGEST_ASKED = 99

SMALL = 12
"""Sums of two numbers up to this are one in forty, and the ones people ask first."""

Sign = Literal["+", "-", "*"]
SIGNS: tuple[Sign, ...] = ("+", "-", "*")

_SEED, _SEED_OUT_OF_RANGE = 20, 21
_HELD_OUT = 0.04
_NAMES = {"+": "plus", "-": "minus", "*": "times"}


@dataclass(frozen=True, slots=True, order=True)
class Sum:
    """Two numbers and an operation.

    Attributes:
        left: from 0 to 99; in a follow-up up to 200.
        sign: ``*`` is a product.
        right: from 0 to 99.
    """

    left: int
    sign: Sign
    right: int

    @property
    def value(self) -> int:
        """The value, in range or not."""
        return {
            "+": self.left + self.right,
            "-": self.left - self.right,
            "*": self.left * self.right,
        }[self.sign]

    @property
    def result(self) -> int | None:
        """The value if it is from 0 to 200, else None."""
        return None if self.off else self.value

    @property
    def off(self) -> int:
        """Distance of the value from the range; 0 inside."""
        return max(0, -self.value, self.value - LARGEST)

    @property
    def name(self) -> str:
        """The sign in words."""
        return _NAMES[self.sign]

    @property
    def words(self) -> str:
        """The question, such as ``twelve plus thirty``."""
        return f"{in_words(self.left)} {self.name} {in_words(self.right)}"

    @property
    def answer(self) -> str:
        """The spoken answer: the result in words, or :data:`NOT_A_SUM`."""
        return NOT_A_SUM if self.result is None else in_words(self.result)

    @property
    def reply(self) -> str:
        """The text: the question in digits, and the answer in words."""
        return f"{self.left} {self.sign} {self.right} = {self.answer}"


_Split = tuple[tuple[Sum, ...], tuple[Sum, ...]]
"""Training sums, and held-out sums."""


@cache
def _split() -> _Split:
    """Split all sums with a result, including follow-ups."""
    return _divided(random.Random(_SEED), have_results=True)


@cache
def _split_out_of_range() -> _Split:
    """Split all sums whose result is out of range, including follow-ups."""
    return _divided(random.Random(_SEED_OUT_OF_RANGE), have_results=False)


def _divided(draw: random.Random, *, have_results: bool) -> _Split:
    training: list[Sum] = []
    held_out: list[Sum] = []
    for sign in SIGNS:
        every = [
            one
            for left in range(LARGEST + 1)
            for right in range(LARGEST_ASKED + 1)
            if ((one := Sum(left, sign, right)).result is not None) == have_results
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
    """Return training sums of two numbers up to 99."""
    return _asked(sign, True)


def held_out_sums(sign: Sign) -> tuple[Sum, ...]:
    """Return held-out sums of two numbers up to 99."""
    return _asked(sign, False)


@cache
def small_sums(sign: Sign) -> tuple[Sum, ...]:
    """Return all sums of two small numbers, held out or not."""
    every = sorted(_asked(sign, True) + _asked(sign, False))
    return tuple(each for each in every if max(each.left, each.right) <= SMALL)


@cache
def _follow_ups(left: int, sign: Sign, training: bool) -> tuple[Sum, ...]:
    sums = _split()[0 if training else 1]
    return tuple(each for each in sums if each.left == left and each.sign == sign)


def follow_ups(left: int, sign: Sign, *, training: bool) -> tuple[Sum, ...]:
    """Return the follow-ups to the last result, of training or held out."""
    return _follow_ups(left, sign, training)


@cache
def out_of_range(sign: Sign, left: int | None = None, *, training: bool) -> tuple[Sum, ...]:
    """Return sums without a result, of training or held out; empty if all have one.

    Args:
        sign: the operation.
        left: the last result, for follow-ups; None for whole questions.
        training: if true, training sums; otherwise held-out ones.
    """
    sums = _split_out_of_range()[0 if training else 1]
    return tuple(
        each
        for each in sums
        if each.sign == sign and (each.left <= LARGEST_ASKED if left is None else each.left == left)
    )


def is_held_out(one: Sum) -> bool:
    """Return True if a sum is held out of training."""
    return one in _held_out()


@cache
def _held_out() -> frozenset[Sum]:
    return frozenset(_split()[1] + _split_out_of_range()[1])

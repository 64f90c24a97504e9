"""Inputs in digits that are not sums: numbers over 99, three numbers, other signs."""

from __future__ import annotations

import random

from training.spoken_sums.sums import LARGEST_ASKED, SIGNS

HELD_OUT_FIGURES: tuple[str, ...] = (
    "100 + 1",
    "100 + 100",
    "2 * 100",
    "what is 150 - 60?",
    "101-1",
    "5 + 250",
    "1+2+3",
    "10 - 4 - 2",
    "2 * 3 + 4",
    "3.5 + 2",
    "8 - 0.5",
    "-5 + 3",
    "7 * -2",
    "10 / 2",
    "36÷6",
    "2^3",
    "(1+2)*3",
    "42",
    "12 30",
    "6 *",
)
"""Held out of training."""

_LARGE = (100, 999)


def draw_other_figures(draw: random.Random) -> str:
    """Draw a text in digits that is neither a sum nor a follow-up."""
    while True:
        text = _drawn(draw)
        if text not in HELD_OUT_FIGURES:
            return text


def _drawn(draw: random.Random) -> str:
    one, other, third = (draw.randint(0, LARGEST_ASKED) for _ in range(3))
    # Follow-ups start from results up to 200: numbers near them are confused most.
    large = draw.randint(_LARGE[0], 200) if draw.random() < 0.7 else draw.randint(*_LARGE)
    tenth = draw.randint(1, 9)
    space = draw.choice(("", " "))
    sign, then = (f"{space}{draw.choice(SIGNS)}{space}" for _ in range(2))
    kinds = (
        (f"{large}{sign}{one}", f"{one}{sign}{large}", f"{large}{sign}{large}"),
        (f"{sign.strip()}{space}{large}", f"and {sign.strip()} {large}"),
        (f"{one}{sign}{other}{then}{third}", f"({one}{sign}{other}){then}{third}"),
        (f"{one}.{tenth}{sign}{other}", f"{one}{sign}{other}.{tenth}"),
        (f"-{one}{sign}{other}", f"{one}{sign}-{other}"),
        tuple(f"{one}{space}{mark}{space}{other}" for mark in "/÷^%:"),
        (f"{one}", f"{large}", f"{one} {other}", f"{one}{sign.rstrip()}"),
    )
    text = draw.choice(draw.choice(kinds))
    return draw.choice(("{}", "{}", "{}?", "what is {}", "{} =")).format(text)

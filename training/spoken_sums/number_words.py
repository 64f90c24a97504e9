"""Numbers from 0 to 200 in words, for questions, text and speech."""

from __future__ import annotations

from training.spoken_sums.word_list import listed

LARGEST = 200
"""The largest result."""

_ONES = listed("""\
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
sixteen seventeen eighteen nineteen
""")
_TENS = listed("""\
twenty thirty forty fifty sixty seventy eighty ninety
""")

NUMBER_WORDS: tuple[str, ...] = (*_ONES, *_TENS, "hundred")
"""All words that occur in numbers."""


def in_words(number: int) -> str:
    """Return a number in words: ``142`` is ``one hundred forty two``.

    Raises:
        ValueError: it is not from 0 to 200.
    """
    if not 0 <= number <= LARGEST:
        raise ValueError(f"numbers go from 0 to {LARGEST}, got {number}")
    hundreds, rest = divmod(number, 100)
    words = [_ONES[hundreds], "hundred"] if hundreds else []
    if rest >= len(_ONES):
        tens, rest = divmod(rest, 10)
        words.append(_TENS[tens - 2])
        words += [_ONES[rest]] if rest else []
    elif rest or not hundreds:
        words.append(_ONES[rest])
    return " ".join(words)

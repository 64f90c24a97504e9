"""Inputs in words that are not sums: other sentences, and incomplete or overlong sums."""

from __future__ import annotations

import random

from training.spoken_sums.number_words import in_words
from training.spoken_sums.sums import LARGEST_ASKED, SIGNS, Sum
from training.spoken_sums.understanding import understood
from training.spoken_sums.word_list import listed

_SENTENCES = """\
hello
good morning
how are you
what is your name
tell me a story
play some music
what time is it
who are you
stop
yes
no
thank you
what is the capital of france
how much is the fish
how much is it
what is that
turn on the light
i do not know
is it raining
where do you live
please help me
set a timer for ten minutes
call me at seven
i have twenty apples
the sky is blue
how many days are in a year
what is love
good night
can you hear me
sing a song
read the news
open the door
what is a plus
i am forty years old
""".strip().splitlines()

HELD_OUT_SENTENCES: tuple[str, ...] = (
    "where is the station",
    "how is the weather today",
    "what is the meaning of life",
    "wake me at six",
    "i bought nine bananas",
    "close the window",
    "who won the game",
    "do you like music",
    "what day is it",
    "nice to meet you",
)
"""Held out of training."""

_COMMON = listed("""\
the of to in that it he was for on are as with his they at be this have from or had by not but
some we can out other were all there when up use your said an each she which do their time if
will way about many then them write would like so these her long make thing see him two has look
more day could go come did number sound no most people my over know water than call first who
may down side been now find any new work part take get place made live where after back little
only round man year came show every good me give our under name very through just form sentence
great think say help low line differ turn cause much mean before move right boy old too same
tell does set three want air well also play small end put home read hand port large spell add
even land here must big high such follow act why ask men change went light kind off need house
picture try us again animal point mother world near build self earth father
""")
_ONSETS = listed("""\
b bl br d dr f fl fr g gl gr h j k kl l m n p pl pr r s sh sk sl sp st t tr v w z
""")
_VOWELS = listed("""\
a e i o u ai ee oa oo ou
""")
_CODAS = ["", "b", "ck", "d", "ft", "g", "l", "ll", "m", "n", "nd", "ng", "p", "r", "s", "st", "t"]
_OPERATIONS = ("divided by", "over", "to the power of", "modulo", "or", "and", "")


def _made_up(draw: random.Random) -> str:
    syllables = draw.choice((1, 1, 2, 2, 3))
    return "".join(
        draw.choice(_ONSETS) + draw.choice(_VOWELS) + draw.choice(_CODAS) for _ in range(syllables)
    )


def _number(draw: random.Random) -> str:
    return in_words(draw.randint(0, LARGEST_ASKED))


def _other_word(draw: random.Random) -> str:
    return draw.choice(_COMMON) if draw.random() < 0.5 else _made_up(draw)


def _sentence(draw: random.Random) -> str:
    """Draw up to seven words, some of which may be numbers or signs."""
    words = [_other_word(draw) for _ in range(draw.randint(1, 7))]
    for place in range(len(words) - 1):
        if draw.random() < 0.2:
            words[place] = draw.choice((_number(draw), draw.choice(("plus", "minus", "times"))))
    draw.shuffle(words)
    return " ".join(words)


def _broken_sum(draw: random.Random) -> str:
    """Draw a sum with a missing part, or with one number too many."""
    left, right, third = (_number(draw) for _ in range(3))
    sign, other = (Sum(0, draw.choice(SIGNS), 0).name for _ in range(2))
    large = in_words(draw.randint(LARGEST_ASKED + 1, 200))
    return draw.choice(
        (
            f"{left} {sign}",
            left,
            f"{left} {right}",
            f"{left} {sign} {right} {other} {third}",
            f"{left} {draw.choice(_OPERATIONS)} {right}",
            f"{left} {sign} {_other_word(draw)}",
            f"{_other_word(draw)} {sign} {right}",
            f"{left} {_other_word(draw)} {right}",
            f"{large} {sign} {right}",
            f"{left} {sign} {large}",
            f"{sign} {other}",
            f"what is {left}",
            "what is",
        )
    ).replace("  ", " ")


def draw_other(draw: random.Random) -> str:
    """Draw a text in words that is neither a sum nor a follow-up."""
    while True:
        kind = draw.random()
        if kind < 0.2:
            return draw.choice(_SENTENCES)
        text = _sentence(draw) if kind < 0.6 else _broken_sum(draw)
        if understood(text, 0) is None:  # it may be a sum by chance
            return text

"""How well the shipped pipeline's own sound is understood: ``python -m`` this module.

Two hundred typed sums go through the pipeline, every result from 0 to 198 and the one sentence,
voice by voice in turn. What the recognizer hears is compared with what the thinker wrote, be it
right or wrong: the mouth is measured here. flite's own speech of the same answers is heard too.
"""

from __future__ import annotations

import argparse
import random

import torch

from omni import ChatPrompt, Omni, OmniRequest
from training.spoken_sums.answers import Utterance, answer_texts, speak
from training.spoken_sums.checkpoint import SPEAKERS
from training.spoken_sums.recognizer import Recognizer
from training.spoken_sums.sums import LARGEST_ASKED, Sum

__all__ = ["main", "questions_with_answers"]

_NO_SUM = "what a lovely day"


def questions_with_answers(seed: int) -> list[tuple[str, str]]:
    """Two hundred typed questions with their right answers: sums and differences at random."""
    draw = random.Random(seed)
    asked: list[tuple[str, str]] = []
    for result in range(2 * LARGEST_ASKED + 1):
        if result <= LARGEST_ASKED and draw.random() < 0.5:
            right = draw.randint(0, LARGEST_ASKED - result)
            one = Sum(result + right, "-", right)
        else:
            left = draw.randint(max(0, result - LARGEST_ASKED), min(result, LARGEST_ASKED))
            one = Sum(left, "+", result - left)
        asked.append((one.words, one.answer))
    return [*asked, (_NO_SUM, answer_texts()[-1])]


def main() -> None:
    """Print shares, and every answer that was not understood."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--pipeline", default="spoken_sums")
    arguments.add_argument("--every", type=int, default=1, help="take each n-th question")
    arguments.add_argument("--seed", type=int, default=0)
    chosen = arguments.parse_args()
    questions = questions_with_answers(chosen.seed)[:: chosen.every]
    names = [tuple(SPEAKERS)[number % len(SPEAKERS)] for number in range(len(questions))]
    requests = [
        OmniRequest(ChatPrompt(({"role": "user", "content": words},)), speaker=name)
        for (words, _), name in zip(questions, names, strict=True)
    ]
    with Omni(chosen.pipeline) as omni:
        outputs = omni.generate(requests)
    recognizer = Recognizer()
    right = understood = by_flite = 0
    for (words, answer), name, output in zip(questions, names, outputs, strict=True):
        written = (output.stages["thinker"].text or "").split(" = ")[-1].strip()
        sound = output.stages["code2wav"].audio
        heard = "" if sound is None else recognizer.hear(torch.as_tensor(sound.samples))
        right += written == answer
        understood += heard == written
        if written in answer_texts():
            by_flite += recognizer.hear(speak(Utterance(written, SPEAKERS[name][0]))) == written
        if heard != written:
            print(f"{name}: {words}: wrote {written!r}, heard {heard!r}")
    count = len(questions)
    print(
        f"{count} answers: {right / count:.1%} written right, {understood / count:.1%} understood"
    )
    print(f"flite's own speech of the same: {by_flite / count:.1%} understood")


if __name__ == "__main__":
    main()

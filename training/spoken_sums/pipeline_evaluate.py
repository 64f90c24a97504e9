"""Measures the intelligibility of the pipeline's sound: ``python -m`` this module.

Two hundred typed sums run through the pipeline, every result from 0 to 198 and the one sentence,
in alternating voices. The recognizer's output is compared with the thinker's text, right or
wrong: this measures the speech only. flite's own speech of the same answers is measured too.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch

from omni import ChatPrompt, Omni, OmniRequest
from training.spoken_sums.answers import Utterance, answer_texts, speak
from training.spoken_sums.checkpoint import SPEAKERS
from training.spoken_sums.recognizer import Recognizer
from training.spoken_sums.sums import LARGEST_ASKED, Sum

STAGES = ("thinker", "talker", "code2wav")
"""Stages of the pipeline; each loads its part of the checkpoint."""

_NO_SUM = "what a lovely day"


def questions_with_answers(seed: int) -> list[tuple[str, str]]:
    """Draw two hundred typed questions with their answers: random sums and differences."""
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


def evaluate_pipeline(
    pipeline: str, *, checkpoint: Path | None = None, every: int = 1, seed: int = 0
) -> list[str]:
    """Run the questions; return lines of figures, and the answers not understood.

    Args:
        pipeline: a name or a file.
        checkpoint: a folder that replaces the pipeline's own.
        every: use every n-th question.
        seed: for the questions.
    """
    questions = questions_with_answers(seed)[::every]
    names = [tuple(SPEAKERS)[number % len(SPEAKERS)] for number in range(len(questions))]
    requests = [
        OmniRequest(ChatPrompt(({"role": "user", "content": words},)), speaker=name)
        for (words, _), name in zip(questions, names, strict=True)
    ]
    own = {} if checkpoint is None else {f"stages.{s}.model": str(checkpoint) for s in STAGES}
    with Omni(pipeline, overrides=own) as omni:
        outputs = omni.generate(requests)
    recognizer = Recognizer()
    right, by_flite = 0, 0
    understood = dict.fromkeys(SPEAKERS, 0)
    lines: list[str] = []
    for (words, answer), name, output in zip(questions, names, outputs, strict=True):
        if output.error is not None:
            lines.append(f"  {name}: {words}: {output.error}")
            continue
        written = (output.stages["thinker"].text or "").split(" = ")[-1].strip()
        sound = output.stages["code2wav"].audio
        heard = "" if sound is None else recognizer.hear(torch.as_tensor(sound.samples))
        right += written == answer
        understood[name] += heard == written
        if written in answer_texts():
            by_flite += recognizer.hear(speak(Utterance(written, SPEAKERS[name][0]))) == written
        if heard != written:
            lines.append(f"  {name}: {words}: wrote {written!r}, heard {heard!r}")
    count = len(questions)
    told = ", ".join(f"{name} {understood[name]} of {names.count(name)}" for name in SPEAKERS)
    return [
        f"{count} answers: {right / count:.1%} written right, "
        f"{sum(understood.values()) / count:.1%} understood; {told}",
        f"flite's own speech of the same: {by_flite / count:.1%} understood",
        *lines,
    ]


def main() -> None:
    """Print shares, and every answer not understood."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pipeline", default="spoken_sums")
    parser.add_argument("--checkpoint", type=Path, help="a folder in place of the pipeline's own")
    parser.add_argument("--every", type=int, default=1, help="take each n-th question")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    lines = evaluate_pipeline(
        given.pipeline, checkpoint=given.checkpoint, every=given.every, seed=given.seed
    )
    print("\n".join(lines))


if __name__ == "__main__":
    main()

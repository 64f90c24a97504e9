"""The shipped thinker's figures, through the engine: held-out questions, typed and spoken.

Run it with ``python -m training.spoken_sums.ears_evaluate FOLDER [--work WORK]``.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from engine import ChatPrompt, EngineConfig, LLMEngine, SamplingParams
from training.spoken_sums.held_out import HeldOutQuestion, held_out_questions, say_held_out
from training.spoken_sums.other_words import HELD_OUT_SENTENCES
from training.spoken_sums.sums import NOT_A_SUM

__all__ = ["evaluate_ears"]

_SAMPLING = SamplingParams(temperature=0.0, max_tokens=24)


def evaluate_ears(checkpoint: Path, work: Path) -> list[str]:
    """Ask all held-out questions; lines of figures.

    Args:
        checkpoint: the folder that ships.
        work: where the questions' sounds are, or will be.
    """
    config = EngineConfig(
        model=str(checkpoint), part="thinker", dtype="float32", block_size=8, num_blocks=2048
    )
    engine = LLMEngine(config)
    questions = held_out_questions()
    typed = [_typed(question.words) for question in questions]
    sounds = say_held_out(work / "held_out")
    part = {"role": "user", "content": [{"type": "audio"}]}
    spoken = [ChatPrompt((part,), {"audio": [path]}) for path in sounds]
    lines = [
        *_figures("typed", questions, _replies(engine, typed)),
        *_figures("spoken", questions, _replies(engine, spoken)),
    ]
    others = _replies(engine, [_typed(sentence) for sentence in HELD_OUT_SENTENCES])
    right = sum(reply == NOT_A_SUM for reply in others)
    lines.append(f"typed sentences that are no sum: {right} of {len(others)} told so")
    engine.close()
    return lines


def _typed(text: str) -> ChatPrompt:
    return ChatPrompt(({"role": "user", "content": text},))


def _replies(engine: LLMEngine, prompts: Sequence[ChatPrompt]) -> list[str]:
    return [each.outputs[0].text for each in engine.generate(list(prompts), _SAMPLING)]


def _figures(name: str, questions: Sequence[HeldOutQuestion], replies: Sequence[str]) -> list[str]:
    asked, right, heard = Counter[str](), Counter[str](), 0
    lines: list[str] = []
    for question, reply in zip(questions, replies, strict=True):
        wanted = question.sum.reply
        asked[question.sum.sign] += 1
        right[question.sum.sign] += reply == wanted
        heard += reply.partition("=")[0] == wanted.partition("=")[0]
        if reply != wanted:
            lines.append(f"  {question.words!r}: {reply!r}")
    by_sign = ", ".join(f"{sign} {right[sign]} of {asked[sign]}" for sign in asked)
    share, total = right.total() / asked.total(), asked.total()
    return [
        f"{name}: {right.total()} of {total} right ({share:.1%}); {by_sign}; "
        f"{heard} of {total} heard right",
        *lines,
    ]


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--work", type=Path, default=Path("/tmp/spoken_sums"))
    arguments = parser.parse_args()
    print("\n".join(evaluate_ears(arguments.checkpoint, arguments.work)))


if __name__ == "__main__":
    main()

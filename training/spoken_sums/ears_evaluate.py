"""Evaluates the thinker through the engine, on held-out questions and conversations.

Run it with ``python -m training.spoken_sums.ears_evaluate FOLDER [--work WORK]``.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine import ChatPrompt, EngineConfig, LLMEngine, SamplingParams
from training.spoken_sums.held_out import HeldOutQuestion, held_out_questions, say_held_out
from training.spoken_sums.held_out_talks import (
    held_out_out_of_range,
    held_out_talks,
    say_held_out_talks,
)
from training.spoken_sums.other_figures import HELD_OUT_FIGURES
from training.spoken_sums.other_words import HELD_OUT_SENTENCES
from training.spoken_sums.sums import NOT_A_SUM, SIGNS, SMALL, small_sums
from training.spoken_sums.work_folder import WORK

_SAMPLING = SamplingParams(temperature=0.0, max_tokens=24)


def evaluate_ears(checkpoint: Path, work: Path, *, every: int = 1) -> list[str]:
    """Ask all held-out questions and return lines of figures.

    Args:
        checkpoint: the checkpoint's folder.
        work: folder of the questions' sounds; missing ones are created.
        every: use every n-th question, for a trial.
    """
    config = EngineConfig(
        model=str(checkpoint), part="thinker", dtype="float32", block_size=8, num_blocks=2048
    )
    engine = LLMEngine(config)
    questions = held_out_questions()[::every]
    typed = [_typed(question.words) for question in questions]
    sounds = say_held_out(work / "held_out", every=every)
    part = {"role": "user", "content": [{"type": "audio"}]}
    spoken = [ChatPrompt((part,), {"audio": [path]}) for path in sounds]
    lines = [
        *_figures("typed", questions, _replies(engine, typed)),
        *_figures("spoken", questions, _replies(engine, spoken)),
    ]
    for name, others in (("sentences", HELD_OUT_SENTENCES), ("figures", HELD_OUT_FIGURES)):
        replies = _replies(engine, [_typed(each) for each in others])
        lines += _counted(
            f"typed {name} that are no sum", others, [NOT_A_SUM] * len(others), replies
        )
    lines += _conversations(engine, work, every)
    small = [one for sign in SIGNS for one in small_sums(sign)][::every]
    lines += _counted(
        f"typed sums of numbers up to {SMALL}, held out or not",
        [one.words for one in small],
        [one.reply for one in small],
        _replies(engine, [_typed(one.words) for one in small]),
    )
    beyond = held_out_out_of_range()[::every]
    lines += _counted(
        "typed sums whose result is out of range",
        [one.words for one in beyond],
        [one.reply for one in beyond],
        _replies(engine, [_typed(one.words) for one in beyond]),
    )
    engine.close()
    return lines


def _conversations(engine: LLMEngine, work: Path, every: int) -> list[str]:
    """Evaluate second turns after correct first ones, each of the two typed or spoken."""
    talks = held_out_talks()[::every]
    sounds = say_held_out_talks(work / "held_out_talks", every=every)
    lines: list[str] = []
    for ways in itertools.product(("typed", "spoken"), repeat=2):
        prompts: list[ChatPrompt] = []
        for talk, paths in zip(talks, sounds, strict=True):
            turns = [
                words if way == "typed" else [{"type": "audio"}]
                for words, way in zip(talk.words, ways, strict=True)
            ]
            messages: tuple[dict[str, Any], ...] = (
                {"role": "user", "content": turns[0]},
                {"role": "assistant", "content": talk.first.reply},
                {"role": "user", "content": turns[1]},
            )
            heard = [path for path, way in zip(paths, ways, strict=True) if way == "spoken"]
            prompts.append(ChatPrompt(messages, {"audio": heard} if heard else {}))
        lines += _counted(
            f"{ways[1]} follow-ups to {ways[0]} questions",
            [" / ".join(talk.words) for talk in talks],
            [talk.then.reply for talk in talks],
            _replies(engine, prompts),
        )
    return lines


def _counted(
    name: str, questions: Sequence[str], wanted: Sequence[str], replies: Sequence[str]
) -> list[str]:
    wrong = [
        f"  {question!r}: {reply!r}"
        for question, right, reply in zip(questions, wanted, replies, strict=True)
        if reply != right
    ]
    return [f"{name}: {len(wanted) - len(wrong)} of {len(wanted)} right", *wrong]


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
    parser.add_argument("--work", type=Path, default=WORK)
    arguments = parser.parse_args()
    print("\n".join(evaluate_ears(arguments.checkpoint, arguments.work)))


if __name__ == "__main__":
    main()

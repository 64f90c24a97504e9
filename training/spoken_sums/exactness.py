"""Checks if caches or streaming change a token on the trained weights: ``python -m`` this module.

Typed held-out questions and spoken conversations run through the whole pipeline: uncached, with a
cold cache and with a warm cache, which ``verify`` compares; then once more without streaming
between thinker and talker. Differing tokens with nearly equal probabilities are counted as near
ties. The report also has the margins, in log-probability, between the sampled token and the
next one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omni import ChatPrompt, Omni, OmniRequest, verify
from omni.requests.request import OmniOutput
from training.spoken_sums.checkpoint import SPEAKERS
from training.spoken_sums.held_out import held_out_questions
from training.spoken_sums.held_out_talks import held_out_talks, say_held_out_talks
from training.spoken_sums.work_folder import WORK

_TIE = 1e-3
"""Log-probabilities closer than this are a matter of rounding."""
_SAMPLED = ("thinker", "talker")
# The vocoder's sound is compared too; two time points are enough for that.
_QUICK: dict[str, Any] = {
    "stages.code2wav.generation.num_steps": 2,
    "stages.talker.final_output": "text",
}
_UNSTREAMED: dict[str, Any] = {"stages.talker.inputs.chunk_size": None}


def exactness(pipeline: str, work: Path, every: int) -> list[str]:
    """Run all and return lines of figures.

    Args:
        pipeline: a name or a file.
        work: folder of the questions' sounds; missing ones are created.
        every: use every n-th question and conversation.
    """
    requests = _requests(work, every)
    with Omni(pipeline, overrides=_QUICK) as omni:
        report = verify(omni, requests)
        streamed = omni.generate(requests)
    with Omni(pipeline, overrides=_QUICK | _UNSTREAMED) as omni:
        unstreamed = omni.generate(requests)
    lines = [
        *report.lines(),
        f"cached against uncached: {len(report.differences)} differences, "
        f"{len(report.near_ties)} near ties",
    ]
    for stage in _SAMPLED:
        different = ties = 0
        gaps: list[float] = []
        for ours, theirs in zip(streamed, unstreamed, strict=True):
            margins = _margins(ours, stage)
            gaps += margins
            parted = _parted(ours, theirs, stage)
            different += parted is not None
            ties += parted is not None and parted < len(margins) and margins[parted] < _TIE
        lines.append(
            f"{stage}, streamed against unstreamed: {len(requests)} requests, {different} differ, "
            f"{ties} of them by near ties"
        )
        lines.append(
            f"{stage}: {len(gaps)} tokens, of which {sum(gap < _TIE for gap in gaps)} were chosen "
            f"by less than {_TIE:g}, {sum(gap < 0.1 for gap in gaps)} by less than 0.1; "
            f"the least margin is {min(gaps):.2g}, the median {sorted(gaps)[len(gaps) // 2]:.2g}"
        )
    return lines


def _requests(work: Path, every: int) -> list[OmniRequest]:
    """Return typed questions, and spoken follow-ups to spoken questions, in alternating voices."""
    prompts = [
        ChatPrompt(({"role": "user", "content": question.words},))
        for question in held_out_questions()[::every]
    ]
    talks = held_out_talks()[::every]
    sound = {"role": "user", "content": [{"type": "audio"}]}
    for talk, paths in zip(
        talks, say_held_out_talks(work / "held_out_talks", every=every), strict=True
    ):
        answer = {"role": "assistant", "content": talk.first.reply}
        prompts.append(ChatPrompt((sound,), {"audio": [paths[0]]}))
        prompts.append(ChatPrompt((sound, answer, sound), {"audio": list(paths)}))
    names, told = list(SPEAKERS), {stage: {"logprobs": 2} for stage in _SAMPLED}
    return [
        OmniRequest(prompt, f"{number}", sampling=told, speaker=names[number % len(names)])
        for number, prompt in enumerate(prompts)
    ]


def _margins(output: OmniOutput, stage: str) -> list[float]:
    """Return the margin between each sampled token and the second likeliest."""
    margins = []
    for each in output.stages[stage].logprobs or ():
        best, second = sorted((logprob for _, logprob in each.top), reverse=True)[:2]
        margins.append(best - second)
    return margins


def _parted(ours: OmniOutput, theirs: OmniOutput, stage: str) -> int | None:
    """Return the index of the first differing token; None if all are equal."""
    pair: Sequence[tuple[int, ...]] = [each.stages[stage].token_ids for each in (ours, theirs)]
    if pair[0] == pair[1]:
        return None
    return next(
        (place for place, (a, b) in enumerate(zip(*pair, strict=False)) if a != b),
        min(map(len, pair)),
    )


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pipeline", default="spoken_sums")
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--every", type=int, default=5, help="take each n-th question")
    given = parser.parse_args()
    print("\n".join(exactness(given.pipeline, given.work, given.every)))


if __name__ == "__main__":
    main()

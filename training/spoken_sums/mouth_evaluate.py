"""Measures the intelligibility of hard numbers, part by part: ``python -m`` this module.

Teens and tens: flite's own speech; the waveform network on true spectrograms, and on the codes'
centroids; and flow and network together on the codes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniToken2WavBigVGANModel,
    Qwen2_5OmniToken2WavDiTModel,
)

from training.spoken_sums.bigvgan import make_bigvgan, sound_of
from training.spoken_sums.codes import Codebook, learn_codebook
from training.spoken_sums.dit import Voice, flow_of, make_dit, voices_of
from training.spoken_sums.number_words import in_words
from training.spoken_sums.recognizer import HARD_NUMBERS, Recognizer
from training.spoken_sums.speech import Speech, answers_spoken
from training.spoken_sums.work_folder import WORK

_SWAY = -1.0
_NUM_STEPS = 4
"""Value of the shipped pipeline."""


def evaluate_mouth(work: Path, *, every: int = 1) -> list[str]:
    """Evaluate the states in a training folder and return lines of figures.

    Args:
        work: the folder, with the vocoder's two states.
        every: use every n-th hard number, in alternating voices.
    """
    speeches = answers_spoken(work)
    codebook = learn_codebook([speech.mel for speech in speeches], work / "codebook.pt")
    dit, bigvgan = make_dit(0), make_bigvgan(torch.Generator())
    networks: dict[str, Any] = {"dit": dit, "bigvgan": bigvgan}
    for name, network in networks.items():
        state = torch.load(work / f"{name}.pt", weights_only=True)
        network.load_state_dict(state["module"])
        network.eval()
    hard = [in_words(number) for number in HARD_NUMBERS]
    chosen = [speech for speech in speeches if speech.utterance.text in hard][::every]
    shares = understood_shares(chosen, codebook, dit, bigvgan, voices_of(speeches), _NUM_STEPS)
    return [f"{len(chosen)} hard numbers, {name}: {share:.1%}" for name, share in shares.items()]


@torch.no_grad()
def flowed(
    dit: Qwen2_5OmniToken2WavDiTModel, codes: Tensor, voice: Voice, num_steps: int, seed: int = 0
) -> Tensor:
    """Return the spectrogram ``(2 n, 80)`` of codes ``(n,)``, without guidance, in one piece.

    Time points and steps (the 3/8 rule) are those of transformers' ``sample``.
    """
    generator = torch.Generator().manual_seed(seed)
    frames = torch.randn(1, 2 * len(codes), 80, generator=generator)
    times = torch.linspace(0, 1, num_steps)
    times = times + _SWAY * (torch.cos(torch.pi / 2 * times) - 1 + times)

    def velocity(time: Tensor, at: Tensor) -> Tensor:
        return flow_of(dit, at, time[None], codes[None], [voice], torch.zeros(1, dtype=torch.long))

    for start, end in pairwise(times):
        step = end - start
        first = velocity(start, frames)
        second = velocity(start + step / 3, frames + step * first / 3)
        third = velocity(start + step * 2 / 3, frames + step * (second - first / 3))
        fourth = velocity(end, frames + step * (first - second + third))
        frames = frames + (first + 3 * (second + third) + fourth) * step / 8
    return frames[0]


def understood_shares(
    speeches: Sequence[Speech],
    codebook: Codebook,
    dit: Qwen2_5OmniToken2WavDiTModel,
    bigvgan: Qwen2_5OmniToken2WavBigVGANModel,
    voices: Mapping[str, Voice],
    num_steps: int,
) -> dict[str, float]:
    """Return shares of answers understood: flite, true spectrograms, centroids, and flow."""
    recognizer = Recognizer()
    texts = [speech.utterance.text for speech in speeches]

    def share(make: Callable[[Speech], Tensor]) -> float:
        with torch.no_grad():
            return recognizer.share_understood(texts, [make(speech) for speech in speeches])

    def through_flow(speech: Speech) -> Tensor:
        voice = voices[speech.utterance.voice]
        mel = flowed(dit, codebook.encode(speech.mel), voice, num_steps)
        return sound_of(bigvgan, mel[None])[0]

    return {
        "flite": share(lambda speech: speech.samples),
        "true spectrograms": share(lambda speech: sound_of(bigvgan, speech.mel[None])[0]),
        "centroids": share(
            lambda speech: sound_of(bigvgan, codebook.decode(codebook.encode(speech.mel))[None])[0]
        ),
        "flow": share(through_flow),
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--every", type=int, default=1, help="take each n-th number")
    given = parser.parse_args()
    print("\n".join(evaluate_mouth(given.work, every=given.every)))


if __name__ == "__main__":
    main()

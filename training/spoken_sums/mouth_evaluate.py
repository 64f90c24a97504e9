"""How well the answers' sound is understood, part by part: the recognizer is the judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniToken2WavBigVGANModel,
    Qwen2_5OmniToken2WavDiTModel,
)

from training.spoken_sums.bigvgan import sound_of
from training.spoken_sums.codes import Codebook
from training.spoken_sums.dit import Voice, flow_of
from training.spoken_sums.recognizer import Recognizer
from training.spoken_sums.speech import Speech

__all__ = ["flowed", "understood_shares"]

_SWAY = -1.0


@torch.no_grad()
def flowed(
    dit: Qwen2_5OmniToken2WavDiTModel, codes: Tensor, voice: Voice, num_steps: int, seed: int = 0
) -> Tensor:
    """The spectrogram ``(2 n, 80)`` of codes ``(n,)``, without guidance, in one piece.

    Points in time and steps (the 3/8 rule) are those of transformers' ``sample``.
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
    """Shares of answers understood: flite's own, true spectrograms, centroids, and the flow."""
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

"""Waveforms of transformers' own vocoder for codec tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen2_5OmniForConditionalGeneration, Qwen2_5OmniToken2WavModel

from engine import GenerationParams
from engine.checkpoints.config_file import hidden_progress_bars


class VocoderReference:
    """transformers' vocoder of a seeded Qwen2.5-Omni."""

    def __init__(self, folder: str) -> None:
        with hidden_progress_bars():
            model = Qwen2_5OmniForConditionalGeneration.from_pretrained(folder).eval()
        self.model: Qwen2_5OmniToken2WavModel = model.token2wav
        self._speakers = torch.load(Path(folder) / "spk_dict.pt", weights_only=True)

    def waveform(
        self, codes: Sequence[int], params: GenerationParams, speaker: str = "Chelsie"
    ) -> Tensor:
        """Return ``(num_samples,)`` from the noise of the global generator, seeded right before."""
        voice = self._speakers[speaker]
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(params.seed)
            samples: Tensor = self.model(
                torch.tensor([codes]),
                conditioning=voice["cond"],
                reference_mel=voice["ref_mel"],
                num_steps=params.num_steps,
                guidance_scale=params.guidance_scale,
                sway_coefficient=params.sway_coefficient,
            )
        return samples.reshape(-1)


def random_codes(length: int, seed: int = 0) -> tuple[int, ...]:
    """Return codes of the seeded checkpoint's codec, which has 256."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(0, 256, (length,), generator=generator).tolist())

"""The flow from noise to a spectrogram, given codes and a voice: transformers' DiT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import mse_loss
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniDiTConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavDiTModel

from training.spoken_sums.answers import VOICES
from training.spoken_sums.codes import FRAMES_PER_CODE, Codebook
from training.spoken_sums.mel import NUM_BANDS
from training.spoken_sums.module_training import ModuleTraining
from training.spoken_sums.mouth_sizes import DIT
from training.spoken_sums.speech import Speech

_CODES = 60
"""Codes per training window: five blocks; no layer looks further than the next block."""

_BLOCK = DIT["block_size"] // FRAMES_PER_CODE
_REFERENCE_FRAMES = 96
_REFERENCE_TEXT = "one hundred twenty seven"
_UNCONDITIONED = 0.05


@dataclass(frozen=True, slots=True)
class DiTBudget:
    """Steps and hyperparameters of the training.

    Attributes:
        steps: number of steps.
        rate: peak learning rate.
        batch: number of windows of 1.2 s.
        half: if true, compute products in bfloat16.
        seed: for weights and windows.
    """

    steps: int
    rate: float = 1.5e-3
    batch: int = 24
    half: bool = True
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Voice:
    """The flow's conditioning on a voice.

    Attributes:
        conditioning: ``(1, 16)`` float32, random and fixed.
        reference_mel: ``(1, 96, 80)`` float32, a piece of its speech.
    """

    conditioning: Tensor
    reference_mel: Tensor


def voices_of(speeches: Sequence[Speech]) -> dict[str, Voice]:
    """Return both voices by flite's names."""
    generator = torch.Generator().manual_seed(1)
    voices = {}
    for name in VOICES:
        mel = next(
            speech.mel
            for speech in speeches
            if (speech.utterance.voice, speech.utterance.text) == (name, _REFERENCE_TEXT)
        )
        reference = mel[-_REFERENCE_FRAMES:][None].clone()
        conditioning = torch.randn(1, DIT["enc_emb_dim"], generator=generator)
        voices[name] = Voice(conditioning, reference)
    return voices


def make_dit(seed: int) -> Any:
    """Return the initialized network."""
    torch.manual_seed(seed)
    config = Qwen2_5OmniDiTConfig(**DIT)
    config._attn_implementation = "sdpa"
    network: Any = Qwen2_5OmniToken2WavDiTModel(config)
    with torch.no_grad():
        # Every layer, and so the whole network, starts as zero (adaLN-Zero).
        for block in network.transformer_blocks:
            block.attn_norm.linear.weight.zero_()
            block.attn_norm.linear.bias.zero_()
        network.norm_out.linear.weight.zero_()
        network.norm_out.linear.bias.zero_()
    return network


def flow_of(
    network: Any,
    frames: Tensor,
    time: Tensor,
    codes: Tensor,
    voices: Sequence[Voice],
    rows: Tensor,
) -> Tensor:
    """Return the velocity, as transformers' ``forward`` without guidance, each voice encoded once.

    Args:
        network: the flow.
        frames: ``(B, 2 n, 80)``.
        time: ``(B,)`` in 0 to 1.
        codes: ``(B, n)``; 0 is no code.
        voices: all voices.
        rows: ``(B,)`` indices into ``voices``; -1 is no voice.
    """
    reference = torch.cat([voice.reference_mel for voice in voices])
    conditioning = torch.cat([voice.conditioning for voice in voices])
    # "No voice" is last, at index -1.
    silence = torch.zeros_like(reference[:1])
    encoded = network.input_embed.spk_encoder(torch.cat([reference, silence]))[rows]
    spoken = torch.cat([conditioning, torch.zeros_like(conditioning[:1])])[rows]
    length = frames.shape[1]
    expanded = [part[:, None].expand(-1, length, -1) for part in (encoded, spoken)]
    code_rows = network.text_embed(codes)
    hidden = network.input_embed.proj(
        torch.cat([frames, expanded[0], code_rows, expanded[1]], dim=-1)
    )
    places = torch.arange(length)[None].expand(len(frames), -1)
    rotary = network.rotary_embed(hidden, places)
    distances = network._create_block_diff(hidden)[:1, :1]
    moment = network.time_embed(time)
    for block in network.transformer_blocks:
        hidden = block(hidden, moment, position_embeddings=rotary, block_diff=distances)
    velocity: Tensor = network.proj_out(network.norm_out(hidden, moment))
    return velocity


def train_dit(
    speeches: Sequence[Speech], codebook: Codebook, budget: DiTBudget, file: Path
) -> None:
    """Train on windows of the answers."""
    voices = list(voices_of(speeches).values())
    network = make_dit(budget.seed)
    training = ModuleTraining(network, file, budget.steps, budget.rate)
    coded = [codebook.encode(speech.mel) for speech in speeches]
    names = [VOICES.index(speech.utterance.voice) for speech in speeches]

    def loss_of(step: int) -> tuple[Tensor, dict[str, float]]:
        generator = torch.Generator().manual_seed(budget.seed + step)
        chosen = torch.randint(len(speeches), (budget.batch,), generator=generator).tolist()
        windows = [_window(speeches[row].mel, coded[row], generator) for row in chosen]
        mel, codes = (torch.stack(part) for part in zip(*windows, strict=True))
        rows = torch.tensor([names[row] for row in chosen])
        free = torch.rand(budget.batch, generator=generator) < _UNCONDITIONED
        codes, rows = codes.masked_fill(free[:, None], 0), rows.masked_fill(free, -1)
        noise = torch.randn(mel.shape, generator=generator)
        time = torch.rand(budget.batch, generator=generator)
        frames = torch.lerp(noise, mel, time[:, None, None])
        # For 120 frames plain products are faster than the memory-saving kernel.
        half = torch.autocast("cpu", torch.bfloat16, enabled=budget.half)
        with half, sdpa_kernel(SDPBackend.MATH):
            velocity = flow_of(network, frames, time, codes, voices, rows)
        loss = mse_loss(velocity.float(), mel - noise)
        return loss, {}

    training.run(loss_of)


def _window(mel: Tensor, codes: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return 120 frames; the end is padded with silence, taken from the first frame."""
    missing = _CODES - len(codes)
    if missing > 0:
        silence = torch.full((missing,), int(codes[0]))
        mel = torch.cat([mel, mel[:1].expand(missing * FRAMES_PER_CODE, NUM_BANDS)])
        return mel, torch.cat([codes, silence])
    # Windows start at block boundaries, like streamed pieces.
    start = _BLOCK * int(torch.randint(-missing // _BLOCK + 1, (), generator=generator))
    stop = start + _CODES
    return mel[start * FRAMES_PER_CODE : stop * FRAMES_PER_CODE], codes[start:stop]

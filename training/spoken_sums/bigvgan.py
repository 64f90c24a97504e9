"""The waveform network: transformers' BigVGAN, trained on spectrograms of real speech.

The anti-aliased snake (upsample by two, snake, downsample by two) takes nearly all of the time if
torch runs it as one convolution per channel. Every channel has the same filter, so
:class:`_BlockSnake` multiplies blocks of samples by one small matrix instead: the same numbers in
a quarter of the time. The plain snake is even faster and is used for most steps; the last steps
use the anti-aliased one, as in inference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import l1_loss
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniBigVGANConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniAntiAliasedActivation1d,
    Qwen2_5OmniToken2WavBigVGANModel,
)

from training.spoken_sums.mel import HOP, mel_of
from training.spoken_sums.module_training import ModuleTraining
from training.spoken_sums.mouth_sizes import BIGVGAN
from training.spoken_sums.speech import LEAD, Speech

_FRAMES = 32
# Floors of audible amplitudes. flite's silence, and everything above 8 kHz, is zero: its logarithm
# would dominate the loss.
_FAINT, _FAINT_MEL = 1e-2, -1.2
_BLOCK = 32
_HALO = 6
_RESOLUTIONS = ((2048, 480, 2048), (1024, 240, 1024), (512, 120, 512), (256, 60, 256))


@dataclass(frozen=True, slots=True)
class BigVGANBudget:
    """Steps and hyperparameters of the training.

    Attributes:
        steps: total number, including earlier ones in the same file.
        rate: peak learning rate.
        anti_aliased: if true, train as in inference; otherwise with the faster plain snake.
        batch: number of pieces of 0.32 s.
        half: if true, compute products in bfloat16; the losses never are.
        seed: for weights and pieces.
    """

    steps: int
    rate: float = 1e-3
    anti_aliased: bool = False
    batch: int = 8
    half: bool = True
    seed: int = 0


def make_bigvgan(
    generator: torch.Generator, config: Qwen2_5OmniBigVGANConfig | None = None
) -> Qwen2_5OmniToken2WavBigVGANModel:
    """Return the initialized network, by default in the shipped size."""
    config = Qwen2_5OmniBigVGANConfig(**BIGVGAN) if config is None else config
    network = Qwen2_5OmniToken2WavBigVGANModel(config)
    initialise(network, generator)
    return network


def sound_of(network: Any, mel: Tensor) -> Tensor:
    """Return samples ``(B, frames * 240)`` for spectrograms ``(B, frames, 80)``.

    Equals transformers' ``forward`` without the last clamp, which passes no gradient.
    """
    hidden = network.conv_pre(network.process_mel_spectrogram(mel.transpose(1, 2)))
    count = network.num_residual_blocks
    for index, (up,) in enumerate(network.ups):
        hidden = up(hidden)
        blocks = network.resblocks[index * count : (index + 1) * count]
        hidden = sum(block(hidden) for block in blocks) / count
    samples: Tensor = network.conv_post(network.activation_post(hidden))
    return samples.float().squeeze(1)


def initialise(network: Qwen2_5OmniToken2WavBigVGANModel, generator: torch.Generator) -> None:
    """Initialize by fan-in; blocks start near the identity, the sound near but not at silence."""
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.ndim == 3:
                fan_in = parameter.shape[1] * parameter.shape[2]
                if ".ups." in f".{name}":
                    # Inputs are its first dimension; each sample is the sum of two taps.
                    fan_in = parameter.shape[0] * 2
                gain = 0.3 if "convs2" in name else 0.1 if "conv_post" in name else 1.0
                parameter.normal_(0, gain * fan_in**-0.5, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()


def simplify(network: Qwen2_5OmniToken2WavBigVGANModel) -> None:
    """Replace every anti-aliased snake by a plain one, for the first part of training."""
    for module in list(network.modules()):
        for name, child in module.named_children():
            if isinstance(child, Qwen2_5OmniAntiAliasedActivation1d):
                setattr(module, name, _PlainSnake(child.act))


def quicken(network: Qwen2_5OmniToken2WavBigVGANModel) -> None:
    """Replace every anti-aliased snake by an equivalent one that trains faster."""
    for module in list(network.modules()):
        for name, child in module.named_children():
            if isinstance(child, Qwen2_5OmniAntiAliasedActivation1d):
                setattr(module, name, _BlockSnake(child))


def spectral_loss(made: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and its mel part: distances of natural logarithms of amplitudes.

    Args:
        made: ``(B, n)`` samples in float32, like everything that follows.
        true: the same shape.
    """
    made_mel, true_mel = (mel_of(part).clamp_min(_FAINT_MEL) for part in (made, true))
    mel = l1_loss(made_mel, true_mel) * 2
    loss = mel
    for size, hop, width in _RESOLUTIONS:
        window = torch.hann_window(width)
        ours, theirs = (
            torch.stft(part, size, hop, width, window, return_complex=True).abs().clamp_min(_FAINT)
            for part in (made, true)
        )
        convergence = (theirs - ours).norm(dim=(1, 2)) / theirs.norm(dim=(1, 2)).clamp_min(1e-3)
        loss = loss + (convergence.mean() + l1_loss(ours.log(), theirs.log())) / 2
    return loss, mel


class _PlainSnake(nn.Module):
    """A snake without anti-aliasing, with the parameter names of the anti-aliased one."""

    def __init__(self, snake: nn.Module) -> None:
        super().__init__()
        self.act = snake

    def forward(self, samples: Tensor) -> Tensor:
        """``(B, C, n)`` to the same shape."""
        return _snake(self.act, samples)


class _BlockSnake(nn.Module):
    """An anti-aliased snake whose two filters are matrix products; same parameters.

    Args:
        original: transformers' module; its parameters are reused under the same names.
    """

    def __init__(self, original: Qwen2_5OmniAntiAliasedActivation1d) -> None:
        super().__init__()
        self.act = original.act
        size = 3 * _BLOCK
        up = original.upsample(torch.eye(size)[:, None])[:, 0, 2 * _BLOCK : 4 * _BLOCK]
        down = original.downsample(torch.eye(2 * size)[:, None])[:, 0, _BLOCK : 2 * _BLOCK]
        self.up = nn.Buffer(up[_BLOCK - _HALO : 2 * _BLOCK + _HALO], persistent=False)
        self.down = nn.Buffer(down[2 * _BLOCK - _HALO : 4 * _BLOCK + _HALO], persistent=False)

    def forward(self, samples: Tensor) -> Tensor:
        """``(B, C, n)`` to the same shape; n must be a multiple of 32."""
        blocks = samples.unflatten(-1, (-1, _BLOCK))
        doubled: Tensor = _Neighbours.apply(blocks) @ self.up
        snaked = _snake(self.act, doubled.flatten(-2)).unflatten(-1, (-1, 2 * _BLOCK))
        filtered: Tensor = _Neighbours.apply(snaked) @ self.down
        return filtered.flatten(-2)


def _snake(module: Any, samples: Tensor) -> Tensor:
    alpha = module.alpha.exp()
    scale = 0.5 / (module.beta.exp() + module.no_div_by_zero)
    made: Tensor = _Snake.apply(samples, 2 * alpha, scale)
    return made


class _Snake(torch.autograd.Function):
    """``x + scale * (1 - cos(x * rate))``, in as few passes over memory as torch allows."""

    @staticmethod
    def forward(ctx: Any, samples: Tensor, rate: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(samples, rate, scale)
        half_rate, root = (
            part.to(samples.dtype)[:, None] for part in (rate / 2, (2 * scale).sqrt())
        )
        # 1 - cos(2 a) is twice the square of sin(a).
        sines = (samples * half_rate).sin_().mul_(root)
        return torch.addcmul(samples, sines, sines)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        samples, rate, scale = ctx.saved_tensors
        wide_rate, product = (part.to(samples.dtype)[:, None] for part in (rate, rate * scale))
        angle = samples * wide_rate
        to_rate = to_scale = None
        if ctx.needs_input_grad[1]:
            cosines = angle.cos().mul_(grad)
            to_scale = (grad - cosines).sum((0, 2), dtype=torch.float32)
        sines = angle.sin_()
        if ctx.needs_input_grad[1]:
            to_rate = (sines * grad).mul_(samples).sum((0, 2), dtype=torch.float32) * scale
        return torch.addcmul(grad, sines.mul_(product), grad), to_rate, to_scale


class _Neighbours(torch.autograd.Function):
    """Blocks with the neighbouring samples on both sides; edge samples are repeated."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor) -> Tensor:
        size = blocks.shape[-1]
        made = blocks.new_empty(*blocks.shape[:-1], size + 2 * _HALO)
        made[..., _HALO:-_HALO] = blocks
        made[..., 1:, :_HALO] = blocks[..., :-1, -_HALO:]
        made[..., :-1, -_HALO:] = blocks[..., 1:, :_HALO]
        made[..., 0, :_HALO] = blocks[..., 0, :1]
        made[..., -1, -_HALO:] = blocks[..., -1, -1:]
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        made = grad[..., _HALO:-_HALO].clone()
        made[..., :-1, -_HALO:] += grad[..., 1:, :_HALO]
        made[..., 1:, :_HALO] += grad[..., :-1, -_HALO:]
        made[..., 0, 0] += grad[..., 0, :_HALO].sum(-1)
        made[..., -1, -1] += grad[..., -1, -_HALO:].sum(-1)
        return made


def train_bigvgan(speeches: Sequence[Speech], budget: BigVGANBudget, file: Path) -> None:
    """Train on pieces of 0.32 s of real speech."""
    network = make_bigvgan(torch.Generator().manual_seed(budget.seed))
    (quicken if budget.anti_aliased else simplify)(network)
    if budget.anti_aliased:
        # Already trained, and their gradients are most of the cost of a snake.
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(not name.endswith(("alpha", "beta")))
    training = ModuleTraining(network, file, budget.steps, budget.rate, betas=(0.8, 0.99))
    sounds = [speech.samples for speech in speeches]
    mels = [speech.mel for speech in speeches]

    def loss_of(step: int) -> tuple[Tensor, dict[str, float]]:
        generator = torch.Generator().manual_seed(budget.seed + step)
        chosen = torch.randint(len(sounds), (budget.batch,), generator=generator).tolist()
        pieces = [_piece(mels[row], sounds[row], generator) for row in chosen]
        mel, true = (torch.stack(part) for part in zip(*pieces, strict=True))
        with torch.autocast("cpu", torch.bfloat16, enabled=budget.half):
            made = sound_of(network, mel)
        loss, distance = spectral_loss(made, true)
        return loss, {"mel": distance.item()}

    training.run(loss_of)


def _piece(mel: Tensor, sound: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    lead = LEAD  # half of the leading silence is enough to learn it
    start = lead + int(torch.randint(len(mel) - _FRAMES - lead + 1, (), generator=generator))
    stop = start + _FRAMES
    return mel[start:stop], sound[start * HOP : stop * HOP]

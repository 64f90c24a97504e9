"""BigVGAN's anti-aliased snakes by a C kernel: most of a vocoder's time on a CPU is theirs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniAntiAliasedActivation1d,
    Qwen2_5OmniSnakeBeta,
)

from engine.native import NativeBuildError, NativeKernels, load_kernels

__all__ = ["NativeSnake", "use_native_snakes"]

_RATIO, _TAPS = 2, 12


class NativeSnake(nn.Module):
    """Two samples for one, the snake, and one for two, in one pass over memory; for inference.

    Args:
        original: of transformers; what it computes from its parameters is read now.
        kernels: the C kernels.
    """

    def __init__(
        self, original: Qwen2_5OmniAntiAliasedActivation1d, kernels: NativeKernels
    ) -> None:
        super().__init__()
        self._kernels = kernels
        snake = original.act
        self.up = nn.Buffer(_taps(original.upsample.filter), persistent=False)
        self.down = nn.Buffer(_taps(original.downsample.filter), persistent=False)
        with torch.no_grad():
            # Parameters, since they stand for the checkpoint's: they count as its weights.
            self.rates = nn.Parameter(snake.alpha.exp(), requires_grad=False)
            scales = 1.0 / (snake.beta.exp() + snake.no_div_by_zero)
            self.scales = nn.Parameter(scales, requires_grad=False)

    def forward(self, samples: Tensor) -> Tensor:
        """``(B, channels, n)`` to the same shape."""
        return self._kernels.snake(
            samples.contiguous(), self.up, self.down, self.rates, self.scales
        )


def use_native_snakes(network: nn.Module) -> None:
    """Put the C kernel in the place of every snake of a network in float32 on a CPU.

    Without a compiler, and where a snake is of another kind, transformers' own stays.
    """
    try:
        kernels = load_kernels()
    except NativeBuildError:
        return  # told once, when they could not be had
    for module in list(network.modules()):
        for name, child in module.named_children():
            if isinstance(child, Qwen2_5OmniAntiAliasedActivation1d) and _fits(child):
                setattr(module, name, NativeSnake(child, kernels))


def _fits(snake: Qwen2_5OmniAntiAliasedActivation1d) -> bool:
    up, down = snake.upsample, snake.downsample
    return (
        type(snake.act) is Qwen2_5OmniSnakeBeta
        and (up.ratio, up.kernel_size) == (_RATIO, _TAPS)
        and (down.stride, down.kernel_size) == (_RATIO, _TAPS)
        and {snake.act.alpha.dtype, up.filter.dtype} == {torch.float32}
        and snake.act.alpha.device.type == "cpu"
    )


def _taps(filters: Tensor) -> Tensor:
    return filters.detach().flatten().contiguous()

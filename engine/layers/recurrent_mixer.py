"""What both Mamba mixers have: two projections, a short convolution, and a state per request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from engine.attention.state_layer import StateLayer
from engine.checkpoints.activation import activation_of
from engine.layers.causal_conv import CausalConv
from engine.layers.linear import Linear
from prefix_cache import MambaSpec, StateTensor

__all__ = ["RecurrentConfig", "RecurrentMixer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentConfig:
    """The sizes and options of any mixer.

    Attributes:
        hidden_size: width of the residual stream.
        state_size: numbers that each channel remembers.
        kernel_size: tokens that the convolution sees.
        activation: after the convolution, by transformers' name.
        norm_eps: of the norms.
        conv_bias: whether the convolution has a bias.
        projection_bias: whether the projections in and out have biases.
    """

    hidden_size: int
    state_size: int
    kernel_size: int
    activation: str
    norm_eps: float
    conv_bias: bool
    projection_bias: bool


class RecurrentMixer(nn.Module):
    """The shared parts; a subclass adds ``a``, ``d`` and what lies between the projections.

    Args:
        layer_name: unique in the model; its state is kept under it.
        config: sizes and options.
        block_size: tokens per block.
        in_width: of what the projection in gives.
        conv_width: channels of the convolution.
        state_shape: of the recurrence: its channels, maybe in heads, and the state's size.
        dtype: of weights, activations and the convolution's state. The recurrence runs, and its
            state is kept, in float32: rounding it to a shorter type at every token adds up.
        device: of the same.

    Attributes:
        a: the logarithm of -A until :meth:`finish_loading`, then A.
        d: what is added of each channel's own input.

    Raises:
        ValueError: an unknown activation, or a convolution over fewer than 2 tokens.
    """

    a: nn.Parameter
    d: nn.Parameter

    def __init__(
        self,
        layer_name: str,
        config: RecurrentConfig,
        block_size: int,
        *,
        in_width: int,
        conv_width: int,
        state_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, prod(state_shape[:-1]), config.projection_bias
        self.activation = activation_of(config.activation)
        self.in_proj = Linear(hidden, {"in_proj": in_width}, bias=bias, dtype=dtype, device=device)
        self.conv = CausalConv(
            conv_width, config.kernel_size, bias=config.conv_bias, dtype=dtype, device=device
        )
        self.out_proj = Linear(inner, {"out_proj": hidden}, bias=bias, dtype=dtype, device=device)
        kept = (StateTensor(self.conv.state_shape, dtype), StateTensor(state_shape, torch.float32))
        self.state = StateLayer(layer_name, MambaSpec(block_size, kept))

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names under ``prefix``, each with the tensor that receives it."""
        for module in self.children():
            if isinstance(module, Linear):
                yield from module.targets(prefix)
        yield from self.conv.targets(f"{prefix}conv1d.")
        yield f"{prefix}A_log", self.a.data
        yield f"{prefix}D", self.d.data

    def finish_loading(self) -> None:
        """Turn the loaded logarithms into A; call once."""
        self.a.exp_().neg_()

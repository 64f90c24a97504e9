"""The gated MLP of Llama-like decoders."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from engine.layers.activation import activation_of
from engine.layers.layer_ops import LayerOps
from engine.layers.linear import Linear

__all__ = ["GatedMLP"]


class GatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))``, gate and up in one product.

    Args:
        hidden_size: width of input and output.
        intermediate_size: width of gate and of up.
        activation: transformers' name of the activation.
        bias: whether the projections have biases.
        names: what checkpoints call the gate's, the up and the down projection.
        dtype: of the weights.
        device: of the weights.
        ops: what computes the gating.

    Raises:
        ValueError: transformers knows no such activation.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        *,
        bias: bool = False,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        dtype: torch.dtype,
        device: torch.device,
        ops: LayerOps | None = None,
    ) -> None:
        super().__init__()
        gate_up = dict.fromkeys(names[:2], intermediate_size)
        self.gate_up = Linear(hidden_size, gate_up, bias=bias, dtype=dtype, device=device)
        down = {names[2]: hidden_size}
        self.down = Linear(intermediate_size, down, bias=bias, dtype=dtype, device=device)
        self.activation = activation_of(activation)
        self.ops = ops or LayerOps()

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names under ``prefix``, each with the slice that its tensor is copied to."""
        yield from self.gate_up.targets(prefix)
        yield from self.down.targets(prefix)

    def forward(self, x: Tensor) -> Tensor:
        """``(rows, hidden_size)`` to the same shape."""
        output: Tensor = self.down(self.ops.gate(self.gate_up(x), self.activation))
        return output

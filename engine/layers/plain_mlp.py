"""The MLP without a gate, of the first transformers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from engine.layers.activation import activation_of
from engine.layers.linear import Linear

__all__ = ["PlainMLP"]


class PlainMLP(nn.Module):
    """``down(act(up(x)))``.

    Args:
        hidden_size: width of input and output.
        intermediate_size: width between the two products.
        activation: transformers' name of the activation.
        names: what checkpoints call the first and the second matrix.
        bias: whether they have biases.
        dtype: of the weights.
        device: of the weights.

    Raises:
        ValueError: transformers knows no such activation.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        *,
        names: tuple[str, str],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        up, down = {names[0]: intermediate_size}, {names[1]: hidden_size}
        self.up = Linear(hidden_size, up, bias=bias, dtype=dtype, device=device)
        self.down = Linear(intermediate_size, down, bias=bias, dtype=dtype, device=device)
        self.activation = activation_of(activation)

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names under ``prefix``, each with the tensor that receives it."""
        yield from self.up.targets(prefix)
        yield from self.down.targets(prefix)

    def forward(self, x: Tensor) -> Tensor:
        """``(rows, hidden_size)`` to the same shape."""
        output: Tensor = self.down(self.activation(self.up(x)))
        return output

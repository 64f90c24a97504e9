"""The short convolution over time that recurrent layers begin with, one filter per channel."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from engine.layers.packed_layout import PackedLayout

__all__ = ["CausalConv"]


class CausalConv(nn.Module):
    """``y[t] = bias + sum over k of weight[k] * x[t - kernel_size + 1 + k]``, per channel.

    What lies before a request's tokens comes from its state, zeros at its beginning.

    Args:
        channels: width of input and output.
        kernel_size: tokens that an output sees, its own included; at least 2.
        bias: whether there is one.
        dtype: of the weight.
        device: of the weight.

    Raises:
        ValueError: for a kernel that sees no earlier token.
    """

    def __init__(
        self,
        channels: int,
        kernel_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        if kernel_size < 2:
            raise ValueError(f"the convolution must see at least 2 tokens, got {kernel_size}")
        # A row per tap, so that each is one product with whole rows of tokens.
        taps = torch.empty(kernel_size, channels, dtype=dtype, device=device)
        self.taps = nn.Parameter(taps, requires_grad=False)
        self.bias: nn.Parameter | None = None
        if bias:
            values = torch.empty(channels, dtype=dtype, device=device)
            self.bias = nn.Parameter(values, requires_grad=False)

    @property
    def state_shape(self) -> tuple[int, int]:
        """``(kernel_size - 1, channels)``: the last inputs, oldest first."""
        kernel_size, channels = self.taps.shape
        return kernel_size - 1, channels

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names under ``prefix``, each with the tensor that receives it."""
        yield f"{prefix}weight", self.taps.data.T.unsqueeze(1)
        if self.bias is not None:
            yield f"{prefix}bias", self.bias.data

    def forward(self, x: Tensor, state: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
        """Convolve each request's tokens after its state.

        Args:
            x: ``(num_tokens, channels)``.
            state: ``(num_reqs, kernel_size - 1, channels)``.
            layout: of the step.

        Returns:
            The output, shaped as ``x``, and the state after the step, shaped as ``state``.
        """
        rows = layout.history_rows
        history = layout.history
        table = x.new_empty(len(x) + len(rows.histories), x.shape[1])
        table.index_copy_(0, rows.tokens, x)
        table.index_copy_(0, rows.histories, state.flatten(0, 1).to(x.dtype))
        # Outputs are also computed for the windows that reach across two requests, and dropped:
        # cheaper than to gather every tap's rows.
        num_windows = len(table) - history
        taps = self.taps.float()
        windows = taps[0] * table[:num_windows].float()
        for tap in range(1, history + 1):
            windows.addcmul_(taps[tap], table[tap : tap + num_windows].float())
        output = windows.index_select(0, rows.tokens - history)
        if self.bias is not None:
            output += self.bias
        next_state = table.index_select(0, rows.next_histories).view_as(state)
        return output.to(x.dtype), next_state

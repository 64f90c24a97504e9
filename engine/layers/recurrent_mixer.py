"""What both Mamba mixers have: two projections, a short convolution, and a state per request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from engine.attention.layer import StateLayer
from engine.checkpoints.activation import activation_of
from engine.layers.linear import Linear
from prefix_cache import MambaSpec, StateTensor

__all__ = [
    "CausalConv",
    "Chunks",
    "PackedLayout",
    "RecurrentConfig",
    "RecurrentMixer",
    "TimeOrder",
]

_MAX_CHUNK = 64

_IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HistoryRows:
    """Rows of a table in which each request's tokens follow what it remembers of earlier ones::

        request 0          request 1
        h0 h0 h0 t0 t0     h1 h1 h1 t1 t1 t1 t1         history = 3
                 └───┘              └─────────┘         tokens
              └──────┘                 └──────┘         next history: the last three

    Attributes:
        tokens: ``(num_tokens,)`` row of each token.
        histories: ``(num_reqs * history,)`` rows of what came before.
        next_histories: ``(num_reqs * history,)`` rows that come before the request's next token.
    """

    tokens: Tensor
    histories: Tensor
    next_histories: Tensor


@dataclass(frozen=True, slots=True)
class TimeOrder:
    """Items (tokens, or chunks of them) of several sequences, reordered by their time::

        sequence 0   a0 a1 a2          batch 0   c0 a0 b0     longest first, so that those which
        sequence 1   b0                batch 1   c1 a1        go on are the leading rows
        sequence 2   c0 c1 c2 c3       batch 2   c2 a2
                                       batch 3   c3

    It is the order of torch's ``PackedSequence``: a recurrence takes one batch at a time.

    Attributes:
        sequences: ``(num_sequences,)`` the sequences, longest first.
        items: ``(num_items,)`` the items, by time and then by that order.
        batch_sizes: how many sequences are still going at each time.
    """

    sequences: Tensor
    items: Tensor
    batch_sizes: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Tensor, device: torch.device) -> TimeOrder:
        """The order of sequences of ``lengths`` ``(num_sequences,)`` (on the CPU) items."""
        sequences = np.argsort(-lengths.numpy(), kind="stable")
        places = np.empty_like(sequences)
        places[sequences] = np.arange(len(lengths))
        owners, times = _owners_and_times(lengths.numpy())
        items = np.argsort(times * len(lengths) + places[owners])
        batch_sizes = tuple(np.bincount(times).tolist())
        return cls(_on(device, sequences), _on(device, items), batch_sizes)

    def batches(self) -> Iterator[slice]:
        """The batches as ranges of :attr:`items`, in the order of time."""
        start = 0
        for size in self.batch_sizes:
            yield slice(start, start + size)
            start += size


@dataclass(frozen=True, slots=True)
class Chunks:
    """Sequences cut into chunks of one size; only the last of a sequence may have room left.

    Attributes:
        size: tokens per chunk.
        count: chunks of all sequences.
        slots: ``(num_tokens,)`` each token's place in ``(count * size)``.
        order: of the chunks, in which their states follow from one another.
    """

    size: int
    count: int
    slots: Tensor
    order: TimeOrder

    @classmethod
    def of(cls, lengths: Tensor, device: torch.device) -> Chunks:
        """Cut sequences of ``lengths`` ``(num_sequences,)`` (on the CPU) tokens."""
        size = min(_MAX_CHUNK, int(lengths.max()))
        counts = (lengths.numpy() + (size - 1)) // size
        owners, times = _owners_and_times(lengths.numpy())
        firsts = (counts.cumsum() - counts) * size
        slots, order = firsts[owners] + times, TimeOrder.of(torch.from_numpy(counts), device)
        return cls(size, int(counts.sum()), _on(device, slots), order)

    def pad(self, tokens: Tensor) -> Tensor:
        """``(num_tokens, ...)`` to ``(count, size, ...)``, zeros where a chunk has room left."""
        padded = tokens.new_zeros(self.count * self.size, *tokens.shape[1:])
        return padded.index_copy_(0, self.slots, tokens).view(
            self.count, self.size, *tokens.shape[1:]
        )

    def unpad(self, padded: Tensor) -> Tensor:
        """``(count, size, ...)`` back to ``(num_tokens, ...)``."""
        return padded.flatten(0, 1).index_select(0, self.slots)


class PackedLayout:
    """Where the tokens of a step's requests lie, in the forms that recurrences want.

    One serves all layers of a step; what no layer asks for is not made.

    Args:
        query_start_loc: ``(num_reqs + 1,)`` integers on the CPU; every request has a token.
        num_decodes: how many of the leading requests have exactly one token.
        history: earlier tokens that a layer's convolution sees.
        device: of the activations.
    """

    def __init__(
        self, query_start_loc: Tensor, num_decodes: int, history: int, device: torch.device
    ) -> None:
        self.num_decodes = num_decodes
        self.history = history
        self.device = device
        self._starts = query_start_loc.long()
        self._lengths = self._starts.diff()

    @property
    def num_reqs(self) -> int:
        """Requests in the step."""
        return self._lengths.shape[0]

    @property
    def num_tokens(self) -> int:
        """Tokens in the step."""
        return int(self._starts[-1])

    @cached_property
    def history_rows(self) -> HistoryRows:
        """Rows for a convolution over all requests at once."""
        starts = self._starts.numpy()
        owners, _ = _owners_and_times(self._lengths.numpy())
        tokens = np.arange(len(owners)) + (owners + 1) * self.history
        one = np.arange(self.history)
        before = np.arange(self.num_reqs) * self.history
        histories = (starts[:-1] + before)[:, None] + one
        next_histories = (starts[1:] + before)[:, None] + one
        rows = (tokens, histories.reshape(-1), next_histories.reshape(-1))
        return HistoryRows(*(_on(self.device, indices) for indices in rows))

    @cached_property
    def time_order(self) -> TimeOrder:
        """All tokens by their place in this step."""
        return TimeOrder.of(self._lengths, self.device)

    @cached_property
    def prefill_chunks(self) -> Chunks:
        """Chunks of the requests after the first ``num_decodes``, of which there must be one."""
        return Chunks.of(self._lengths[self.num_decodes :], self.device)


def _owners_and_times(lengths: _IntArray) -> tuple[_IntArray, _IntArray]:
    """Each item's sequence, and its place in it."""
    owners = np.arange(len(lengths)).repeat(lengths)
    firsts = lengths.cumsum() - lengths
    return owners, np.arange(len(owners)) - firsts[owners]


def _on(device: torch.device, indices: _IntArray) -> Tensor:
    return torch.from_numpy(indices).to(device, non_blocking=True)


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

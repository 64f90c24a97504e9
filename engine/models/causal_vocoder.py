"""Vocoders whose sound depends on earlier codes alone, from chunk to chunk.

A decoder whose tokens see a window of earlier ones, and convolutions that see only what came
before. What each layer has still to know of earlier chunks goes on in a state, so that sound which
is made in chunks is that of the whole. The networks are transformers'.

A transposed convolution of twice its stride gives, for each input, what this one and the input
before make of it. Before the first input there are zeros (0), or the network begins late and gives
one input's samples less::

    inputs       | a     | b     |  then  | c     |
    sound        | 0a    | ab    |  then  | bc    |
    begins late          | ab    |  then  | bc    |
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from math import ceil
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from engine.interface.config import GenerationParams
from engine.models.base import CodeChunk, GeneratorModel

State: TypeAlias = tuple[int, tuple[Tensor, ...]]
"""How many codes were, and what the layers keep of them, in the order in which they run."""


class CausalVocoder(GeneratorModel):
    """A vocoder that keeps a state from chunk to chunk, in float32; see :class:`GeneratorModel`.

    Args:
        window: places that one place of the decoder sees, itself among them.
    """

    has_flow = False

    def __init__(self, device: torch.device, window: int) -> None:
        super().__init__()
        self.device = device
        self._stream = _Stream(window)

    @abstractmethod
    def forward(self, codes: Tensor, starts: Tensor) -> Tensor:
        """Run the networks, by :meth:`attend` and what :meth:`stream_convolutions` put in.

        Args:
            codes: ``(B, num_codebooks, n)``, on the model's device.
            starts: ``(B,)``, how many codes came before these, on the CPU.

        Returns:
            ``(B, 1, num_samples)``.
        """

    @property
    def nbytes(self) -> int:
        """Bytes of the weights; codebooks are buffers."""
        return sum(tensor.nbytes for tensor in self.state_dict().values())

    def new_state(self) -> State:
        """See :meth:`GeneratorModel.new_state`."""
        return 0, ()

    # Not inference_mode: users may go on with the samples as they like.
    @torch.no_grad()
    def generate(
        self, chunks: Sequence[CodeChunk], params: GenerationParams
    ) -> tuple[Sequence[Tensor], Sequence[State]]:
        """See :meth:`GeneratorModel.generate`; chunks whose states have one shape run together."""
        alike: dict[Any, list[int]] = {}
        for index, chunk in enumerate(chunks):
            shapes = tuple(tensor.shape for tensor in chunk.state[1])
            alike.setdefault(shapes, []).append(index)
        made: dict[int, tuple[Tensor, State]] = {}
        for members in alike.values():
            codes = torch.stack([chunks[index].codes for index in members]).to(self.device)
            states = [chunks[index].state for index in members]
            samples, kept = self._run(codes.transpose(1, 2), states)
            for row, index in enumerate(members):
                num_done = states[row][0] + codes.shape[1]
                # Copies, so that no state keeps those of its neighbours.
                state = tuple(tensor[row].clone() for tensor in kept)
                made[index] = samples[row], (num_done, state)
        ordered = [made[index] for index in range(len(chunks))]
        return [samples for samples, _ in ordered], [state for _, state in ordered]

    def _run(self, codes: Tensor, states: Sequence[State]) -> tuple[Tensor, list[Tensor]]:
        """Codes ``(B, num_codebooks, n)`` to samples ``(B, ...)``, and what layers keep."""
        known = [torch.stack(each) for each in zip(*(s[1] for s in states), strict=True)]
        self._stream.known, self._stream.kept = iter(known), []
        sound: Tensor = self(codes, torch.tensor([num_done for num_done, _ in states]))
        samples = sound.clamp(min=-1, max=1).flatten(1).float()
        kept, self._stream.kept = self._stream.kept, []
        return samples.cpu(), kept

    def attend(self, network: Any, hidden: Tensor, starts: Tensor) -> Tensor:
        """Run a decoder's layers; they keep the window's keys and values.

        Args:
            hidden: ``(B, n, hidden_size)``.
            starts: ``(B,)``, how many places came before these, on the CPU.
        """
        length, window = hidden.shape[1], self._stream.window
        places = starts[:, None] + torch.arange(length)
        rotation = network.rotary_emb(hidden, places.to(self.device))
        # Of all rows the same number is kept, or they would not run together.
        num_past = min(int(starts[0]), window - 1)
        keys = torch.arange(num_past + length, device=self.device)
        distance = keys[num_past:, None] - keys
        # To be added to scores: attention of transformers does not take truth values in all ways.
        mask = hidden.new_zeros(1, 1, *distance.shape)
        mask.masked_fill_((distance < 0) | (distance >= window), -torch.inf)
        for layer in network.layers:
            hidden = layer(
                hidden,
                attention_mask=mask,
                position_embeddings=rotation,
                past_key_values=self._stream,
            )
        return hidden

    def stream_convolutions(
        self, network: nn.Module, kinds: tuple[type[nn.Module], ...], *, begins_late: bool = False
    ) -> None:
        """Put what runs over pieces in the place of causal convolutions.

        Args:
            kinds: modules of transformers that pad or trim what their ``conv`` takes or gives.
            begins_late: see the module's note.
        """
        for module in list(network.modules()):
            for name, child in module.named_children():
                if isinstance(child, kinds):
                    conv = cast("Any", child).conv
                    streamed = _Streamed(conv, self._stream, begins_late=begins_late)
                    setattr(module, name, streamed)


class _Stream:
    """What layers keep of a signal's pieces, in the order in which they run.

    Attributes:
        known: of the pieces before; ends at once if there were none.
        kept: takes what they keep now.
    """

    known: Iterator[Tensor]
    kept: list[Tensor]

    def __init__(self, window: int) -> None:
        self.window = window

    def extend(self, piece: Tensor, num_kept: int, before: Tensor | None = None) -> Tensor:
        """Put a piece behind what was kept of those before it, along dimension 2.

        Args:
            num_kept: places at the end that the next piece needs.
            before: stands for what was kept before the first piece.
        """
        past = next(self.known, before)
        whole = piece if past is None else torch.cat((past, piece), dim=2)
        self.kept.append(whole[:, :, max(whole.shape[2] - num_kept, 0) :])
        return whole

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values that a layer sees; called by transformers as its caches are."""
        return self.extend(key, self.window - 1), self.extend(value, self.window - 1)


class _Streamed(nn.Module):
    """Stands in for a causal convolution of transformers, and runs over the next piece."""

    def __init__(
        self, conv: nn.Conv1d | nn.ConvTranspose1d, stream: _Stream, *, begins_late: bool
    ) -> None:
        super().__init__()
        self.conv, self._stream = conv, stream
        (kernel,), (stride,) = conv.kernel_size, conv.stride
        self._is_transposed = isinstance(conv, nn.ConvTranspose1d)
        self._num_kept = conv.dilation[0] * (kernel - 1)
        if self._is_transposed:
            self._num_kept = ceil((kernel - stride) / stride)
        self._trimmed = self._num_kept * stride, kernel - stride
        self._has_zeros = not (begins_late and self._is_transposed)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, channels, n)`` to what comes behind the piece before, ``(B, channels, ...)``."""
        if self._num_kept:
            zeros = x.new_zeros(*x.shape[:2], self._num_kept) if self._has_zeros else None
            x = self._stream.extend(x, self._num_kept, zeros)
        output: Tensor = self.conv(x)
        if not self._is_transposed:
            return output
        left, right = self._trimmed
        return output[:, :, left : output.shape[2] - right]

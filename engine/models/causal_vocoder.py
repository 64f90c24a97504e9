"""Causal vocoders: audio depends only on earlier codes and is generated chunk by chunk.

They consist of a decoder with sliding-window attention and of causal convolutions. A state keeps
what each layer needs of earlier chunks, so that audio generated in chunks equals audio generated at
once. The networks are transformers'.

The output of a transposed convolution with a kernel of twice its stride depends, for each input, on
this and the previous input. Zeros (0) precede the first input, or the network begins late and
outputs one input's samples less::

    inputs       | a     | b     |  then  | c     |
    audio        | 0a    | ab    |  then  | bc    |
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
"""Number of codes so far, and the tensors kept by the layers, in the order in which they run."""


class CausalVocoder(GeneratorModel):
    """A vocoder that keeps a state from chunk to chunk, in float32; see :class:`GeneratorModel`.

    Args:
        window: number of positions that one position of the decoder sees, including itself.
    """

    has_flow = False

    def __init__(self, device: torch.device, window: int) -> None:
        super().__init__()
        self.device = device
        self._stream = _Stream(window)

    @abstractmethod
    def forward(self, codes: Tensor, starts: Tensor) -> Tensor:
        """Run the networks with :meth:`attend` and the layers set by :meth:`stream_convolutions`.

        Args:
            codes: ``(B, num_codebooks, n)``, on the model's device.
            starts: ``(B,)``, the number of codes before these, on the CPU.

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

    # Not inference_mode, so that users may process the samples further without restrictions.
    @torch.no_grad()
    def generate(
        self, chunks: Sequence[CodeChunk], params: GenerationParams
    ) -> tuple[Sequence[Tensor], Sequence[State]]:
        """See :meth:`GeneratorModel.generate`; chunks with equal state shapes are batched."""
        groups: dict[Any, list[int]] = {}
        for index, chunk in enumerate(chunks):
            shapes = tuple(tensor.shape for tensor in chunk.state[1])
            groups.setdefault(shapes, []).append(index)
        results: dict[int, tuple[Tensor, State]] = {}
        for members in groups.values():
            codes = torch.stack([chunks[index].codes for index in members]).to(self.device)
            states = [chunks[index].state for index in members]
            samples, kept = self._run(codes.transpose(1, 2), states)
            for row, index in enumerate(members):
                num_done = states[row][0] + codes.shape[1]
                # Cloned, so that a state does not keep the whole batch alive.
                state = tuple(tensor[row].clone() for tensor in kept)
                results[index] = samples[row], (num_done, state)
        ordered = [results[index] for index in range(len(chunks))]
        return [samples for samples, _ in ordered], [state for _, state in ordered]

    def _run(self, codes: Tensor, states: Sequence[State]) -> tuple[Tensor, list[Tensor]]:
        """Map codes ``(B, num_codebooks, n)`` to samples ``(B, ...)`` and the layers' new state."""
        known = [torch.stack(each) for each in zip(*(s[1] for s in states), strict=True)]
        self._stream.known, self._stream.kept = iter(known), []
        sound: Tensor = self(codes, torch.tensor([num_done for num_done, _ in states]))
        samples = sound.clamp(min=-1, max=1).flatten(1).float()
        kept, self._stream.kept = self._stream.kept, []
        return samples.cpu(), kept

    def attend(self, network: Any, hidden: Tensor, starts: Tensor) -> Tensor:
        """Run a decoder's layers, which keep the window's keys and values.

        Args:
            hidden: ``(B, n, hidden_size)``.
            starts: ``(B,)``, the number of positions before these, on the CPU.
        """
        length, window = hidden.shape[1], self._stream.window
        places = starts[:, None] + torch.arange(length)
        rotation = network.rotary_emb(hidden, places.to(self.device))
        # All rows of a batch keep the same number of positions.
        num_past = min(int(starts[0]), window - 1)
        keys = torch.arange(num_past + length, device=self.device)
        distance = keys[num_past:, None] - keys
        # Additive: not all attention implementations of transformers accept a boolean mask.
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
        """Replace causal convolutions by streaming ones.

        Args:
            kinds: modules of transformers that pad the input or trim the output of their ``conv``.
            begins_late: see the module docstring.
        """
        for module in list(network.modules()):
            for name, child in module.named_children():
                if isinstance(child, kinds):
                    conv = cast("Any", child).conv
                    streamed = _Streamed(conv, self._stream, begins_late=begins_late)
                    setattr(module, name, streamed)


class _Stream:
    """State that layers keep between chunks of a signal, in the order in which they run.

    Attributes:
        known: tensors kept from earlier chunks; empty if there were none.
        kept: collects the tensors kept from this chunk.
    """

    known: Iterator[Tensor]
    kept: list[Tensor]

    def __init__(self, window: int) -> None:
        self.window = window

    def extend(self, piece: Tensor, num_kept: int, before: Tensor | None = None) -> Tensor:
        """Append a chunk to what was kept of the earlier ones, along dimension 2.

        Args:
            num_kept: number of positions at the end that the next chunk needs.
            before: used in place of kept positions before the first chunk.
        """
        past = next(self.known, before)
        whole = piece if past is None else torch.cat((past, piece), dim=2)
        self.kept.append(whole[:, :, max(whole.shape[2] - num_kept, 0) :])
        return whole

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values that a layer sees; called by transformers like its caches."""
        return self.extend(key, self.window - 1), self.extend(value, self.window - 1)


class _Streamed(nn.Module):
    """Streaming replacement of a causal convolution of transformers."""

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
        self._pads_start = not (begins_late and self._is_transposed)

    def forward(self, x: Tensor) -> Tensor:
        """Map the next chunk ``(B, channels, n)`` to its output ``(B, channels, ...)``."""
        if self._num_kept:
            zeros = x.new_zeros(*x.shape[:2], self._num_kept) if self._pads_start else None
            x = self._stream.extend(x, self._num_kept, zeros)
        output: Tensor = self.conv(x)
        if not self._is_transposed:
            return output
        left, right = self._trimmed
        return output[:, :, left : output.shape[2] - right]

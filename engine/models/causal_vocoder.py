"""Vocoders whose sound depends on earlier codes alone: in chunks or whole, the same sound.

What each layer has still to know of earlier chunks goes on in a state. A transposed convolution of
twice its stride gives, for each input, what this one and the input before make of it. Some networks
begin with the first input alone, others with the second::

    inputs    | a     | b     | c     |         sound | a     | ab    | bc    |
    chunks    | a     | b     |  then  | c     |      | a     | ab    |  then  | bc    |
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.interface.config import GenerationParams
from engine.models.base import CodeChunk, GeneratorModel

State: TypeAlias = tuple[int, tuple[Tensor, ...]]
"""How many codes were, and what the layers keep of them, in the order in which they run."""

Rotate: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class _Stream:
    """What layers keep of a signal's pieces, in the order in which they run.

    Attributes:
        known: of the pieces before; ends at once if there were none.
        kept: takes what they keep now.
    """

    known: Iterator[Tensor]
    kept: list[Tensor]


@dataclass(frozen=True, slots=True)
class Overlap:
    """How a causal convolution's pieces meet.

    Attributes:
        num_kept: inputs of the piece before that the next one needs.
        is_padded: whether zeros stand for them before the first piece.
        trims: samples cut off at the left of the first piece, of later ones, and at the right.
    """

    num_kept: int
    is_padded: bool
    trims: tuple[int, int, int] = (0, 0, 0)


class StreamedConv(nn.Module):
    """Stands in for a causal convolution of transformers, and runs over the next piece."""

    def __init__(self, conv: nn.Module, overlap: Overlap, stream: _Stream) -> None:
        super().__init__()
        self.conv, self._overlap, self._stream = conv, overlap, stream

    def forward(self, x: Tensor) -> Tensor:
        """``(B, channels, n)`` to what comes behind the piece before, ``(B, channels, ...)``."""
        overlap, past = self._overlap, None
        num_kept = overlap.num_kept
        if num_kept:
            past = next(self._stream.known, None)
            before = past
            if past is None and overlap.is_padded:
                before = x.new_zeros(*x.shape[:2], num_kept)
            x = x if before is None else torch.cat((before, x), dim=2)
            self._stream.kept.append(x[:, :, -num_kept:])
        output: Tensor = self.conv(x)
        first, later, right = overlap.trims
        left = first if past is None else later
        return output[:, :, left : output.shape[2] - right]


class CausalVocoder(GeneratorModel):
    """Runs chunks whose states have one shape together; see the module's note.

    Attributes:
        window: places that one of the decoder's sees, itself included.
        rotate: turns queries and keys by cosines and sines.
    """

    window: int
    rotate: Rotate

    def __init__(self) -> None:
        super().__init__()
        self.stream = _Stream()

    def replace_convolutions(
        self, network: nn.Module, overlap_of: Callable[[nn.Module], Overlap | None]
    ) -> None:
        """Put a stand-in in the place of each convolution that has an overlap."""
        for module in list(network.modules()):
            for name, child in module.named_children():
                if (overlap := overlap_of(child)) is not None:
                    conv = cast("Any", child).conv
                    setattr(module, name, StreamedConv(conv, overlap, self.stream))

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
            samples, kept = self._run(codes, states)
            for row, index in enumerate(members):
                num_done = states[row][0] + codes.shape[1]
                # Copies, so that no state keeps those of its neighbours.
                state = tuple(tensor[row].clone() for tensor in kept)
                made[index] = samples[row], (num_done, state)
        ordered = [made[index] for index in range(len(chunks))]
        return [samples for samples, _ in ordered], [state for _, state in ordered]

    def _run(self, codes: Tensor, states: Sequence[State]) -> tuple[Tensor, list[Tensor]]:
        """Codes ``(B, n, num_codebooks)`` to samples ``(B, ...)``, and what layers keep."""
        stream = self.stream
        known = [torch.stack(each) for each in zip(*(s[1] for s in states), strict=True)]
        stream.known, stream.kept = iter(known), []
        starts = torch.tensor([num_done for num_done, _ in states], device=self.device)
        samples = self.sound_of(codes.transpose(1, 2), starts)
        kept, stream.kept = stream.kept, []
        return samples.flatten(1).clamp(min=-1, max=1).float().cpu(), kept

    @abstractmethod
    def sound_of(self, codes: Tensor, starts: Tensor) -> Tensor:
        """Run the network over the next piece.

        Args:
            codes: ``(B, num_codebooks, n)``.
            starts: ``(B,)``, how many places were before.

        Returns:
            Samples ``(B, 1, ...)``.
        """

    def attend(self, network: Any, hidden: Tensor, starts: Tensor) -> Tensor:
        """Layers over ``(B, n, hidden_size)``; they keep the window's keys and values."""
        length = hidden.shape[1]
        places = starts[:, None] + torch.arange(length, device=self.device)
        cos, sin = network.rotary_emb(hidden, places)
        mask = None
        for layer in network.layers:
            attention, normed = layer.self_attn, layer.input_layernorm(hidden)
            query, key, value = (
                project(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            query, key = type(self).rotate(query, key, cos, sin)
            past = next(self.stream.known, None)
            if past is not None:
                key = torch.cat((past[:, 0], key), dim=2)
                value = torch.cat((past[:, 1], value), dim=2)
            if mask is None:
                mask = self._sees(length, key.shape[2])
            self.stream.kept.append(torch.stack((key, value), dim=1)[:, :, :, 1 - self.window :])
            attended = F.scaled_dot_product_attention(
                query, key, value, mask, scale=attention.scaling, enable_gqa=True
            )
            output = attention.o_proj(attended.transpose(1, 2).flatten(2))
            hidden = hidden + layer.self_attn_layer_scale(output)
            output = layer.mlp(layer.post_attention_layernorm(hidden))
            hidden = hidden + layer.mlp_layer_scale(output)
        return hidden

    def _sees(self, num_queries: int, num_keys: int) -> Tensor:
        """Which keys each query sees, ``(num_queries, num_keys)``; both end at one place."""
        queries = torch.arange(num_keys - num_queries, num_keys, device=self.device)
        distance = queries[:, None] - torch.arange(num_keys, device=self.device)
        return (distance >= 0) & (distance < self.window)

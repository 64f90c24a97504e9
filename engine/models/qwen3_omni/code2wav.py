"""Qwen3-Omni's vocoder: codes of several codebooks to sound, from chunk to chunk.

All of it is causal: a decoder whose tokens see a window of earlier ones, then convolutions that see
only what came before. What each layer has still to know of earlier chunks goes on in a state, so
that sound which is made in chunks is that of the whole. The networks are transformers'.

A transposed convolution of twice its stride gives, for each input, what this one and the input
before make of it; so each of them gives one input's samples less than it gets, at the beginning::

    inputs    | a     | b     | c     |            sound | ab    | bc    |
    chunks    | a     | b     |  then  | c     |         | ab    |  then  | bc    |

Source: Xu et al., "Qwen3-Omni Technical Report", 2025; transformers' ``qwen3_omni_moe``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from math import prod
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCausalConvNet,
    Qwen3OmniMoeCausalTransConvNet,
    Qwen3OmniMoeCode2Wav,
    apply_rotary_pos_emb,
)

from engine.checkpoints.checkpoint import Checkpoint
from engine.interface.config import GenerationParams
from engine.models.base import CodeChunk, GeneratorModel, ModelSettings
from engine.models.checked_loading import Places, load_checked
from engine.models.encoder_module import build_empty

# Samples per second of this family; its configs do not tell.
_SAMPLING_RATE = 24_000
_CAUSAL = (Qwen3OmniMoeCausalConvNet, Qwen3OmniMoeCausalTransConvNet)

State: TypeAlias = tuple[int, tuple[Tensor, ...]]
"""How many codes were, and what the layers keep of them, in the order in which they run."""


class Qwen3Code2Wav(GeneratorModel):
    """The vocoder of a checkpoint, in float32; see :class:`GeneratorModel`.

    Args:
        checkpoint: opened at its part ``code2wav``.

    Raises:
        ValueError: the weights do not fit the config.
    """

    sampling_rate = _SAMPLING_RATE

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        super().__init__()
        config: Any = checkpoint.config
        self.device = device
        self.num_codes, self.num_codebooks = config.codebook_size, config.num_quantizers
        self.max_codes = config.max_position_embeddings
        rates = (*config.upsampling_ratios, *config.upsample_rates)
        self.samples_per_code = prod(rates)
        # Each of the last rates loses an input's samples, which the rates behind it multiply.
        behind = [prod(config.upsample_rates[n:]) for n in range(len(config.upsample_rates))]
        self.num_missing = sum(behind)
        self.window: int = config.sliding_window
        self.network = load_checked(
            checkpoint,
            device,
            lambda where: build_empty(
                Qwen3OmniMoeCode2Wav,
                config,
                ModelSettings(torch.float32, where, 1, self.max_codes),
            ),
            lambda network: Places(network.state_dict()),
        )
        self._stream = _Stream()
        for module in list(self.network.modules()):
            for name, child in module.named_children():
                if isinstance(child, _CAUSAL):
                    setattr(module, name, _Streamed(child, self._stream))

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
        network = self.network
        known = [torch.stack(each) for each in zip(*(s[1] for s in states), strict=True)]
        self._stream.known, self._stream.kept = iter(known), []
        hidden = network.code_embedding(codes + network.code_offset).mean(1)
        starts = torch.tensor([num_done for num_done, _ in states], device=self.device)
        hidden = self._attend(hidden, starts).transpose(1, 2)
        for block in (*chain.from_iterable(network.upsample), *network.decoder):
            hidden = block(hidden)
        samples = hidden.clamp(min=-1, max=1).flatten(1).float()
        kept, self._stream.kept = self._stream.kept, []
        return samples.cpu(), kept

    def _attend(self, hidden: Tensor, starts: Tensor) -> Tensor:
        """The decoder over ``(B, n, hidden_size)``; it keeps the window's keys and values."""
        network: Any = self.network.pre_transformer
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
            query, key = apply_rotary_pos_emb(query, key, cos, sin)
            past = next(self._stream.known, None)
            if past is not None:
                key = torch.cat((past[:, 0], key), dim=2)
                value = torch.cat((past[:, 1], value), dim=2)
            if mask is None:
                mask = self._sees(length, key.shape[2])
            self._stream.kept.append(torch.stack((key, value), dim=1)[:, :, :, 1 - self.window :])
            attended = F.scaled_dot_product_attention(
                query, key, value, mask, scale=attention.scaling, enable_gqa=True
            )
            output = attention.o_proj(attended.transpose(1, 2).flatten(2))
            hidden = hidden + layer.self_attn_layer_scale(output)
            output = layer.mlp(layer.post_attention_layernorm(hidden))
            hidden = hidden + layer.mlp_layer_scale(output)
        output = network.norm(hidden)
        assert isinstance(output, Tensor)
        return output

    def _sees(self, num_queries: int, num_keys: int) -> Tensor:
        """Which keys each query sees, ``(num_queries, num_keys)``; both end at one place."""
        queries = torch.arange(num_keys - num_queries, num_keys, device=self.device)
        distance = queries[:, None] - torch.arange(num_keys, device=self.device)
        return (distance >= 0) & (distance < self.window)


class _Stream:
    """What layers keep of a signal's pieces, in the order in which they run.

    Attributes:
        known: of the pieces before; ends at once if there were none.
        kept: takes what they keep now.
    """

    known: Iterator[Tensor]
    kept: list[Tensor]


class _Streamed(nn.Module):
    """Stands in for a causal convolution of transformers, and runs over the next piece."""

    def __init__(self, module: nn.Module, stream: _Stream) -> None:
        super().__init__()
        self.module, self._stream = module, stream

    def forward(self, x: Tensor) -> Tensor:
        """``(B, channels, n)`` to what comes behind the piece before, ``(B, channels, ...)``."""
        module, stream = cast("Any", self.module), self._stream
        is_plain = isinstance(module, Qwen3OmniMoeCausalConvNet)
        num_kept = module.padding if is_plain else min(module.left_pad, 1)
        if num_kept:
            past = next(stream.known, None)
            if past is None and is_plain:
                past = x.new_zeros(*x.shape[:2], num_kept)
            x = x if past is None else torch.cat((past, x), dim=2)
            stream.kept.append(x[:, :, -num_kept:])
        output: Tensor = module.conv(x)
        if is_plain:
            return output
        return output[:, :, module.left_pad : output.shape[2] - module.right_pad]

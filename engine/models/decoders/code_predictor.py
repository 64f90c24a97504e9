"""Prediction of the further codebooks of a token that was just sampled.

::

    [ the token's row ][ first code ][ second ] ... ──► the next

A small decoder runs over the codes of one token. It sees nothing else, so no state is kept from
step to step. Its sequences are short, and those of all tokens in a step run as one batch.

Source: the depth transformer of Lee et al., "Autoregressive Image Generation using Residual
Quantization", 2022.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.checkpoints.quantized_weight import Target
from engine.layers import RotaryEmbedding
from engine.models.base import ModelSettings
from engine.models.decoders.decoder import DecoderConfig, DecoderLayer, SelfAttention, build_norm
from engine.sampling.sampler import FurtherDraws


class PredictorLayer(DecoderLayer):
    """A layer over the few codes of one token, batched over all tokens of a step."""

    def run(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run over ``(n, positions, hidden_size)``, which follow the past's positions.

        Returns the same shape, and all keys and values, ``(n, heads, positions, head_dim)``.
        """
        attention, (n, places, _) = self.mixer, x.shape
        assert isinstance(attention, SelfAttention)
        residual = x.flatten(0, 1)
        qkv = attention.qkv(self.input_norm(residual)).view(n * places, -1, attention.head_dim)
        num_heads = attention.kv_start // attention.head_dim
        heads = qkv[:, :num_heads]
        if attention.head_norm is not None:
            heads = attention.head_norm(heads)
        attention.ops.rotate(heads, *rotation)
        heads = torch.cat((heads, qkv[:, num_heads:]), dim=1)
        heads = heads.unflatten(0, (n, places)).transpose(1, 2)
        query = heads[:, : attention.num_heads]
        key, value = heads[:, attention.num_heads :].chunk(2, dim=1)
        if past is not None:
            key, value = torch.cat((past[0], key), dim=2), torch.cat((past[1], value), dim=2)
        attended = F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=past is None,
            scale=attention.attention.scoring.scale,
            enable_gqa=True,
        )
        residual = residual + attention.output(attended.transpose(1, 2).reshape(n * places, -1))
        residual = residual + self.mlp(self.mlp_norm(residual))
        return residual.view_as(x), (key, value)


class CodePredictor(nn.Module):
    """Draws the codes after the first, separately for each token; see the module docstring."""

    def __init__(
        self,
        decoder: DecoderConfig,
        rotary: RotaryEmbedding,
        num_further: int,
        settings: ModelSettings,
    ) -> None:
        super().__init__()
        self.num_further, self.rotary = num_further, rotary
        layers = [PredictorLayer(i, decoder, settings) for i in range(len(decoder.layers))]
        self.layers, self._layers = nn.ModuleList(layers), layers
        self.norm = build_norm(decoder, settings)

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Yield checkpoint names under ``prefix``, each with the tensor to load it into."""
        for index, layer in enumerate(self._layers):
            yield from layer.targets(f"{prefix}model.layers.{index}.")
        yield f"{prefix}model.norm.weight", self.norm.weight.data

    @abstractmethod
    def embed_code(self, codes: Tensor, codebook: int) -> Tensor:
        """Map codes ``(n,)`` of a codebook, 1 or more, to rows ``(n, width)`` like the first's."""

    @abstractmethod
    def logits(self, rows: Tensor, codebook: int) -> Tensor:
        """Map normed rows ``(n, hidden_size)`` to the logits ``(n, codes)`` of a codebook."""

    def enter(self, rows: Tensor) -> Tensor:
        """Map rows ``(n, positions, width)`` to the layers' inputs; the identity by default."""
        return rows

    def forward(self, rows: Tensor, first: Tensor, draws: FurtherDraws) -> Tensor:
        """Draw ``(n, num_further)`` codes.

        Args:
            rows: ``(n, width)``, from which the first codes were sampled.
            first: ``(n, width)`` embeddings of the first codes.
            draws: see :meth:`CausalModel.draw_codes`.
        """
        x, begin = self.enter(torch.stack((rows, first), dim=1)), 0
        past: list[tuple[Tensor, Tensor] | None] = [None] * len(self._layers)
        drawn = []
        for codebook in range(1, self.num_further + 1):
            places = torch.arange(begin, begin + x.shape[1], device=x.device).repeat(len(x))
            rotation = self.rotary(places)
            begin += x.shape[1]
            for number, layer in enumerate(self._layers):
                x, past[number] = layer.run(x, rotation, past[number])
            logits = self.logits(self.norm(x[:, -1].contiguous()), codebook)
            drawn.append(draws.code(logits.float(), codebook))
            x = self.enter(self.embed_code(drawn[-1], codebook).unsqueeze(1))
        return torch.stack(drawn, dim=1)

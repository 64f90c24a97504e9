"""The decoder that the Llama-like families share, written once over packed tokens.

One layer, for ``n`` tokens of all requests together::

    residual ──norm──► qkv ──► [norm per head] ──► rotate Q and K in place ──► attention ──► o ─┐
        └──────────────────────────────── + ◄──────────────────────────────────────────────────┘
        └──norm──► gate|up ──► act(gate) * up ──► down ──► + (added by the next layer's norm)

Few operations per layer matter here: with 16 tokens in a decode step on a CPU, the time between
the products is a good part of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention.layer import Attention, AttentionStep
from engine.layers import GatedMLP, LayerOps, Linear, RMSNorm, RotaryEmbedding
from engine.models.base import CausalModel
from engine.models.decoder_config import DecoderConfig
from prefix_cache import FullAttentionSpec

__all__ = ["DecoderModel", "ModelSettings"]


class TensorOptions(TypedDict):
    """What every weight of a model has in common."""

    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """How a model is to be held in memory.

    Attributes:
        dtype: of weights, activations and the KV cache.
        device: of the same.
        block_size: tokens per block of the KV cache.
        ops: what computes norms, gates and rotations.
    """

    dtype: torch.dtype
    device: torch.device
    block_size: int
    ops: LayerOps = field(default_factory=LayerOps)

    @property
    def tensor_options(self) -> TensorOptions:
        """As layers and ``torch.empty`` take them."""
        return {"dtype": self.dtype, "device": self.device}


class HeadNorm(nn.Module):
    """RMS norm of each head of Q and K, with one weight for Q's heads and one for K's."""

    def __init__(self, config: DecoderConfig, settings: ModelSettings) -> None:
        super().__init__()
        num_heads = config.num_heads + config.num_kv_heads
        # A row per head, so that Q and K are scaled by one product.
        weight = torch.empty(num_heads, config.head_dim, **settings.tensor_options)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.num_query_heads = config.num_heads
        self.eps = config.rms_norm_eps

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """The first row of each kind; :meth:`finish_loading` copies it to the others."""
        yield f"{prefix}q_norm.weight", self.weight.data[0]
        yield f"{prefix}k_norm.weight", self.weight.data[self.num_query_heads]

    def finish_loading(self) -> None:
        """Repeat the loaded weights over the heads."""
        query, key = self.weight.data.tensor_split((self.num_query_heads,))
        query.copy_(query[0].clone().expand_as(query))
        key.copy_(key[0].clone().expand_as(key))

    def forward(self, heads: Tensor) -> Tensor:
        """Normalise ``(num_tokens, query heads + key heads, head_dim)``."""
        normed = F.rms_norm(heads.float(), heads.shape[-1:], None, self.eps)
        return normed.to(heads.dtype).mul_(self.weight)


class DecoderLayer(nn.Module):
    """Attention and MLP with their norms; see the module's picture."""

    def __init__(self, index: int, config: DecoderConfig, settings: ModelSettings) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.kv_start = query_size + kv_size
        self.ops = settings.ops
        options = settings.tensor_options
        self.input_norm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, ops=settings.ops, **options
        )
        self.qkv = Linear(
            config.hidden_size,
            {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size},
            bias=config.qkv_bias,
            **options,
        )
        self.head_norm = HeadNorm(config, settings) if config.qk_norm else None
        self.output = Linear(
            query_size, {"o_proj": config.hidden_size}, bias=config.output_bias, **options
        )
        self.post_attention_norm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, ops=settings.ops, **options
        )
        self.mlp = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            config.activation,
            bias=config.mlp_bias,
            ops=settings.ops,
            **options,
        )
        spec = FullAttentionSpec(
            settings.block_size, config.num_kv_heads, config.head_dim, settings.dtype
        )
        self.attention = Attention(f"layers.{index}.self_attn", spec, config.head_dim**-0.5)

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names under ``prefix``, each with the tensor that receives it."""
        yield f"{prefix}input_layernorm.weight", self.input_norm.weight.data
        yield from self.qkv.targets(f"{prefix}self_attn.")
        if self.head_norm is not None:
            yield from self.head_norm.targets(f"{prefix}self_attn.")
        yield from self.output.targets(f"{prefix}self_attn.")
        yield f"{prefix}post_attention_layernorm.weight", self.post_attention_norm.weight.data
        yield from self.mlp.targets(f"{prefix}mlp.")

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, step: AttentionStep) -> Tensor:
        """Attention of normed ``x`` ``(num_tokens, hidden_size)``, projected back to its shape."""
        num_tokens = x.shape[0]
        qkv = self.qkv(x)
        heads = qkv[:, : self.kv_start].view(num_tokens, -1, self.head_dim)
        value = qkv[:, self.kv_start :].view(num_tokens, -1, self.head_dim)
        if self.head_norm is not None:
            heads = self.head_norm(heads)
        self.ops.rotate(heads, cos, sin)
        attended = self.attention(
            heads[:, : self.num_heads], heads[:, self.num_heads :], value, step
        )
        projected: Tensor = self.output(attended.reshape(num_tokens, -1))
        return projected

    def forward(
        self, x: Tensor | None, residual: Tensor, cos: Tensor, sin: Tensor, step: AttentionStep
    ) -> Tensor:
        """Run the layer; ``residual`` is changed in place.

        Args:
            x: the layer below's MLP output, still to be added; None in the first layer.
            residual: ``(num_tokens, hidden_size)``.
            cos: of every token's position.
            sin: likewise.
            step: attention metadata of this step.

        Returns:
            This layer's MLP output, not yet added to ``residual``.
        """
        normed = self.input_norm(residual) if x is None else self.input_norm.add(x, residual)
        x = self.attend(normed, cos, sin, step)
        output: Tensor = self.mlp(self.post_attention_norm.add(x, residual))
        return output


class DecoderModel(CausalModel):
    """A stack of :class:`DecoderLayer` between an embedding and a head.

    Args:
        config: the normalised config.
        rotary: cosines and sines up to the longest sequence that will run.
        settings: types and places.
        has_head: False for a headless checkpoint (an embedding model): ``vocab_size`` is then 0.
    """

    def __init__(
        self,
        config: DecoderConfig,
        rotary: RotaryEmbedding,
        settings: ModelSettings,
        *,
        has_head: bool = True,
    ) -> None:
        super().__init__()
        self.config = config
        self.ops = settings.ops
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size if has_head else 0
        self.max_position_embeddings = config.max_position_embeddings
        options = settings.tensor_options
        embedding = torch.empty(config.vocab_size, config.hidden_size, **options)
        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.rotary = rotary
        layers = [DecoderLayer(i, config, settings) for i in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.attention_layers = [layer.attention for layer in layers]
        self.final_norm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, ops=settings.ops, **options
        )
        self.head: Linear | None = None
        if has_head:
            shared = self.embedding if config.tie_word_embeddings else None
            parts = {"lm_head": config.vocab_size}
            self.head = Linear(config.hidden_size, parts, weight=shared, **options)

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names, each with the tensor that receives it.

        Args:
            prefix: of every name but the head's: ``"model."``, or nothing in headless
                checkpoints.
        """
        yield f"{prefix}embed_tokens.weight", self.embedding.data
        for index, layer in enumerate(self.layers):
            if isinstance(layer, DecoderLayer):
                yield from layer.targets(f"{prefix}layers.{index}.")
        yield f"{prefix}norm.weight", self.final_norm.weight.data
        if self.head is not None and not self.config.tie_word_embeddings:
            yield from self.head.targets("")

    def finish_loading(self, *, pack_weights: bool) -> None:
        """Derive what is derived from loaded weights; call once, after the last copy.

        Args:
            pack_weights: whether to pack every product's weight for the CPU, one at a time. A
                tied head then costs its size once more: the embedding stays for the look-up.
        """
        for module in self.modules():
            if isinstance(module, HeadNorm):
                module.finish_loading()
            elif isinstance(module, Linear) and pack_weights:
                module.pack(self.ops)

    @property
    def weight_nbytes(self) -> int:
        """Bytes of all weights as they are held, packed ones included, shared ones once."""
        linears = [module for module in self.modules() if isinstance(module, Linear)]
        counted = {id(p) for linear in linears for p in linear.parameters()}
        others = [p for p in self.parameters() if id(p) not in counted]
        return sum(linear.nbytes for linear in linears) + sum(p.nbytes for p in others)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Token ids ``(n,)`` to embeddings ``(n, hidden_size)``."""
        return F.embedding(input_ids, self.embedding)

    def forward(
        self, inputs_embeds: Tensor, positions: Tensor, step: AttentionStep
    ) -> dict[str, Tensor]:
        """Run the layers; see :meth:`CausalModel.forward`."""
        cos, sin = self.rotary(positions)
        # Layers add to the residual in place; the caller's embeddings are not ours to change.
        residual = inputs_embeds.clone()
        x: Tensor | None = None
        for layer in self.layers:
            x = layer(x, residual, cos, sin, step)
        normed = self.final_norm(residual) if x is None else self.final_norm.add(x, residual)
        return {"hidden_states": normed}

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Rows of hidden states to float32 logits; see :meth:`CausalModel.compute_logits`."""
        if self.head is None:
            raise ValueError("this checkpoint has no language-model head: it cannot make logits")
        logits: Tensor = self.head(hidden_states)
        return logits.float()

"""A layer of Mllama's decoder that attends to the image in place of the text.

::

    residual ──norm──► q, norm per head ──► attention to the image ──► o ──► * gate ──┐
        └───────────────────────────────── + ◄────────────────────────────────────────┘
        └──norm──► MLP ──► * gate, 0 for tokens before the image ──► + (the next layer's norm)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from engine.attention.layer import Attention
from engine.attention.step import AttentionStep
from engine.layers import GatedMLP, Linear, RMSNorm
from engine.models.decoders.decoder_config import DecoderConfig
from engine.models.model_settings import ModelSettings
from prefix_cache import CrossAttentionSpec

__all__ = ["ImageLayer"]


class ImageLayer(nn.Module):
    """Gated cross-attention and gated MLP; see the module's picture."""

    def __init__(self, index: int, config: DecoderConfig, settings: ModelSettings) -> None:
        super().__init__()
        self.head_dim, self.num_kv_heads = config.head_dim, config.num_kv_heads
        hidden, options = config.hidden_size, settings.tensor_options
        query_size, kv_size = config.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.query = Linear(hidden, {"q_proj": query_size}, **options)
        self.key_value = Linear(hidden, {"k_proj": kv_size, "v_proj": kv_size}, **options)
        self.output = Linear(query_size, {"o_proj": hidden}, **options)
        eps, ops = config.rms_norm_eps, settings.ops
        self.query_norm = RMSNorm(self.head_dim, eps, ops=ops, **options)
        self.key_norm = RMSNorm(self.head_dim, eps, ops=ops, **options)
        self.input_norm = RMSNorm(hidden, eps, ops=ops, **options)
        self.mlp_norm = RMSNorm(hidden, eps, ops=ops, **options)
        self.mlp = GatedMLP(hidden, config.intermediate_size, config.activation, ops=ops, **options)
        gates = torch.empty(2, 1, **options)
        self.gates = nn.Parameter(gates, requires_grad=False)
        spec = CrossAttentionSpec(
            settings.block_size, self.num_kv_heads, self.head_dim, settings.dtype
        )
        self.attention = Attention(f"layers.{index}.cross_attn", spec, config.attention_scale)

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names under ``prefix``, each with the tensor that receives it."""
        for linear in (self.query, self.key_value, self.output):
            yield from linear.targets(f"{prefix}cross_attn.")
        yield from self.mlp.targets(f"{prefix}mlp.")
        for name, norm in (
            ("cross_attn.q_norm", self.query_norm),
            ("cross_attn.k_norm", self.key_norm),
            ("input_layernorm", self.input_norm),
            ("post_attention_layernorm", self.mlp_norm),
        ):
            yield f"{prefix}{name}.weight", norm.weight.data
        yield f"{prefix}cross_attn_attn_gate", self.gates.data[0]
        yield f"{prefix}cross_attn_mlp_gate", self.gates.data[1]

    def finish_loading(self) -> None:
        """Turn the stored gates into factors; call once."""
        self.gates.data.tanh_()

    def attend(self, x: Tensor, step: AttentionStep) -> Tensor:
        """Attention of normed ``x`` ``(num_tokens, hidden_size)``, projected back to its shape."""
        num_tokens = x.shape[0]
        query = self._normed_heads(self.query(x), self.query_norm)
        key: Tensor | None = None
        value: Tensor | None = None
        if step.encoder_hidden_states is not None:
            key, value = self.key_value(step.encoder_hidden_states).chunk(2, dim=-1)
            key = self._normed_heads(key, self.key_norm)
            value = value.unflatten(-1, (self.num_kv_heads, self.head_dim))
        attended = self.attention(query, key, value, step)
        projected: Tensor = self.output(attended.reshape(num_tokens, -1))
        return projected

    def _normed_heads(self, x: Tensor, norm: RMSNorm) -> Tensor:
        heads: Tensor = norm(x.reshape(-1, self.head_dim))
        return heads.view(x.shape[0], -1, self.head_dim)

    def forward(
        self,
        x: Tensor | None,
        residual: Tensor,
        rotation: tuple[Tensor, Tensor],
        step: AttentionStep,
    ) -> Tensor:
        """As :meth:`DecoderLayer.forward`; rows of an image have no positions to rotate by."""
        normed = self.input_norm(residual) if x is None else self.input_norm.add(x, residual)
        attended = self.attend(normed, step).mul_(self.gates[0])
        output: Tensor = self.mlp(self.mlp_norm.add(attended, residual)).mul_(self.gates[1])
        if step.follows_encoder is not None:
            output.mul_(step.follows_encoder[:, None])
        return output

"""Causal self-attention with its projections, as decoders and hybrids have it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from engine.attention.layer import Attention
from engine.attention.step import AttentionStep
from engine.layers import HeadNorm, Linear
from engine.models.decoders.decoder_config import DecoderConfig
from engine.models.model_settings import ModelSettings
from prefix_cache import AttentionSpec, FullAttentionSpec, SlidingWindowSpec

__all__ = ["SelfAttention"]


class SelfAttention(nn.Module):
    """Causal self-attention of one layer, over all tokens or a window of them.

    Args:
        index: of the layer, which names it.
        config: the model's config.
        settings: types, places and the block size.

    Raises:
        ValueError: the layer's window is smaller than a block.
    """

    def __init__(self, index: int, config: DecoderConfig, settings: ModelSettings) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.ops = settings.ops
        hidden, options = config.hidden_size, settings.tensor_options
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.kv_start = query_size + kv_size
        parts = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv = Linear(hidden, parts, bias=config.qkv_bias, **options)
        self.output = Linear(query_size, {"o_proj": hidden}, bias=config.output_bias, **options)
        self.head_norm: HeadNorm | None = None
        if config.qk_norm:
            self.head_norm = HeadNorm(
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                config.rms_norm_eps,
                offset=config.norm_offset,
                **options,
            )
        page = (settings.block_size, config.num_kv_heads, config.head_dim, settings.dtype)
        window = config.layers[index].window
        spec: AttentionSpec = FullAttentionSpec(*page)
        if window is not None:
            spec = SlidingWindowSpec(*page, window)
        scale, softcap = config.attention_scale, config.attention_softcap
        self.attention = Attention(f"layers.{index}.self_attn", spec, scale, softcap)

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names under ``prefix``, each with the tensor that receives it."""
        yield from self.qkv.targets(prefix)
        if self.head_norm is not None:
            yield from self.head_norm.targets(prefix)
        yield from self.output.targets(prefix)

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, step: AttentionStep
    ) -> Tensor:
        """Attend with ``(num_tokens, hidden_size)``; the result has the same shape.

        Args:
            x: the tokens, normed.
            rotation: cosines and sines of their positions; None for models without positions.
            step: attention metadata of this step.
        """
        num_tokens = x.shape[0]
        qkv = self.qkv(x)
        heads = qkv[:, : self.kv_start].view(num_tokens, -1, self.head_dim)
        value = qkv[:, self.kv_start :].view(num_tokens, -1, self.head_dim)
        if self.head_norm is not None:
            heads = self.head_norm(heads)
        if rotation is not None:
            self.ops.rotate(heads, *rotation)
        query, key = heads[:, : self.num_heads], heads[:, self.num_heads :]
        attended = self.attention(query, key, value, step)
        projected: Tensor = self.output(attended.reshape(num_tokens, -1))
        return projected

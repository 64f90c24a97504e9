"""One layer of the decoders that are attention and gated MLP, for tokens of all requests together.

::

    residual ──norm──► qkv ──► [norm per head] ──► rotate Q and K in place ──► attention ──► o ─┐
        └──────────────────────────────── + ◄──────────────────────────────────────[norm]───────┘
        └──norm──► gate|up ──► act(gate) * up ──► down ──► [norm] ──► + (added by the next layer's
                                                                         norm)

What stands in brackets is there in some families only. Few operations per layer matter here: with
16 tokens in a decode step on a CPU, the time between the products is a good part of the step.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from engine.attention.layer import Attention
from engine.attention.step import AttentionStep
from engine.layers import GatedMLP, HeadNorm, Linear, RMSNorm
from engine.models.decoders.decoder_config import DecoderConfig
from engine.models.decoders.layer_kind import LayerKind
from engine.models.model_settings import ModelSettings
from prefix_cache import AttentionSpec, FullAttentionSpec, SlidingWindowSpec

__all__ = ["DecoderLayer"]


class DecoderLayer(nn.Module):
    """Attention and MLP with their norms; see the module's picture.

    Args:
        index: of the layer, which names it.
        config: the model's config.
        settings: types, places and the block size.

    Raises:
        ValueError: the layer's window is smaller than a block.
    """

    def __init__(self, index: int, config: DecoderConfig, settings: ModelSettings) -> None:
        super().__init__()
        kind = config.layers[index]
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.ops = settings.ops
        self._add_attention(config, settings)
        self.mlp = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            config.activation,
            bias=config.mlp_bias,
            ops=settings.ops,
            **settings.tensor_options,
        )
        self.input_norm = self._norm(config, settings)
        self.mlp_norm = self._norm(config, settings)
        self.attention_output_norm: RMSNorm | None = None
        self.mlp_output_norm: RMSNorm | None = None
        if config.output_norms:
            self.attention_output_norm = self._norm(config, settings)
            self.mlp_output_norm = self._norm(config, settings)
        self.attention = Attention(
            f"layers.{index}.self_attn",
            _spec(kind, config, settings),
            config.attention_scale,
            config.attention_softcap,
        )

    def _add_attention(self, config: DecoderConfig, settings: ModelSettings) -> None:
        """The projections around the attention, and the norm of its heads."""
        options = settings.tensor_options
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.kv_start = query_size + kv_size
        self.qkv = Linear(
            config.hidden_size,
            {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size},
            bias=config.qkv_bias,
            **options,
        )
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
        self.output = Linear(
            query_size, {"o_proj": config.hidden_size}, bias=config.output_bias, **options
        )

    @staticmethod
    def _norm(config: DecoderConfig, settings: ModelSettings) -> RMSNorm:
        return RMSNorm(
            config.hidden_size,
            config.rms_norm_eps,
            offset=config.norm_offset,
            ops=settings.ops,
            **settings.tensor_options,
        )

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names under ``prefix``, each with the tensor that receives it."""
        yield from self.qkv.targets(f"{prefix}self_attn.")
        if self.head_norm is not None:
            yield from self.head_norm.targets(f"{prefix}self_attn.")
        yield from self.output.targets(f"{prefix}self_attn.")
        yield from self.mlp.targets(f"{prefix}mlp.")
        for name, norm in self._named_norms():
            yield f"{prefix}{name}.weight", norm.weight.data

    def _named_norms(self) -> Iterator[tuple[str, RMSNorm]]:
        yield "input_layernorm", self.input_norm
        if self.attention_output_norm is None or self.mlp_output_norm is None:
            # After the attention, but before the MLP: the name means something else below.
            yield "post_attention_layernorm", self.mlp_norm
            return
        yield "post_attention_layernorm", self.attention_output_norm
        yield "pre_feedforward_layernorm", self.mlp_norm
        yield "post_feedforward_layernorm", self.mlp_output_norm

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
            x: what the layer below has still to add; None in the first layer.
            residual: ``(num_tokens, hidden_size)``.
            cos: of every token's position, by this layer's rope parameters.
            sin: likewise.
            step: attention metadata of this step.

        Returns:
            What this layer has still to add to ``residual``.
        """
        normed = self.input_norm(residual) if x is None else self.input_norm.add(x, residual)
        x = self.attend(normed, cos, sin, step)
        if self.attention_output_norm is not None:
            x = self.attention_output_norm(x)
        output: Tensor = self.mlp(self.mlp_norm.add(x, residual))
        return output if self.mlp_output_norm is None else self.mlp_output_norm(output)


def _spec(kind: LayerKind, config: DecoderConfig, settings: ModelSettings) -> AttentionSpec:
    page = (settings.block_size, config.num_kv_heads, config.head_dim, settings.dtype)
    if kind.window is None:
        return FullAttentionSpec(*page)
    return SlidingWindowSpec(*page, kind.window)

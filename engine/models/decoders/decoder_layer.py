"""One layer of the decoders that are attention and gated MLP, for tokens of all requests together.

::

    residual ──norm──► qkv ──► [norm per head] ──► rotate Q and K in place ──► attention ──► o ─┐
        └──────────────────────────────── + ◄──────────────────────────────────────[norm]───────┘
        └──norm──► gate|up ──► act(gate) * up ──► down ──► [norm] ──► + (added by the next layer's
                                                                         norm)

What stands in brackets is there in some families only. Few operations per layer matter here: with
16 tokens in a decode step on a CPU, the time between the products is a good part of the step."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from engine.attention.layer import Attention, AttentionStep
from engine.layers import GatedMLP, HeadNorm, Linear, RMSNorm
from engine.models.base import ModelSettings
from engine.models.decoders.decoder_config import DecoderConfig
from prefix_cache import AttentionSpec, FullAttentionSpec, SlidingWindowSpec

__all__ = ["DecoderLayer", "SelfAttention", "build_mlp", "build_norm"]


class SelfAttention(nn.Module):
    """Causal self-attention of one layer, over all tokens or a window of them.

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


def build_norm(config: DecoderConfig, settings: ModelSettings) -> RMSNorm:
    """A norm of the residual stream."""
    options, offset = settings.tensor_options, config.norm_offset
    norm_eps, ops = config.rms_norm_eps, settings.ops
    return RMSNorm(config.hidden_size, norm_eps, offset=offset, ops=ops, **options)


def build_mlp(config: DecoderConfig, settings: ModelSettings) -> GatedMLP:
    """The MLP of a layer."""
    sizes = (config.hidden_size, config.intermediate_size, config.activation)
    return GatedMLP(*sizes, bias=config.mlp_bias, ops=settings.ops, **settings.tensor_options)


class DecoderLayer(nn.Module):
    """Attention and MLP with their norms; see the module's picture, and :class:`SelfAttention`."""

    def __init__(self, index: int, config: DecoderConfig, settings: ModelSettings) -> None:
        super().__init__()
        self.self_attention = SelfAttention(index, config, settings)
        self.attention = self.self_attention.attention
        self.mlp = build_mlp(config, settings)
        self.input_norm = build_norm(config, settings)
        self.mlp_norm = build_norm(config, settings)
        self.attention_output_norm: RMSNorm | None = None
        self.mlp_output_norm: RMSNorm | None = None
        if config.output_norms:
            self.attention_output_norm = build_norm(config, settings)
            self.mlp_output_norm = build_norm(config, settings)

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names under ``prefix``, each with the tensor that receives it."""
        yield from self.self_attention.targets(f"{prefix}self_attn.")
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

    def forward(
        self,
        x: Tensor | None,
        residual: Tensor,
        rotation: tuple[Tensor, Tensor],
        step: AttentionStep,
    ) -> Tensor:
        """Run the layer; ``residual`` is changed in place.

        Args:
            x: what the layer below has still to add; None in the first layer.
            residual: ``(num_tokens, hidden_size)``.
            rotation: cosines and sines of every token's position, by this layer's rope parameters.
            step: attention metadata of this step.

        Returns:
            What this layer has still to add to ``residual``.
        """
        normed = self.input_norm(residual) if x is None else self.input_norm.add(x, residual)
        x = self.self_attention(normed, rotation, step)
        if self.attention_output_norm is not None:
            x = self.attention_output_norm(x)
        output: Tensor = self.mlp(self.mlp_norm.add(x, residual))
        return output if self.mlp_output_norm is None else self.mlp_output_norm(output)

"""One layer of a text decoder that also attends to an encoder's output.

::

    x ──► self-attention ──► + ──► cross-attention ──► + ──► MLP ──► +
                                        ▲
    encoder's rows, in the step in which the encoder ran; from then on their keys and values
    are in the pages

Each part has a norm: before it, inside the residual branch (T5, Whisper), or after its result was
added to the stream (BART).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from engine.attention.layer import Attention
from engine.attention.step import AttentionStep
from engine.layers import GatedMLP, LayerNorm, Linear, PlainMLP, RMSNorm
from engine.models.model_settings import ModelSettings
from engine.models.seq2seq.seq2seq_config import Seq2SeqConfig
from prefix_cache import CrossAttentionSpec, FullAttentionSpec

__all__ = ["DecoderCrossAttention", "DecoderSelfAttention", "Seq2SeqLayer", "build_norm"]


def build_norm(config: Seq2SeqConfig, settings: ModelSettings) -> LayerNorm | RMSNorm:
    """A norm of the family's kind."""
    options = settings.tensor_options
    if config.rms_norm:
        return RMSNorm(config.hidden_size, config.norm_eps, ops=settings.ops, **options)
    return LayerNorm(config.hidden_size, config.norm_eps, **options)


class DecoderSelfAttention(nn.Module):
    """Causal attention over the decoder's own tokens.

    Args:
        layer_name: unique in the model.
        config: widths, heads and names.
        settings: types, places and the block size.
    """

    def __init__(self, layer_name: str, config: Seq2SeqConfig, settings: ModelSettings) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        *sources, output = config.names.projections
        inner_size = config.num_heads * config.head_dim
        options = settings.tensor_options
        self.qkv = Linear(
            config.hidden_size,
            dict.fromkeys(sources, inner_size),
            bias=[name for name in sources if name in config.projection_biases],
            **options,
        )
        self.output = Linear(
            inner_size,
            {output: config.hidden_size},
            bias=output in config.projection_biases,
            **options,
        )
        spec = FullAttentionSpec(
            settings.block_size, config.num_heads, config.head_dim, settings.dtype
        )
        self.attention = Attention(layer_name, spec, config.attention_scale)

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names under ``prefix``, each with the tensor that receives it."""
        yield from self.qkv.targets(prefix)
        yield from self.output.targets(prefix)

    def forward(self, x: Tensor, step: AttentionStep, bias: Tensor | None) -> Tensor:
        """Attend with ``(num_tokens, hidden_size)``; the result has the same shape.

        Args:
            x: the tokens.
            step: attention metadata of this step.
            bias: ``(num_heads, distances)`` added to the scores; see :class:`Attention`.
        """
        qkv = self.qkv(x).view(x.shape[0], 3, self.num_heads, self.head_dim)
        query, key, value = qkv.unbind(1)
        attended = self.attention(query, key, value, step, bias=bias)
        output: Tensor = self.output(attended.reshape(x.shape[0], -1))
        return output


class DecoderCrossAttention(nn.Module):
    """Attention of the decoder's tokens to all of the encoder's rows.

    Args:
        layer_name: unique in the model.
        config: widths, heads and names.
        settings: types, places and the block size.
    """

    def __init__(self, layer_name: str, config: Seq2SeqConfig, settings: ModelSettings) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        query, key, value, output = config.names.projections
        inner_size = config.num_heads * config.head_dim
        biases = config.projection_biases
        options = settings.tensor_options
        self.query = Linear(
            config.hidden_size, {query: inner_size}, bias=query in biases, **options
        )
        self.key_value = Linear(
            config.hidden_size,
            {key: inner_size, value: inner_size},
            bias=[name for name in (key, value) if name in biases],
            **options,
        )
        self.output = Linear(
            inner_size, {output: config.hidden_size}, bias=output in biases, **options
        )
        spec = CrossAttentionSpec(
            settings.block_size, config.num_heads, config.head_dim, settings.dtype
        )
        self.attention = Attention(layer_name, spec, config.attention_scale)

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names under ``prefix``, each with the tensor that receives it."""
        for linear in (self.query, self.key_value, self.output):
            yield from linear.targets(prefix)

    def forward(self, x: Tensor, step: AttentionStep) -> Tensor:
        """Attend with ``(num_tokens, hidden_size)``; the result has the same shape.

        Keys and values are made and written in the step in which the encoder ran, once.
        """
        query = self.query(x).view(x.shape[0], self.num_heads, self.head_dim)
        key: Tensor | None = None
        value: Tensor | None = None
        if step.encoder_hidden_states is not None:
            rows = self.key_value(step.encoder_hidden_states)
            key, value = rows.view(rows.shape[0], 2, self.num_heads, self.head_dim).unbind(1)
        attended = self.attention(query, key, value, step)
        output: Tensor = self.output(attended.reshape(x.shape[0], -1))
        return output


class Seq2SeqLayer(nn.Module):
    """Self-attention, cross-attention and MLP with their norms; see the module's picture.

    Args:
        index: of the layer, which names it.
        config: the model's config.
        settings: types, places and the block size.
    """

    def __init__(self, index: int, config: Seq2SeqConfig, settings: ModelSettings) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        self.names = config.names
        name = f"decoder.layers.{index}"
        self.self_attention = DecoderSelfAttention(f"{name}.self_attn", config, settings)
        self.cross_attention = DecoderCrossAttention(f"{name}.cross_attn", config, settings)
        self.mlp = _build_mlp(config, settings)
        self.self_norm = build_norm(config, settings)
        self.cross_norm = build_norm(config, settings)
        self.mlp_norm = build_norm(config, settings)

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names under ``prefix``, each with the tensor that receives it."""
        names = self.names
        yield from self.self_attention.targets(f"{prefix}{names.self_attention.part}")
        yield from self.cross_attention.targets(f"{prefix}{names.cross_attention.part}")
        yield from self.mlp.targets(f"{prefix}{names.mlp.part}")
        for sublayer, norm in (
            (names.self_attention, self.self_norm),
            (names.cross_attention, self.cross_norm),
            (names.mlp, self.mlp_norm),
        ):
            for name, tensor in norm.state_dict().items():
                yield f"{prefix}{sublayer.norm}{name}", tensor

    def forward(self, x: Tensor, step: AttentionStep, bias: Tensor | None) -> Tensor:
        """Run the layer over ``(num_tokens, hidden_size)``; the result has the same shape."""
        if self.norm_first:
            x = x + self.self_attention(self.self_norm(x), step, bias)
            x = x + self.cross_attention(self.cross_norm(x), step)
            x = x + self.mlp(self.mlp_norm(x))
            return x
        x = self.self_norm(x + self.self_attention(x, step, bias))
        x = self.cross_norm(x + self.cross_attention(x, step))
        x = self.mlp_norm(x + self.mlp(x))
        return x


def _build_mlp(config: Seq2SeqConfig, settings: ModelSettings) -> GatedMLP | PlainMLP:
    sizes = (config.hidden_size, config.intermediate_size, config.activation)
    names, options = config.names.mlp_projections, settings.tensor_options
    if len(names) == 3:
        gate, up, down = names
        return GatedMLP(
            *sizes, bias=config.mlp_bias, names=(gate, up, down), ops=settings.ops, **options
        )
    first, second = names
    return PlainMLP(*sizes, names=(first, second), bias=config.mlp_bias, **options)

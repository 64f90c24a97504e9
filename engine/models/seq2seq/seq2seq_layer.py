"""One layer of a text decoder that also attends to an encoder's output.

::

    x ──► self-attention ──► + ──► cross-attention ──► + ──► MLP ──► +
                                        ▲
    encoder's rows, in the step in which the encoder ran; from then on their keys and values
    are in the pages

Each part has a norm: before it, inside the residual branch, or after its result was added to the
stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from engine.attention.layer import Attention
from engine.attention.step import AttentionStep
from engine.layers import GatedMLP, LayerNorm, Linear, PlainMLP, RMSNorm
from engine.models.model_settings import ModelSettings
from engine.models.seq2seq.seq2seq_config import Seq2SeqConfig
from prefix_cache import AttentionSpec, CrossAttentionSpec, FullAttentionSpec

__all__ = ["DecoderCrossAttention", "DecoderSelfAttention", "Seq2SeqLayer", "build_norm"]


def build_norm(config: Seq2SeqConfig, settings: ModelSettings) -> LayerNorm | RMSNorm:
    """A norm of the family's kind."""
    options = settings.tensor_options
    if config.rms_norm:
        return RMSNorm(config.hidden_size, config.norm_eps, ops=settings.ops, **options)
    return LayerNorm(config.hidden_size, config.norm_eps, **options)


class DecoderAttention(nn.Module):
    """What both attentions of a layer have.

    Args:
        layer_name: unique in the model.
        config: widths, heads and names.
        settings: types, places and the block size.
    """

    spec_type: type[AttentionSpec]

    def __init__(self, layer_name: str, config: Seq2SeqConfig, settings: ModelSettings) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.inner_size = config.num_heads * config.head_dim
        output, options = config.names.projections[-1], settings.tensor_options
        bias = output in config.projection_biases
        self.output = Linear(self.inner_size, {output: config.hidden_size}, bias=bias, **options)
        page = (settings.block_size, config.num_heads, config.head_dim, settings.dtype)
        self.attention = Attention(layer_name, self.spec_type(*page), config.attention_scale)

    def projection(
        self, names: Sequence[str], config: Seq2SeqConfig, settings: ModelSettings
    ) -> Linear:
        """The projections to heads that go by these names, in one product."""
        sizes, options = dict.fromkeys(names, self.inner_size), settings.tensor_options
        bias = [name for name in names if name in config.projection_biases]
        return Linear(config.hidden_size, sizes, bias=bias, **options)

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names under ``prefix``, each with the tensor that receives it."""
        for module in self.children():
            if isinstance(module, Linear):
                yield from module.targets(prefix)


class DecoderSelfAttention(DecoderAttention):
    """Causal attention over the decoder's own tokens."""

    spec_type = FullAttentionSpec

    def __init__(self, layer_name: str, config: Seq2SeqConfig, settings: ModelSettings) -> None:
        super().__init__(layer_name, config, settings)
        self.qkv = self.projection(config.names.projections[:3], config, settings)

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


class DecoderCrossAttention(DecoderAttention):
    """Attention of the decoder's tokens to all of the encoder's rows."""

    spec_type = CrossAttentionSpec

    def __init__(self, layer_name: str, config: Seq2SeqConfig, settings: ModelSettings) -> None:
        super().__init__(layer_name, config, settings)
        query, key, value, _ = config.names.projections
        self.query = self.projection([query], config, settings)
        self.key_value = self.projection([key, value], config, settings)

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
    """Self-attention, cross-attention and MLP with their norms; see the module's picture."""

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

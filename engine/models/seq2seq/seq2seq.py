"""Encoder-decoder that generates text, for any kind of encoder input.

One layer of the text decoder, which also attends to the encoder's output::

    x ──► self-attention ──► + ──► cross-attention ──► + ──► MLP ──► +
                                        ▲
    encoder's rows, in the step in which the encoder ran; in later steps their keys and values
    are in the pages

Each part has a norm: before it, inside the residual branch, or after the residual addition.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.t5.modeling_t5 import T5Attention

from engine.attention.layer import Attention, AttentionStep
from engine.checkpoints.quantized_weight import Target
from engine.layers import MLP, LayerNorm, Linear, RMSNorm, empty_parameter
from engine.models.base import ModelSettings
from engine.models.encoder_module import EncoderDecoderModel, EncoderModule
from prefix_cache import AttentionSpec, CrossAttentionSpec, FullAttentionSpec


@dataclass(frozen=True, slots=True)
class Seq2SeqNames:
    """Names of the decoder's weights in a family's checkpoints; None for weights it lacks.

    Attributes:
        embeddings: possible names of the token embedding, the usual one first.
        head: the head's matrix, stored if it is not the embedding.
        layers: prefix of the layers' weights, under ``decoder``, up to the layer's number.
        self_attention: prefixes of its weights, and of its norm.
        projections: of an attention: query, key, value and output.
        mlp_projections: in the order of computation; three if the MLP is gated.
        embedding_norm: after the embeddings, under ``decoder``.
        final_norm: after the layers, under ``decoder``.
        logits_bias: added to the logits, stored by some checkpoints.
        ignored: names that checkpoints may contain but the model does not use.
    """

    embeddings: tuple[str, ...]
    head: str
    encoder: str
    decoder: str
    layers: str
    self_attention: tuple[str, str]
    cross_attention: tuple[str, str]
    mlp: tuple[str, str]
    projections: tuple[str, str, str, str]
    mlp_projections: tuple[str, ...]
    embedding_norm: str | None = None
    final_norm: str | None = None
    logits_bias: str | None = None
    ignored: tuple[str, ...] = ()


FAIRSEQ_NAMES = Seq2SeqNames(
    embeddings=("model.decoder.embed_tokens.weight",),
    head="lm_head.weight",
    encoder="model.encoder.",
    decoder="model.decoder.",
    layers="layers.",
    self_attention=("self_attn.", "self_attn_layer_norm."),
    cross_attention=("encoder_attn.", "encoder_attn_layer_norm."),
    mlp=("", "final_layer_norm."),
    projections=("q_proj", "k_proj", "v_proj", "out_proj"),
    mlp_projections=("fc1", "fc2"),
)
"""Names shared by the models that originate in fairseq."""


@dataclass(frozen=True, slots=True)
class Seq2SeqConfig:
    """A Hugging Face config, normalised.

    Attributes:
        hidden_size: width of the decoder's stream and of the encoder's rows.
        num_heads: of the decoder's attention, self and cross.
        activation: of the MLP, by transformers' name.
        rms_norm: True if norms neither shift nor centre.
        norm_first: True if a part's norm precedes it, False if it follows the residual addition.
        projection_biases: names of the attention's projections that have biases.
        mlp_bias: True if the MLP's projections have biases.
        attention_scale: factor on the scores before the softmax.
        embedding_scale: factor on the embeddings of tokens.
        position_offset: row of position 0 in the position table; None: no such table.
        relative_buckets: number of learned biases per head on the scores of self-attention, by
            distance to the key: half of them for one distance each, the others for growing
            ranges; 0 for a family without.
        max_distance: all distances from here on share the last of these.
        hidden_scale: factor on hidden states before the head.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    max_encoder_len: int
    activation: str
    norm_eps: float
    rms_norm: bool
    norm_first: bool
    projection_biases: tuple[str, ...]
    mlp_bias: bool
    attention_scale: float
    names: Seq2SeqNames
    embedding_scale: float = 1.0
    position_offset: int | None = None
    relative_buckets: int = 0
    max_distance: int = 0
    hidden_scale: float = 1.0

    @classmethod
    def of_fairseq(
        cls, config: PreTrainedConfig, max_positions: int, max_encoder_len: int, **others: Any
    ) -> Seq2SeqConfig:
        """Read the fields that models originating in fairseq name alike."""
        head_dim = config.d_model // config.decoder_attention_heads
        return cls(
            hidden_size=config.d_model,
            intermediate_size=config.decoder_ffn_dim,
            num_layers=config.decoder_layers,
            num_heads=config.decoder_attention_heads,
            head_dim=head_dim,
            vocab_size=config.vocab_size,
            max_position_embeddings=max_positions,
            max_encoder_len=max_encoder_len,
            activation=config.activation_function,
            norm_eps=1e-5,
            rms_norm=False,
            mlp_bias=True,
            attention_scale=head_dim**-0.5,
            **others,
        )


def build_norm(config: Seq2SeqConfig, settings: ModelSettings) -> RMSNorm:
    """Build a norm of the family's kind."""
    make = RMSNorm if config.rms_norm else LayerNorm
    return make(config.hidden_size, config.norm_eps, ops=settings.ops, **settings.tensor_options)


class DecoderAttention(nn.Module):
    """Base of both attentions of a layer."""

    spec_type: type[AttentionSpec]

    def __init__(self, layer_name: str, config: Seq2SeqConfig, settings: ModelSettings) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.inner_size = config.num_heads * config.head_dim
        output, options = config.names.projections[-1], settings.tensor_options
        bias = output in config.projection_biases
        self.output = Linear(self.inner_size, {output: config.hidden_size}, bias=bias, **options)
        page = (settings.block_size, config.num_heads, config.head_dim, settings.page_dtype)
        self.attention = Attention(layer_name, self.spec_type(*page), config.attention_scale)

    def projection(
        self, names: Sequence[str], config: Seq2SeqConfig, settings: ModelSettings
    ) -> Linear:
        """Build the projections with these names, fused into one product."""
        sizes, options = dict.fromkeys(names, self.inner_size), settings.tensor_options
        bias = [name for name in names if name in config.projection_biases]
        return Linear(config.hidden_size, sizes, bias=bias, **options)

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Yield checkpoint names under ``prefix``, each with the tensor to load it into."""
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
        """Map ``(num_tokens, hidden_size)`` to the same shape."""
        qkv = self.qkv(x).view(x.shape[0], 3, self.num_heads, self.head_dim)
        query, key, value = qkv.unbind(1)
        attended = self.attention(query, key, value, step, bias=bias)
        return self.output(attended.reshape(x.shape[0], -1))


class DecoderCrossAttention(DecoderAttention):
    """Attention of the decoder's tokens to all of the encoder's rows."""

    spec_type = CrossAttentionSpec

    def __init__(self, layer_name: str, config: Seq2SeqConfig, settings: ModelSettings) -> None:
        super().__init__(layer_name, config, settings)
        query, key, value, _ = config.names.projections
        self.query = self.projection([query], config, settings)
        self.key_value = self.projection([key, value], config, settings)

    def forward(self, x: Tensor, step: AttentionStep) -> Tensor:
        """Map ``(num_tokens, hidden_size)`` to the same shape.

        Keys and values are computed and written once, in the step in which the encoder ran.
        """
        query = self.query(x).view(x.shape[0], self.num_heads, self.head_dim)
        key: Tensor | None = None
        value: Tensor | None = None
        if step.encoder_hidden_states is not None:
            rows = self.key_value(step.encoder_hidden_states)
            key, value = rows.view(rows.shape[0], 2, self.num_heads, self.head_dim).unbind(1)
        attended = self.attention(query, key, value, step)
        return self.output(attended.reshape(x.shape[0], -1))


class Seq2SeqLayer(nn.Module):
    """Self-attention, cross-attention and MLP with their norms; see the module docstring."""

    def __init__(self, index: int, config: Seq2SeqConfig, settings: ModelSettings) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        self.names = config.names
        name = f"decoder.layers.{index}"
        self.self_attention = DecoderSelfAttention(f"{name}.self_attn", config, settings)
        self.cross_attention = DecoderCrossAttention(f"{name}.cross_attn", config, settings)
        sizes = (config.hidden_size, config.intermediate_size, config.activation)
        names, options = config.names.mlp_projections, settings.tensor_options
        bias, ops = config.mlp_bias, settings.ops
        self.mlp = MLP(*sizes, names=names, bias=bias, ops=ops, **options)
        self.self_norm = build_norm(config, settings)
        self.cross_norm = build_norm(config, settings)
        self.mlp_norm = build_norm(config, settings)

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Yield checkpoint names under ``prefix``, each with the tensor to load it into."""
        names = self.names
        for (own, of_norm), part, norm in (
            (names.self_attention, self.self_attention, self.self_norm),
            (names.cross_attention, self.cross_attention, self.cross_norm),
            (names.mlp, self.mlp, self.mlp_norm),
        ):
            yield from part.targets(f"{prefix}{own}")
            yield from norm.targets(f"{prefix}{of_norm}")

    def forward(self, x: Tensor, step: AttentionStep, bias: Tensor | None) -> Tensor:
        """Map ``(num_tokens, hidden_size)`` to the same shape."""
        if self.norm_first:
            x = x + self.self_attention(self.self_norm(x), step, bias)
            x = x + self.cross_attention(self.cross_norm(x), step)
            return x + self.mlp(self.mlp_norm(x))
        x = self.self_norm(x + self.self_attention(x, step, bias))
        x = self.cross_norm(x + self.cross_attention(x, step))
        return self.mlp_norm(x + self.mlp(x))


class Seq2SeqModel(EncoderDecoderModel):
    """An encoder, and a stack of :class:`Seq2SeqLayer` between an embedding and a head.

    Args:
        build_encoder: builds the encoder, given the embedding, which it may share.
        stored: names of the checkpoint's weights. They determine if the head is a separate
            matrix: configs of T5 do not.
    """

    def __init__(
        self,
        config: Seq2SeqConfig,
        build_encoder: Callable[[nn.Parameter], EncoderModule],
        settings: ModelSettings,
        stored: Collection[str],
    ) -> None:
        super().__init__()
        self.config = config
        self.ops = settings.ops
        self.hidden_size = self.encoder_hidden_size = config.hidden_size
        self.vocab_size = self.input_vocab_size = config.vocab_size
        self.max_position_embeddings = config.max_position_embeddings
        options = settings.tensor_options
        self.embedding = empty_parameter(config.vocab_size, config.hidden_size, **options)
        self.encoder = build_encoder(self.embedding)
        self.positions: nn.Parameter | None = None
        if config.position_offset is not None:
            rows = config.max_position_embeddings + config.position_offset
            self.positions = empty_parameter(rows, config.hidden_size, **options)
        names = config.names
        self.embedding_norm = (
            build_norm(config, settings) if names.embedding_norm else nn.Identity()
        )
        layers = [Seq2SeqLayer(i, config, settings) for i in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.attention_layers = [layer.self_attention.attention for layer in layers]
        self.attention_layers += [layer.cross_attention.attention for layer in layers]
        self.final_norm = build_norm(config, settings) if names.final_norm else nn.Identity()
        self.relative_bias: RelativeBiasTable | None = None
        if config.relative_buckets:
            self.relative_bias = RelativeBiasTable(config, settings)
        # Exporters store the shared matrix under any of its names.
        places = [name for name in names.embeddings if name in stored]
        self.has_own_head = bool(places) and names.head in stored
        self.embedding_name = next(iter(places), names.embeddings[0])
        if not places and names.head in stored:
            self.embedding_name = names.head
        self.ignored_weights = {*names.embeddings, *names.ignored}
        shared = None if self.has_own_head else self.embedding
        parts = {names.head.removesuffix(".weight"): config.vocab_size}
        self.head = Linear(config.hidden_size, parts, weight=shared, **options)
        self.logits_bias: nn.Parameter | None = None
        if names.logits_bias in stored:
            self.logits_bias = empty_parameter(1, config.vocab_size, **options)

    def targets(self, prefix: str = "") -> Iterator[tuple[str, Target]]:
        """Yield checkpoint names and targets; see :meth:`CausalModel.targets`."""
        names = self.config.names
        yield f"{prefix}{self.embedding_name}", self.embedding.data
        yield from self.encoder.targets(f"{prefix}{names.encoder}")
        decoder = f"{prefix}{names.decoder}"
        if self.positions is not None:
            yield f"{decoder}embed_positions.weight", self.positions.data
        for index, layer in enumerate(self.layers):
            if isinstance(layer, Seq2SeqLayer):
                yield from layer.targets(f"{decoder}{names.layers}{index}.")
        for name, norm in (
            (names.embedding_norm, self.embedding_norm),
            (names.final_norm, self.final_norm),
        ):
            for key, tensor in norm.state_dict().items():
                yield f"{decoder}{name}.{key}", tensor
        if self.relative_bias is not None:
            first = f"{decoder}{names.layers}0.{names.self_attention[0]}"
            yield f"{first}relative_attention_bias.weight", self.relative_bias.weight.data
        if self.has_own_head:
            yield from self.head.targets(prefix)
        if self.logits_bias is not None:
            yield f"{prefix}{names.logits_bias}", self.logits_bias.data

    def embed(self, input_ids: Tensor) -> Tensor:
        """Map token ids ``(n,)`` to embeddings ``(n, hidden_size)``."""
        embeds = F.embedding(input_ids, self.embedding)
        scale = self.config.embedding_scale
        return embeds if scale == 1.0 else embeds.mul_(scale)

    def forward(
        self, inputs_embeds: Tensor, positions: Tensor, step: AttentionStep
    ) -> dict[str, Tensor]:
        """Run the decoder's layers; see :meth:`CausalModel.forward`."""
        x = inputs_embeds
        if self.positions is not None and self.config.position_offset is not None:
            x = x + F.embedding(positions + self.config.position_offset, self.positions)
        x = self.embedding_norm(x)
        bias = None if self.relative_bias is None else self.relative_bias.by_distance
        for layer in self.layers:
            x = layer(x, step, bias)
        return {"hidden_states": self.final_norm(x)}

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Map hidden states to float32 logits; see :meth:`CausalModel.compute_logits`."""
        scale = self.config.hidden_scale
        logits: Tensor = self.head(hidden_states if scale == 1.0 else hidden_states * scale)
        return (logits if self.logits_bias is None else logits + self.logits_bias).float()


class RelativeBiasTable(nn.Module):
    """T5's relative positions: one learned value per head and bucket of distances.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer", 2020.

    Attributes:
        by_distance: ``(num_heads, max_distance + 1)`` float32, the value for every distance from
            a query back to a key; the last column covers all larger ones. Set by
            :meth:`finish_loading`.
    """

    by_distance: Tensor

    def __init__(self, config: Seq2SeqConfig, settings: ModelSettings) -> None:
        super().__init__()
        self.config = config
        self.weight = empty_parameter(
            config.relative_buckets, config.num_heads, **settings.tensor_options
        )

    def finish_loading(self) -> None:
        """Expand the loaded values to all distances."""
        most = self.config.max_distance
        buckets = T5Attention._relative_position_bucket(
            -torch.arange(most + 1), False, self.config.relative_buckets, most
        )
        values = self.weight.data[buckets.to(self.weight.device)]
        self.by_distance = values.T.float().contiguous()

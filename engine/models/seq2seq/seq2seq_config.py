"""What the text decoders of encoder-decoder models differ in, spelled out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

__all__ = ["FAIRSEQ_NAMES", "RelativeBias", "Seq2SeqConfig", "Seq2SeqNames", "Sublayer"]


@dataclass(frozen=True, slots=True)
class Sublayer:
    """How a checkpoint names a part of a decoder layer and the norm that belongs to it.

    Attributes:
        part: what comes before the names of the part's own weights.
        norm: likewise of the norm's.
    """

    part: str
    norm: str


@dataclass(frozen=True, slots=True)
class Seq2SeqNames:
    """How a family's checkpoints name the decoder's weights.

    Attributes:
        embeddings: under which of these the token embedding may be stored, the usual one first.
        head: the head's matrix, stored where it is not the embedding.
        encoder: prefix of the encoder's weights.
        decoder: prefix of the decoder's weights.
        layers: prefix of the layers' weights, under ``decoder``, up to the layer's number.
        self_attention: inside a layer.
        cross_attention: inside a layer.
        mlp: inside a layer.
        projections: of an attention: query, key, value and output.
        mlp_projections: in the order in which the data passes; three where the MLP is gated.
        embedding_norm: after the embeddings, under ``decoder``; None where there is none.
        final_norm: after the layers, under ``decoder``; None where there is none.
        logits_bias: added to the logits, stored by some checkpoints; None in other families.
        ignored: names that checkpoints may hold although nothing needs them.
    """

    embeddings: tuple[str, ...]
    head: str
    encoder: str
    decoder: str
    layers: str
    self_attention: Sublayer
    cross_attention: Sublayer
    mlp: Sublayer
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
    self_attention=Sublayer("self_attn.", "self_attn_layer_norm."),
    cross_attention=Sublayer("encoder_attn.", "encoder_attn_layer_norm."),
    mlp=Sublayer("", "final_layer_norm."),
    projections=("q_proj", "k_proj", "v_proj", "out_proj"),
    mlp_projections=("fc1", "fc2"),
)
"""What the models that began in fairseq have in common."""


@dataclass(frozen=True, slots=True)
class RelativeBias:
    """Biases on the scores of decoder self-attention by how far back a key lies.

    Attributes:
        num_buckets: learned values per head. The first half are for one distance each, the
            others for ranges that grow with the distance.
        max_distance: all distances from here on share the last bucket.
        name: of the table, under the first layer's self-attention.
    """

    num_buckets: int
    max_distance: int
    name: str


@dataclass(frozen=True, slots=True)
class Seq2SeqConfig:
    """A Hugging Face config, normalised.

    Attributes:
        hidden_size: width of the decoder's stream and of the encoder's rows.
        intermediate_size: width inside the decoder's MLP.
        num_layers: of the decoder.
        num_heads: of the decoder's attention, self and cross.
        head_dim: channels per head.
        vocab_size: rows of the embedding, and logits.
        max_position_embeddings: the longest decoder sequence.
        max_encoder_len: the longest encoder output.
        activation: of the MLP, by transformers' name.
        norm_eps: of every norm.
        rms_norm: whether norms neither shift nor centre.
        norm_first: whether a part's norm comes before it, or after its result was added.
        projection_biases: names of the attention's projections that have biases.
        mlp_bias: whether the MLP's projections have biases.
        attention_scale: factor on the scores before the softmax.
        embedding_scale: factor on the embeddings of tokens.
        position_offset: row of the position table that position 0 takes; None: no such table.
        relative_bias: positions by biases on the scores; None: not in this family.
        hidden_scale: factor on hidden states before the head.
        names: of the weights.
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
    relative_bias: RelativeBias | None = None
    hidden_scale: float = 1.0

    @classmethod
    def of_fairseq(
        cls, config: PreTrainedConfig, max_positions: int, max_encoder_len: int, **others: Any
    ) -> Seq2SeqConfig:
        """Read what the models that began in fairseq name alike.

        Args:
            config: of one of them.
            max_positions: the longest decoder sequence.
            max_encoder_len: the longest encoder output.
            **others: the fields that they differ in.
        """
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

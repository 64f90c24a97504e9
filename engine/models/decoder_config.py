"""What a plain decoder needs to know, with the families' differences spelled out."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig

__all__ = ["DecoderConfig"]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A Hugging Face config, normalised: every family's defaults are filled in.

    Attributes:
        hidden_size: width of the residual stream.
        intermediate_size: width inside the MLP.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides ``num_heads``.
        head_dim: channels per head.
        vocab_size: rows of the embedding.
        max_position_embeddings: the longest sequence.
        activation: of the MLP, by transformers' name.
        rms_norm_eps: of every norm.
        tie_word_embeddings: whether the head is the embedding matrix.
        qkv_bias: whether the Q, K and V projections have biases.
        output_bias: whether the attention's output projection has one.
        mlp_bias: whether the MLP's projections have biases.
        qk_norm: whether each head of Q and K is normalised before the rotation.
        sliding_window: how many tokens the narrowest layer sees, itself included; None: all.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    activation: str
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads, "
                f"got {self.num_heads} and {self.num_kv_heads}"
            )

    @classmethod
    def from_transformers(
        cls,
        config: PreTrainedConfig,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        mlp_bias: bool = False,
        qk_norm: bool = False,
        sliding_window: int | None = None,
    ) -> DecoderConfig:
        """Read what all families name alike; a family's file states the rest."""
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None)
            or config.hidden_size // config.num_attention_heads,
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_position_embeddings,
            activation=config.hidden_act,
            rms_norm_eps=config.rms_norm_eps,
            tie_word_embeddings=bool(config.tie_word_embeddings),
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            mlp_bias=mlp_bias,
            qk_norm=qk_norm,
            sliding_window=sliding_window,
        )

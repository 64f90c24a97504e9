"""What an attention-only decoder needs to know, with the families' differences spelled out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedConfig

__all__ = ["DecoderConfig", "LayerKind", "layer_kinds"]


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What is particular to one layer.

    Attributes:
        window: how many positions a token sees, itself included; None: all before it.
        rope: which of :attr:`DecoderConfig.ropes` turns its heads.
    """

    window: int | None = None
    rope: int = 0


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A Hugging Face config, normalised: every family's defaults are filled in.

    Attributes:
        hidden_size: width of the residual stream.
        intermediate_size: width inside the MLP.
        layers: what is particular to each layer; as many as there are layers.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides ``num_heads``.
        head_dim: channels per head.
        vocab_size: rows of the embedding.
        max_position_embeddings: the longest sequence.
        activation: of the MLP, by transformers' name.
        rms_norm_eps: of every norm.
        tie_word_embeddings: whether the head is the embedding matrix.
        attention_scale: factor on the scores before the softmax.
        attention_softcap: scores become ``softcap * tanh(score / softcap)``; None leaves them.
        logit_softcap: the same for the logits.
        embedding_scale: factor on the embeddings of tokens, rounded to their type; None: none.
        norm_offset: what the checkpoint's norm weights lack: Gemma's scale by ``1 + weight``.
        output_norms: whether attention and MLP are normalised once more before they are added
            to the residual.
        qkv_bias: whether the Q, K and V projections have biases.
        output_bias: whether the attention's output projection has one.
        mlp_bias: whether the MLP's projections have biases.
        qk_norm: whether each head of Q and K is normalised before the rotation.
        ropes: the config's sets of rope parameters, by layer type; None where it has only one.
    """

    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerKind, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    activation: str
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_scale: float
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    norm_offset: float = 0.0
    output_norms: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    ropes: tuple[str | None, ...] = (None,)

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads, "
                f"got {self.num_heads} and {self.num_kv_heads}"
            )

    @classmethod
    def from_transformers(cls, config: PreTrainedConfig) -> DecoderConfig:
        """Read what all families name alike; a family's file replaces the rest."""
        head_dim = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            layers=(LayerKind(),) * config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_position_embeddings,
            activation=getattr(config, "hidden_activation", None) or config.hidden_act,
            rms_norm_eps=config.rms_norm_eps,
            # The text parts of some larger models leave it to the whole.
            tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
            attention_scale=head_dim**-0.5,
        )

    def for_length(self, max_model_len: int) -> DecoderConfig:
        """Drop windows that no sequence of at most ``max_model_len`` tokens outgrows.

        The arithmetic is the same, and as full attention the layers share pages and tables with
        the others instead of forming a group that never gives a page back.
        """
        return replace(
            self,
            layers=tuple(
                replace(layer, window=None)
                if layer.window is not None and layer.window >= max_model_len
                else layer
                for layer in self.layers
            ),
        )


def layer_kinds(
    config: PreTrainedConfig, ropes: Sequence[str | None] = (None,)
) -> tuple[LayerKind, ...]:
    """Read ``layer_types`` and ``sliding_window``.

    ``sliding_window`` alone decides nothing: configs state it also where no layer slides.

    Args:
        config: of a family whose ``layer_types`` transformers fills in and obeys.
        ropes: layer types that have rope parameters of their own, in the order in which the
            model holds them; others take the first.

    Raises:
        ValueError: a layer type other than full and sliding attention, or no window to slide.
    """
    kinds = []
    for index, layer_type in enumerate(config.layer_types):
        if layer_type not in ("full_attention", "sliding_attention"):
            raise ValueError(
                f"layer {index} of {type(config).__name__} is {layer_type!r}; "
                "supported are 'full_attention' and 'sliding_attention'"
            )
        window = config.sliding_window if layer_type == "sliding_attention" else None
        if layer_type == "sliding_attention" and window is None:
            raise ValueError(
                f"layer {index} of {type(config).__name__} is 'sliding_attention', "
                "but sliding_window is None"
            )
        kinds.append(LayerKind(window, ropes.index(layer_type) if layer_type in ropes else 0))
    return tuple(kinds)

"""How large a seeded model is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["SEEDED_WINDOW", "DecoderSettings", "SeededSettings"]

SEEDED_WINDOW = 16
"""Positions that a token sees in sliding layers, itself included: several fit a short prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeededSettings:
    """Of a model whose layers are all alike.

    Attributes:
        seed: of the weights; the same seed gives the same bytes.
        hidden_size: width of the stream, or of both streams.
        num_layers: layers; of the encoder, and of the decoder.
        num_heads: heads of every attention; of queries.
        intermediate_size: width inside the MLPs.
        vocab_size: of the model. The tokenizer has at most so many tokens, and at most 768.
        max_position_embeddings: the longest sequence.
        with_tokenizer: whether to write a tokenizer.
        max_shard_size: as ``save_pretrained`` takes it, such as ``"100KB"``, for several shards.
    """

    seed: int = 0
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    intermediate_size: int = 128
    vocab_size: int = 768
    max_position_embeddings: int = 1024
    with_tokenizer: bool = True
    max_shard_size: str | None = None

    @classmethod
    def split(cls, given: Mapping[str, Any], **defaults: Any) -> tuple[Self, dict[str, Any]]:
        """Part what was given into these settings and the rest, which is the config's.

        Args:
            given: by name.
            defaults: of these settings, where they differ from the usual ones.
        """
        own = {field.name for field in fields(cls)}
        settings = cls(**defaults | {name: value for name, value in given.items() if name in own})
        return settings, {name: value for name, value in given.items() if name not in own}

    def sizes(self) -> dict[str, Any]:
        """The sizes, by the names that most configs of one stack have for them."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "max_position_embeddings": self.max_position_embeddings,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSettings(SeededSettings):
    """Of a decoder-only model.

    Attributes:
        tied: whether the head is the embedding matrix.
        num_kv_heads: key and value heads.
        with_head: False writes the headless model (``Qwen2Model``), as embedding models are.
    """

    tied: bool = True
    num_kv_heads: int = 2
    with_head: bool = True

    def text_config(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """The sizes and the special ids, by the names that decoders' configs have for them."""
        return self.sizes() | {
            "num_key_value_heads": self.num_kv_heads,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }

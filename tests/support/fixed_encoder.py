"""The properties of an encoder that input processing needs, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.requests.encoder_input import EncoderInput, EncoderView


@dataclass(frozen=True)
class FixedEncoder:
    """An encoder of a fixed length, all of whose rows are visible to every token."""

    max_encoder_len: int = 100
    input_vocab_size: int = 400

    def encoder_view(self, entry: EncoderInput | None, decoder_ids: Sequence[int]) -> EncoderView:
        rows = 0 if entry is None else entry.num_tokens
        return EncoderView(0, rows, rows)

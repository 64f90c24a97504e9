"""transformers' outputs for an encoder-decoder's weights, one request at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from engine.requests.encoder_input import EncoderInput

NEAR_TIE = 1e-4
"""Logits closer than this may swap order by rounding alone."""


class EncoderDecoderReference:
    """A checkpoint in transformers, run in full passes without padding or cache."""

    def __init__(self, folder: str, attention: str = "sdpa") -> None:
        self.config = AutoConfig.from_pretrained(folder)
        model_class: Any = getattr(transformers, self.config.architectures[0])
        self.model = model_class.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention
        ).eval()

    @torch.inference_mode()
    def encode(self, entry: EncoderInput) -> Tensor:
        """Return the encoder's output, ``(rows, width)``."""
        if self.config.model_type == "mllama":
            vision = self.model.model.vision_model(**_batched(entry)).last_hidden_state
            rows: Tensor = self.model.model.multi_modal_projector(vision).flatten(0, 3)
            return rows
        rows = self.model.get_encoder()(**_batched(entry)).last_hidden_state[0]
        return rows

    @torch.inference_mode()
    def decode(
        self, entry: EncoderInput | None, decoder_ids: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Return hidden states after the final norm, and logits, of all decoder tokens."""
        ids = torch.tensor([list(decoder_ids)])
        if self.config.model_type == "mllama":
            inputs = {} if entry is None else _batched(entry) | self._image_mask(entry, decoder_ids)
            hidden = self.model.model(input_ids=ids, use_cache=False, **inputs).last_hidden_state
            return hidden[0], self.model.lm_head(hidden)[0]
        assert entry is not None
        rows = self.encode(entry)[None]
        decoder = self.model.get_decoder()
        hidden = decoder(input_ids=ids, encoder_hidden_states=rows, use_cache=False)
        output = self.model(encoder_outputs=(rows,), decoder_input_ids=ids, use_cache=False)
        return hidden.last_hidden_state[0], output.logits[0]

    def inputs(self, entry: EncoderInput | None, decoder_ids: Sequence[int]) -> dict[str, Tensor]:
        """Return arguments of the whole model for ``forward`` and ``generate``."""
        ids = torch.tensor([list(decoder_ids)])
        given = {} if entry is None else _batched(entry)
        if self.config.model_type != "mllama":
            return given | {"decoder_input_ids": ids}
        mask = {} if entry is None else self._image_mask(entry, decoder_ids)
        return given | mask | {"input_ids": ids}

    def _image_mask(self, entry: EncoderInput, decoder_ids: Sequence[int]) -> dict[str, Tensor]:
        """Return the mask of transformers' processor; later tokens repeat the last row."""
        ranges = get_cross_attention_token_mask(list(decoder_ids), self.config.image_token_index)
        tiles = entry.features["aspect_ratio_mask"]
        mask = convert_sparse_cross_attention_mask_to_dense(
            [ranges], [[int(tiles.sum())]], tiles.numel(), len(decoder_ids)
        )
        return {"cross_attention_mask": torch.from_numpy(mask)}


def _batched(entry: EncoderInput) -> dict[str, Tensor]:
    if entry.token_ids:
        return {"input_ids": torch.tensor([entry.token_ids])}
    return {name: feature[None] for name, feature in entry.features.items()}


def assert_greedy_choices(logits: Tensor, token_ids: Sequence[int]) -> None:
    """Fail unless each token is the most likely one, except for near ties."""
    for place, (row, token_id) in enumerate(zip(logits, token_ids, strict=True)):
        gap = float(row.max() - row[token_id])
        assert gap < NEAR_TIE, f"token {place} is {token_id}, but another is ahead by {gap:.2e}"

"""Decoders that place each token by three numbers: time, height and width.

Text counts all three up together. An item lies where its tower says, from the place on at which
it begins, and what follows goes on after the largest number that it has::

    token    | a | b | * | * | * | * | * | * | c |      an image of 2 x 3
    time       0   1   2   2   2   2   2   2   5
    height     0   1   2   2   2   3   3   3   5
    width      0   1   2   3   4   2   3   4   5

Source: Wang et al., "Qwen2-VL", 2024, section 2.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from engine.layers import MultiAxisRotaryEmbedding
from engine.mm_input import MultiModalInput
from engine.models.decoder import DecoderModel, build_decoder
from engine.models.decoder_config import DecoderConfig
from engine.models.model_settings import ModelSettings
from engine.models.multimodal import MultiModalModel
from engine.models.qwen2 import qwen2_config

__all__ = ["MultiAxisModel", "build_multi_axis_decoder"]


class MultiAxisModel(MultiModalModel):
    """A decoder with three numbers to a place; see the module's note."""

    num_position_axes = MultiAxisRotaryEmbedding.num_axes

    def position_ids(
        self, prompt_ids: Sequence[int], mm_inputs: Sequence[MultiModalInput]
    ) -> Tensor | None:
        """``(3, len(prompt_ids))`` places; see :meth:`MultiModalModel.position_ids`."""
        parts: list[Tensor] = []
        place = done = 0
        for item in mm_inputs:
            parts.append(self._text_places(place, item.offset - done))
            place += item.offset - done
            parts.append(self.towers[item.modality].places(item.features) + place)
            place = int(parts[-1].max()) + 1
            done = item.end
        parts.append(self._text_places(place, len(prompt_ids) - done))
        table = torch.cat(parts, dim=1)
        return None if torch.equal(table, self._text_places(0, len(prompt_ids))) else table

    def _text_places(self, start: int, count: int) -> Tensor:
        return torch.arange(start, start + count).expand(self.num_position_axes, -1)


def build_multi_axis_decoder(config: PreTrainedConfig, settings: ModelSettings) -> DecoderModel:
    """Build a Qwen2 that turns its channels by three numbers, its weights not yet loaded.

    Args:
        config: of the checkpoint, the text's part in it.
        settings: types, places and lengths.

    Raises:
        ValueError: the config asks for something that is not supported.
    """
    text = config.text_config

    def read_config(text_config: PreTrainedConfig) -> DecoderConfig:
        # Whether the head is the embedding is a matter of the whole, not of its text part.
        tied = bool(config.tie_word_embeddings)
        return replace(qwen2_config(text_config), tie_word_embeddings=tied)

    sections = (text.rope_parameters or {}).get("mrope_section")
    if sections is None:
        raise ValueError(f"rope_parameters of {type(text).__name__} has no mrope_section")
    make_rotary = partial(MultiAxisRotaryEmbedding, sections=sections)
    return build_decoder(read_config, text, settings, True, make_rotary)

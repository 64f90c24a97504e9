"""Decoders that place each token by three numbers: time, height and width.

Text counts all three up together. An item lies where its tower says, from the place on at which
it begins, and what follows goes on after the largest number that it has::

    token    | a | b | * | * | * | * | * | * | c |      an image of 2 x 3
    time       0   1   2   2   2   2   2   2   5
    height     0   1   2   2   2   3   3   3   5
    width      0   1   2   3   4   2   3   4   5

A video and the sound that is in step with it begin at one place. What follows goes on after the
largest number of the last piece, be it or not the largest of all, and the tokens around the two lie
at one place with their neighbours outside, as transformers has it::

    token    | a | [ | ( | v | v | ~ | ~ | ) | ] | b |      "[", "]" around a video,
    time       0   1   1   2  27   2   3   4   4   5        "(", ")" around it and its sound

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
from engine.models.decoders.decoder import DecoderModel, build_decoder
from engine.models.decoders.decoder_config import DecoderConfig
from engine.models.decoders.qwen2 import qwen2_config
from engine.models.model_settings import ModelSettings
from engine.models.multimodal import MultiModalModel
from engine.requests.multimodal_input import MultiModalInput
from prefix_cache import ContentSpan

__all__ = ["MultiAxisModel", "build_multi_axis_decoder"]


class MultiAxisModel(MultiModalModel):
    """A decoder with three numbers to a place; see the module's note."""

    num_position_axes = MultiAxisRotaryEmbedding.num_axes

    def position_ids(
        self, prompt_ids: Sequence[int], multimodal_inputs: Sequence[MultiModalInput]
    ) -> Tensor | None:
        """``(3, len(prompt_ids))`` places; see :meth:`MultiModalModel.position_ids`."""
        steps = _steps(len(prompt_ids), multimodal_inputs)
        table = torch.empty(self.num_position_axes, len(prompt_ids), dtype=torch.int64)
        begin = place = done = 0
        whole: ContentSpan | None = None
        for item in multimodal_inputs:
            place = _place_text(table[:, done : item.offset], steps[done : item.offset], place)
            if item.whole is None or item.whole != whole:
                begin, whole = place, item.whole
            places = self.towers[item.modality].places(item.features)
            table[:, item.offset : item.end] = begin + places[:, item.rows_in(0, item.end)]
            place = int(table[:, item.offset : item.end].max()) + 1
            done = item.end
        _place_text(table[:, done:], steps[done:], place)
        return None if bool((table == torch.arange(len(prompt_ids))).all()) else table


def _steps(num_tokens: int, multimodal_inputs: Sequence[MultiModalInput]) -> Tensor:
    """How far each token of text lies from the one before it, ``(num_tokens,)``: 1, or 0."""
    steps = torch.ones(num_tokens, dtype=torch.int64)
    for item in multimodal_inputs:
        if item.whole is not None:
            steps[item.whole.offset] = 0
            steps[item.whole.end : item.whole.end + 1] = 0
    return steps


def _place_text(columns: Tensor, steps: Tensor, start: int) -> int:
    """Place tokens of text between two items, ``(axes, n)``; return the place after them."""
    if not len(steps):
        return start
    # Nothing says how far the first lies from an item.
    columns[:] = start + steps.cumsum(0) - steps[0]
    return int(columns[0, -1]) + 1


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
    return build_decoder(read_config, text, settings, make_rotary=make_rotary)

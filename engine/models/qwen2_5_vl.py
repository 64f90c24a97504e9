"""Qwen2.5-VL: images of any size, and tokens placed in time, height and width.

Text counts all three numbers up together. An image of ``h x w`` rows that begins at place ``p``
takes up places, not tokens, and what follows goes on after the larger of its sides::

    token    | a | b | * | * | * | * | * | * | c |      an image of 2 x 3
    time       0   1   2   2   2   2   2   2   5
    height     0   1   2   2   2   3   3   3   5
    width      0   1   2   3   4   2   3   4   5

Supported are images; videos are not.
Source: Bai et al., "Qwen2.5-VL Technical Report", 2025; transformers' ``qwen2_5_vl``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)

from engine.layers import MultiAxisRotaryEmbedding
from engine.mm_input import MultiModalInput
from engine.models.decoder import build_decoder
from engine.models.decoder_config import DecoderConfig
from engine.models.encoder_module import build_empty
from engine.models.model_settings import ModelSettings
from engine.models.multimodal import ImageTower, MultiModalModel, unique_prefix
from engine.models.qwen2 import qwen2_config

__all__ = ["Qwen2_5_VLModel", "Qwen2_5_VLTower", "build_qwen2_5_vl"]

_PIXELS, _GRID = "pixel_values", "image_grid_thw"


class Qwen2_5_VLTower(ImageTower):
    """Patches of images of any size to one row per square of patches.

    Args:
        config: of the checkpoint.
        settings: types and places.
    """

    feature_names = (_PIXELS, _GRID)

    def __init__(self, config: PreTrainedConfig, settings: ModelSettings) -> None:
        super().__init__()
        vision = config.vision_config
        self.module = build_empty(Qwen2_5_VisionTransformerPretrainedModel, vision, settings)
        self.merge_size: int = vision.spatial_merge_size
        self.patch_values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2

    def targets(self, stored: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`ImageTower.targets`."""
        prefix = unique_prefix(stored, "patch_embed.proj.weight")
        for name, tensor in self.module.state_dict().items():
            yield f"{prefix}{name}", tensor

    def grid(self, features: Mapping[str, Tensor]) -> tuple[int, int]:
        """Height and width of one image, in rows of the output.

        Raises:
            ValueError: the features are not those of one image.
        """
        self.require_features(features)
        if features[_GRID].numel() != 3:
            raise ValueError(
                f"{_GRID} of one image must have three numbers, "
                f"got the shape {tuple(features[_GRID].shape)}"
            )
        time, height, width = features[_GRID].flatten().tolist()
        if time != 1 or any(side < 1 or side % self.merge_size for side in (height, width)):
            raise ValueError(
                f"{_GRID} of one image must be 1 and two multiples of {self.merge_size}, "
                f"got {[time, height, width]}"
            )
        expected = (height * width, self.patch_values)
        if features[_PIXELS].shape != expected:
            raise ValueError(
                f"{_PIXELS} of an image of {height} x {width} patches must be {expected}, "
                f"got {tuple(features[_PIXELS].shape)}"
            )
        return height // self.merge_size, width // self.merge_size

    def num_rows(self, features: Mapping[str, Tensor]) -> int:
        """See :meth:`ImageTower.num_rows`.

        ``pixel_values`` is ``(patches, values of a patch)``, ``image_grid_thw`` ``(3,)`` patches.
        """
        height, width = self.grid(features)
        return height * width

    def forward(self, inputs: Sequence[MultiModalInput]) -> list[Tensor]:
        """See :meth:`ImageTower.forward`."""
        device = self.module.device
        pixels = torch.cat([item.features[_PIXELS] for item in inputs])
        grids = torch.stack([item.features[_GRID].flatten() for item in inputs])
        output = self.module(pixels.to(device, self.module.dtype), grid_thw=grids.to(device))
        return list(output.pooler_output.split([item.length for item in inputs]))


class Qwen2_5_VLModel(MultiModalModel):
    """Qwen2 with three numbers to a place; see the module's note."""

    tower: Qwen2_5_VLTower
    num_position_axes = 3

    def position_ids(
        self, prompt_ids: Sequence[int], mm_inputs: Sequence[MultiModalInput]
    ) -> Tensor | None:
        """``(3, len(prompt_ids))`` places; see :meth:`MultiModalModel.position_ids`."""
        if not mm_inputs:
            return None
        parts: list[Tensor] = []
        place = done = 0
        for item in mm_inputs:
            parts.append(_text_places(place, item.offset - done))
            place += item.offset - done
            height, width = self.tower.grid(item.features)
            sides = (torch.zeros(1, dtype=torch.int64), torch.arange(height), torch.arange(width))
            parts.append(torch.cartesian_prod(*sides).T + place)
            place += max(height, width)
            done = item.end
        parts.append(_text_places(place, len(prompt_ids) - done))
        return torch.cat(parts, dim=1)


def build_qwen2_5_vl(
    config: PreTrainedConfig, settings: ModelSettings, stored: Collection[str]
) -> Qwen2_5_VLModel:
    """Build a Qwen2.5-VL, its weights not yet loaded.

    Args:
        config: text and vision together.
        settings: types, places and lengths.
        stored: names of the checkpoint's weights.

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
    decoder = build_decoder(read_config, text, settings, True, make_rotary)
    tower = Qwen2_5_VLTower(config, settings)
    return Qwen2_5_VLModel(decoder, tower, int(config.image_token_id), stored)


def _text_places(start: int, count: int) -> Tensor:
    return torch.arange(start, start + count).expand(3, -1)

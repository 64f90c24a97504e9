"""Qwen2.5-VL: images of any size, videos, and token positions in time, height and width.

Positions after a video continue after its largest one, as the model was trained (Wang et al.,
"Qwen2-VL", section 2.1), and as in transformers up to 5.2. Newer versions continue after its height
or width, whichever is larger. The result is the same if a video's duration is smaller than that;
otherwise they place text among the video's grids, from which their ``generate`` then jumps away.

Source: Bai et al., "Qwen2.5-VL Technical Report", 2025; transformers' ``qwen2_5_vl``.

The vision tower of Qwen2.5-VL and Qwen2.5-Omni maps any number of patches to one row per square::

    patches, 4 x 6     a a b b c c       rows, 2 x 3     A B C
                       a a b b c c                       D E F
                       d d e e f f
                       d d e e f f

A video has one such grid for every two of its frames; patches of different grids never attend to
each other.

Each token has three positions: time, height and width.

For text, all three increase together. An item's tower returns positions relative to its beginning,
and the following text continues after the largest of them::

    token    | a | b | * | * | * | * | * | * | c |      an image of 2 x 3
    time       0   1   2   2   2   2   2   2   5
    height     0   1   2   2   2   3   3   3   5
    width      0   1   2   3   4   2   3   4   5

A video and its synchronised audio begin at the same position. The following text continues after
the largest position of the last piece, even if not the largest of all. The tokens around the two
share positions with their outer neighbours, as in transformers::

    token    | a | [ | ( | v | v | ~ | ~ | ) | ] | b |      "[", "]" around a video,
    time       0   1   1   2  27   2   3   4   4   5        "(", ")" around it and its audio

Source: Wang et al., "Qwen2-VL", 2024, section 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)

from engine.checkpoints.checkpoint import Checkpoint
from engine.layers import MultiAxisRotaryEmbedding
from engine.models.base import ModelSettings
from engine.models.decoders.decoder import DecoderConfig, DecoderModel, build_multi_axis_rotary
from engine.models.decoders.families import qwen2_config
from engine.models.encoder_module import build_empty
from engine.models.multimodal import ItemTower, MultiModalModel
from engine.requests.encoder_input import MultiModalInput
from prefix_cache import ContentSpan

_MAX_POSITION = 2**31


class ImageTower(ItemTower):
    """Encodes image patches to rows, each followed by features of earlier layers, if any.

    ``pixel_values`` are ``(patches, values of a patch)``, ``image_grid_thw`` ``(3,)``: 1, and the
    height and width in patches.

    Args:
        module: transformers' tower; several instances may share one.
    """

    feature_names: tuple[str, ...] = ("pixel_values", "image_grid_thw")
    known_weight = "patch_embed.proj.weight"
    kind = "image"
    has_frames = False

    def __init__(self, module: PreTrainedModel, vision: PreTrainedConfig) -> None:
        super().__init__()
        self.module = module
        self.row_parts = 1 + len(getattr(vision, "deepstack_visual_indexes", ()))
        self.merge_size: int = vision.spatial_merge_size
        self.patch_values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2

    def sides(self, features: Mapping[str, Tensor]) -> tuple[int, int, int]:
        """Return time, height and width of one item, in rows of the output.

        Raises:
            ValueError: the features are not those of one item.
        """
        self.require_features(features)
        pixels, grid = self.feature_names[:2]
        if features[grid].numel() != 3:
            raise ValueError(
                f"{grid} of one {self.kind} must have three numbers, "
                f"got the shape {tuple(features[grid].shape)}"
            )
        time, height, width = features[grid].flatten().tolist()
        times_fit = time >= 1 if self.has_frames else time == 1
        if not times_fit or any(side < 1 or side % self.merge_size for side in (height, width)):
            raise ValueError(
                f"{grid} of one {self.kind} must be {'at least ' if self.has_frames else ''}1 "
                f"and two multiples of {self.merge_size}, got {[time, height, width]}"
            )
        expected = (time * height * width, self.patch_values)
        if features[pixels].shape != expected:
            raise ValueError(
                f"{pixels} of {time} x {height} x {width} patches must be {expected}, "
                f"got {tuple(features[pixels].shape)}"
            )
        return time, height // self.merge_size, width // self.merge_size

    def num_rows(self, features: Mapping[str, Tensor]) -> int:
        """See :meth:`ItemTower.num_rows`."""
        time, height, width = self.sides(features)
        return time * height * width

    def places(self, features: Mapping[str, Tensor]) -> Tensor:
        """See :meth:`ItemTower.places`; times, heights and widths count up."""
        time, height, width = self.sides(features)
        times = self.times(time, features)
        return torch.cartesian_prod(times, torch.arange(height), torch.arange(width)).T

    def times(self, count: int, features: Mapping[str, Tensor]) -> Tensor:
        """Return time positions of grids, ``(count,)`` int64."""
        return torch.arange(count)

    def forward(self, inputs: Sequence[MultiModalInput]) -> list[Tensor]:
        """See :meth:`ItemTower.forward`."""
        device, (pixels, grid) = self.module.device, self.feature_names[:2]
        values = torch.cat([item.features[pixels] for item in inputs])
        grids = torch.stack([item.features[grid].flatten() for item in inputs])
        output = self.module(values.to(device, self.module.dtype), grid_thw=grids.to(device))
        rows = torch.cat([output.pooler_output, *getattr(output, "deepstack_features", ())], dim=-1)
        return list(rows.split([item.num_rows for item in inputs]))


class VideoTower(ImageTower):
    """Encodes video patches to rows, with time positions that follow presentation time.

    ``pixel_values_videos`` are ``(patches, values of a patch)``, ``video_grid_thw`` ``(3,)``: the
    number of grids, and their height and width in patches; ``video_second_per_grid`` is a number.

    Args:
        places_per_second: difference of time positions of grids that are a second apart.
    """

    feature_names = ("pixel_values_videos", "video_grid_thw", "video_second_per_grid")
    kind = "video"
    has_frames = True

    def __init__(
        self, module: PreTrainedModel, vision: PreTrainedConfig, places_per_second: float
    ) -> None:
        super().__init__(module, vision)
        self.places_per_second = places_per_second

    def times(self, count: int, features: Mapping[str, Tensor]) -> Tensor:
        """See :meth:`ImageTower.times`; in float32 and truncated, as in transformers."""
        seconds = torch.arange(count) * features["video_second_per_grid"].float()
        places = seconds * self.places_per_second
        if places[-1] >= _MAX_POSITION:
            raise ValueError(
                f"the video lasts for {float(seconds[-1]):g} s, which cannot be placed"
            )
        return places.long()


class MultiAxisModel(MultiModalModel):
    """A decoder with three positions per token; see the module docstring.

    Attributes:
        pair_step: position step between the tokens around a video with audio and their neighbours.
    """

    num_position_axes = MultiAxisRotaryEmbedding.num_axes
    pair_step = 0

    def position_ids(
        self, prompt_ids: Sequence[int], multimodal_inputs: Sequence[MultiModalInput]
    ) -> Tensor | None:
        """Return positions ``(3, len(prompt_ids))``; see :meth:`MultiModalModel.position_ids`."""
        steps = _steps(len(prompt_ids), multimodal_inputs, self.pair_step)
        table = torch.empty(self.num_position_axes, len(prompt_ids), dtype=torch.int64)
        begin = place = done = 0
        whole: ContentSpan | None = None
        for item in multimodal_inputs:
            place = _fill_text(table[:, done : item.offset], steps[done : item.offset], place)
            if item.whole is None or item.whole != whole:
                begin, whole = place, item.whole
            places = self.towers[item.modality].places(item.features)
            table[:, item.offset : item.end] = begin + places[:, item.rows_in(0, item.end)]
            place = int(table[:, item.offset : item.end].max()) + 1
            done = item.end
        _fill_text(table[:, done:], steps[done:], place)
        return None if bool((table == torch.arange(len(prompt_ids))).all()) else table


def _steps(num_tokens: int, multimodal_inputs: Sequence[MultiModalInput], pair_step: int) -> Tensor:
    """Return the position difference of each text token to the one before it, ``(num_tokens,)``."""
    steps = torch.ones(num_tokens, dtype=torch.int64)
    for item in multimodal_inputs:
        if item.whole is not None:
            steps[item.whole.offset] = pair_step
            steps[item.whole.end : item.whole.end + 1] = pair_step
    return steps


def _fill_text(columns: Tensor, steps: Tensor, start: int) -> int:
    """Fill positions ``(axes, n)`` of text between two items; return the next position."""
    if not len(steps):
        return start
    # The step of the first token does not apply after an item.
    columns[:] = start + steps.cumsum(0) - steps[0]
    return int(columns[0, -1]) + 1


def build_multi_axis_decoder(
    config: PreTrainedConfig,
    settings: ModelSettings,
    decoder: DecoderConfig,
    *,
    interleaved: bool = False,
    kept_layer: int | None = None,
) -> DecoderModel:
    """Build a decoder with multi-axis rotary positions, its weights not yet loaded.

    ``decoder`` was read from the text part of ``config``; for the other arguments, and errors, see
    :func:`build_multi_axis_rotary` and :class:`DecoderModel`.
    """
    # The whole config, not its text part, determines if the head is tied to the embedding.
    decoder = replace(decoder, tie_word_embeddings=bool(config.tie_word_embeddings))
    rotary = build_multi_axis_rotary(config.text_config, settings, interleaved=interleaved)
    return DecoderModel(decoder, [rotary], settings, kept_layer=kept_layer)


def build_qwen2_5_vl(checkpoint: Checkpoint, settings: ModelSettings) -> MultiAxisModel:
    """Build a Qwen2.5-VL, its weights not yet loaded; see :data:`Builder`."""
    config = checkpoint.config
    vision = config.vision_config
    module = build_empty(Qwen2_5_VisionTransformerPretrainedModel, vision, settings)
    return MultiAxisModel(
        build_multi_axis_decoder(config, settings, qwen2_config(config.text_config)),
        {
            "image": ImageTower(module, vision),
            "video": VideoTower(module, vision, float(vision.tokens_per_second)),
        },
        {"image": int(config.image_token_id), "video": int(config.video_token_id)},
        checkpoint.weight_files,
    )

"""The vision tower of Qwen2.5-VL and Qwen2.5-Omni: patches of any number in, a row per square out.

::

    patches, 4 x 6     a a b b c c       rows, 2 x 3     A B C
                       a a b b c c                       D E F
                       d d e e f f
                       d d e e f f

A video has one such grid for every two of its frames; within a layer, patches of different grids
never see each other.
Source: Bai et al., "Qwen2.5-VL Technical Report", 2025; transformers' ``qwen2_5_vl``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from engine.models.multimodal import ItemTower, unique_prefix
from engine.requests.multimodal_input import MultiModalInput

__all__ = ["ImageTower", "VideoTower"]

_MOST_PLACES = 2**31


class ImageTower(ItemTower):
    """Patches of images to rows.

    ``pixel_values`` are ``(patches, values of a patch)``, ``image_grid_thw`` ``(3,)``: 1, and the
    height and width in patches.

    Args:
        module: transformers' tower; several of these may share one.
        vision: its config.
    """

    feature_names: tuple[str, ...] = ("pixel_values", "image_grid_thw")
    kind = "image"
    has_frames = False

    def __init__(self, module: PreTrainedModel, vision: PreTrainedConfig) -> None:
        super().__init__()
        self.module = module
        self.merge_size: int = vision.spatial_merge_size
        self.patch_values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2

    def targets(self, stored: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`ItemTower.targets`."""
        prefix = unique_prefix(stored, "patch_embed.proj.weight")
        for name, tensor in self.module.state_dict().items():
            yield f"{prefix}{name}", tensor

    def sides(self, features: Mapping[str, Tensor]) -> tuple[int, int, int]:
        """Time, height and width of one item, in rows of the output.

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
        """See :meth:`ItemTower.places`; heights and widths count up, and so do times."""
        time, height, width = self.sides(features)
        times = self.times(time, features)
        return torch.cartesian_prod(times, torch.arange(height), torch.arange(width)).T

    def times(self, count: int, features: Mapping[str, Tensor]) -> Tensor:
        """Places of grids in time, ``(count,)`` int64."""
        return torch.arange(count)

    def forward(self, inputs: Sequence[MultiModalInput]) -> list[Tensor]:
        """See :meth:`ItemTower.forward`."""
        device, (pixels, grid) = self.module.device, self.feature_names[:2]
        values = torch.cat([item.features[pixels] for item in inputs])
        grids = torch.stack([item.features[grid].flatten() for item in inputs])
        output = self.module(values.to(device, self.module.dtype), grid_thw=grids.to(device))
        return list(output.pooler_output.split([item.num_rows for item in inputs]))


class VideoTower(ImageTower):
    """Patches of videos to rows, placed by the time at which they are shown.

    ``pixel_values_videos`` are ``(patches, values of a patch)``, ``video_grid_thw`` ``(3,)``: how
    many grids, and their height and width in patches; ``video_second_per_grid`` is a number.

    Args:
        places_per_second: how far two grids that are a second apart are placed.
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
        """See :meth:`ImageTower.times`; in float32 and cut off, as transformers has it."""
        seconds = torch.arange(count) * features["video_second_per_grid"].float()
        places = seconds * self.places_per_second
        if places[-1] >= _MOST_PLACES:
            raise ValueError(
                f"the video lasts for {float(seconds[-1]):g} s, which cannot be placed"
            )
        return places.long()

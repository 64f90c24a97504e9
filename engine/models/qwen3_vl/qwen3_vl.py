"""Qwen3-VL, dense and with experts: images, and videos with textual timestamps.

A video is expanded to one image for every two frames, each preceded by its timestamp. The prompt
holds a single placeholder for it, which a chat template puts between ``[`` and ``]``::

    prompt      | a | [ | * | ] | b |               "[", "]" are <|vision_start|>, <|vision_end|>
    expanded    | a | [ | <0.2 seconds> [ v v v v ] | <1.2 seconds> [ v v v v ] | ] | b |

Each grid of patches is a separate item, with the same height and width positions as an image: the
tower may run for one at a time, and videos with a common beginning share its cached blocks.
Source: Bai et al., "Qwen3-VL Technical Report", 2025; transformers' ``qwen3_vl``.

A row of an image replaces a placeholder's embedding, as elsewhere. It also contains features of
earlier layers of the tower, which are added after the decoder's first layers (Meng et al.,
"DeepStack", 2024, arXiv:2406.04334)::

    tower     layer 8 ──► features 0 ─┐   layer 16 ──► features 1 ─┐      last layer ──► embedding
    decoder   embedding ──► layer 0 ─ + ──────────────► layer 1 ─── + ──► layer 2 ──► ...
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from engine.checkpoints.checkpoint import Checkpoint
from engine.inputs.multimodal_inputs import MultiModalPromptProcessor, VideoSampling
from engine.inputs.prompt_processor import PromptSources
from engine.inputs.prompt_tokens import tokenize
from engine.interface.prompts import VideoFeatures
from engine.media.video_file import VideoInfo
from engine.models.base import ModelSettings
from engine.models.decoders.families import qwen3_config, qwen3_moe_config
from engine.models.encoder_module import build_empty
from engine.models.qwen2_5_vl.qwen2_5_vl import ImageTower, MultiAxisModel, build_multi_axis_decoder
from engine.requests.encoder_input import Modality, MultiModalInput


@dataclass(frozen=True, slots=True)
class SpreadSampling(VideoSampling):
    """Samples frames evenly from first to last; the pixel budget is per video, not per frame."""

    min_pixels: int = 128 * 32**2
    max_pixels: int = 768 * 32**2
    usual_video_tokens: ClassVar[int] = 768

    def choose(self, info: VideoInfo, temporal_patch_size: int) -> list[int]:
        """See :meth:`VideoSampling.choose`; with an odd number, the last frame is repeated."""
        wanted = max(int(info.num_frames / info.fps * (self.fps or 0)), self.min_frames)
        count = min(self.num_frames or min(wanted, self.max_frames), info.num_frames)
        return np.linspace(0, info.num_frames - 1, count).round().astype(int).tolist()

    def size(self, num_frames: int, temporal_patch_size: int, side: int) -> dict[str, int]:
        """See :meth:`VideoSampling.size`; image processors require integers."""
        most = self.max_pixels // num_frames
        if self.max_video_tokens is not None:
            least = int(self.min_pixels * 1.05)
            most = max(min(self.max_video_tokens * side**2, most), least)
        return {"shortest_edge": -(-self.min_pixels // num_frames), "longest_edge": most}


class DatedVideoTower(ImageTower):
    """Encodes patches of whole videos or single grids: ``pixel_values_videos`` and their grid."""

    feature_names = ("pixel_values_videos", "video_grid_thw")
    kind = "video"
    has_frames = True
    sampling = SpreadSampling

    def seconds(self, video: VideoFeatures, count: int) -> list[float]:
        """Return the time halfway through each grid; ``ValueError`` for invalid timestamps."""
        halfway = (1 - 1 / self.module.config.temporal_patch_size) / 2
        times: Sequence[Any] | None = video.timestamps
        if times is None:
            times = [(grid + halfway) * float(video.second_per_grid) for grid in range(count)]
        fit = (isinstance(time, int | float) and 0 <= time < math.inf for time in times)
        if len(times) != count or not all(fit):
            raise ValueError(f"timestamps must be {count} numbers of 0 or more, got {times}")
        return list(times)


class DatedVideoPrompts(MultiModalPromptProcessor):
    """Expands a video to its grids, each preceded by its timestamp; see the module docstring."""

    def __init__(self, sources: PromptSources) -> None:
        super().__init__(sources)
        self._begin = int(sources.checkpoint.config.vision_start_token_id)
        self._end = int(sources.checkpoint.config.vision_end_token_id)

    def place(
        self, modality: Modality, item: Any, offset: int, cache_salt: str | None
    ) -> tuple[list[int], tuple[MultiModalInput, ...]]:
        """See :meth:`MultiModalPromptProcessor.place`."""
        if modality != "video":
            return super().place(modality, item, offset, cache_salt)
        tower = self._model.towers[modality]
        features = self._makers[modality].make(item)
        assert isinstance(tower, DatedVideoTower) and isinstance(item, VideoFeatures)
        whole = {name: features[name] for name in tower.feature_names}
        self._limits.check_length(tower.num_rows(whole))
        count, *_ = tower.sides(whole)
        pixels, grid = whole.values()
        one = torch.tensor([1, *grid.flatten().tolist()[1:]])
        ids: list[int] = []
        items: list[MultiModalInput] = []
        for seconds, patches in zip(tower.seconds(item, count), pixels.chunk(count), strict=True):
            said = f"<{seconds:.1f} seconds>"
            ids += tokenize(said, self._tokenizer, self._limits, as_it_is=True)
            shown = dict(zip(tower.feature_names, (patches, one), strict=True))
            items.append(self.input_of(modality, shown, offset + len(ids) + 1, cache_salt))
            placeholders = [self._model.placeholders[modality]] * items[-1].length
            ids += [self._begin, *placeholders, self._end]
        return ids, tuple(items)


def build_qwen3_vl(checkpoint: Checkpoint, settings: ModelSettings) -> MultiAxisModel:
    """Build a Qwen3-VL, its weights not yet loaded; see :data:`Builder`."""
    config = checkpoint.config
    text, vision = config.text_config, config.vision_config
    has_experts = hasattr(text, "num_experts")
    decoder = qwen3_moe_config(text, stacked=True) if has_experts else qwen3_config(text)
    module = build_empty(Qwen3VLVisionModel, vision, settings)
    return MultiAxisModel(
        build_multi_axis_decoder(config, settings, decoder, interleaved=True),
        {"image": ImageTower(module, vision), "video": DatedVideoTower(module, vision)},
        {"image": int(config.image_token_id), "video": int(config.video_token_id)},
        checkpoint.weight_files,
    )

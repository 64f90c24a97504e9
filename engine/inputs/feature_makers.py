"""What a prompt shows, one item at a time, as the tensors that a model's tower takes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor

from engine.files.json_file import read_json_object
from engine.interface.arguments import check_dense
from engine.interface.config import MediaLimits
from engine.interface.log_fields import package_logger
from engine.interface.ownership import turn_of
from engine.interface.prompts import AudioPrompt, VideoFeatures, VideoPrompt
from engine.media.audio_samples import SampleReader, SpectrogramExtractor, load_extractor
from engine.media.image_file import image_features, load_image_processor
from engine.media.media_source import MediaSource
from engine.media.video_file import VideoInfo, probe_video, read_frames, read_soundtrack
from engine.requests.encoder_input import Modality

__all__ = [
    "AudioFeatureMaker",
    "FeatureTaker",
    "MissingFeatureMaker",
    "VideoFeatureMaker",
    "VideoSampling",
    "load_feature_makers",
]


class FeatureMaker(ABC):
    """Makes the features of items of one modality."""

    @abstractmethod
    def make(self, item: Any) -> Mapping[str, Tensor]:
        """Make the features of one item, by the names of transformers' processors."""

    def read(self, item: object, *, hears: bool, check_rows: Callable[[int], None]) -> object:
        """Open an item that comes with another one, as a video's file does with its sound.

        By default there is none such, and it stays as it is.
        """
        return item


_FPS = 2.0
"""What the published processors take where their files say nothing."""

_PIXELS = 28 * 28
_MAX_VIDEO_TOKENS = 128_000


@dataclass(frozen=True, slots=True)
class VideoSampling:
    """Which frames of a video a checkpoint looks at, and how large.

    ::

        24 frames a second   | | | | | | | | | | | | | | | | | | | | | | | | ...
        2 of them are seen   ^                       ^                       ...
        a grid of patches    |<----- temporal_patch_size of them ----->|

    Attributes:
        fps: frames of a second that are looked at; None where ``num_frames`` is given.
        num_frames: how many of the whole video; None where ``fps`` says so.
        min_frames: at least so many, as far as there are.
        min_pixels: of a frame; a smaller one is scaled up.
        max_pixels: of a frame; a larger one is scaled down.
        max_video_tokens: frames are scaled down so that all of them take at most nine tenths of
            so many rows, as far as ``min_pixels`` lets them; None: each by itself.
    """

    fps: float | None = _FPS
    num_frames: int | None = None
    min_frames: int = 4
    max_frames: int = 768
    min_pixels: int = 128 * _PIXELS
    max_pixels: int = 768 * _PIXELS
    max_video_tokens: int | None = None

    @classmethod
    def load(cls, folder: Path) -> VideoSampling:
        """Read what a checkpoint's folder says of its video processor.

        That is ``processor_config.json`` under ``video_processor``, or else
        ``video_preprocessor_config.json``. What they leave open is as in the published processors;
        the settings for images are not taken for videos.

        Raises:
            ValueError: a file cannot be read, or has a wrong value; names file and key.
        """
        whole, own = folder / "processor_config.json", folder / "video_preprocessor_config.json"
        stated: Any = read_json_object(whole).get("video_processor") if whole.is_file() else None
        file = whole
        if stated is None:
            stated, file = (read_json_object(own) if own.is_file() else {}), own
        if not isinstance(stated, dict):
            raise ValueError(f"{whole}: video_processor must be a mapping")
        size = stated.get("size") or {}
        if not isinstance(size, dict):
            raise ValueError(f"{file}: size must be a mapping, got {size!r}")
        found = {
            "num_frames": stated.get("num_frames"),
            "min_frames": stated.get("min_frames"),
            "max_frames": stated.get("max_frames"),
            "min_pixels": stated.get("min_pixels", size.get("shortest_edge")),
            "max_pixels": stated.get("max_pixels", size.get("longest_edge")),
        }
        if stated.get("cap_pixels_per_frame"):
            found["max_video_tokens"] = stated.get("max_video_tokens", _MAX_VIDEO_TOKENS)
        values: dict[str, Any] = {name: n for name, n in found.items() if n is not None}
        for name, value in values.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{file}: {name} must be an integer of 1 or more, got {value!r}")
        fps = stated.get("fps")
        if fps is not None:
            if not isinstance(fps, int | float) or not 0 < fps < math.inf:
                raise ValueError(f"{file}: fps must be a number of more than 0, got {fps!r}")
            if "num_frames" in values:
                raise ValueError(f"{file}: fps and num_frames exclude each other")
            values["fps"] = float(fps)
        elif "num_frames" in values:
            values["fps"] = None
        return cls(**values)

    def choose(self, info: VideoInfo, temporal_patch_size: int) -> list[int]:
        """Which frames are looked at: evenly spread, a multiple of ``temporal_patch_size``.

        Raises:
            ValueError: there are fewer than are to be looked at.
        """
        total, step = info.num_frames, temporal_patch_size
        if self.num_frames is not None:
            count = round(self.num_frames / step) * step
            if count > total:
                raise ValueError(
                    f"the checkpoint looks at {count} frames of a video, and this one has {total}"
                )
        else:
            most = math.floor(min(self.max_frames, total) / step) * step
            wanted = total / info.fps * (self.fps or _FPS)
            count = math.floor(min(max(wanted, self.min_frames), most, total) / step) * step
        if not count:
            return list(range(min(total, step)))  # shorter than a grid: the last one is repeated
        chosen: list[int] = torch.arange(0, total, total / count).int().tolist()
        return chosen

    def size(self, num_frames: int, temporal_patch_size: int, side: int) -> dict[str, int]:
        """How many pixels a frame may have, as image processors of transformers name it."""
        most = self.max_pixels
        if self.max_video_tokens is not None:
            share = int(self.max_video_tokens * side**2 * 0.9) * temporal_patch_size // num_frames
            most = max(min(most, share), int(self.min_pixels * 1.05))
        return {"shortest_edge": self.min_pixels, "longest_edge": most}


@dataclass(frozen=True, slots=True)
class VideoFeatureMaker(FeatureMaker):
    """Videos by files, or as tensors already; checks what a tower cannot see from their shapes.

    Attributes:
        processor: of the checkpoint, for images; None if it brings none: tensors only.
        limits: how much of a file is read.
    """

    processor: Any = None
    sampling: VideoSampling = field(default_factory=VideoSampling)
    limits: MediaLimits = field(default_factory=MediaLimits)

    def make(self, item: Any) -> Mapping[str, Tensor]:
        """Take :class:`VideoFeatures`; see :meth:`FeatureMaker.make`."""
        if not isinstance(item, VideoFeatures):
            raise ValueError(
                "a video must be a file, or VideoFeatures, the tensors of the checkpoint's video "
                f"processor, got {type(item).__name__}"
            )
        pixels: Any = item.pixel_values_videos
        if not isinstance(pixels, Tensor) or not pixels.is_floating_point():
            kind = getattr(pixels, "dtype", type(pixels).__name__)
            raise ValueError(f"pixel_values_videos must be a floating-point tensor, got {kind}")
        check_dense("pixel_values_videos", pixels)
        if not pixels.isfinite().all():
            raise ValueError("pixel_values_videos holds NaN or infinite values")
        grid = _integers("video_grid_thw", item.video_grid_thw)
        try:
            seconds = float(item.second_per_grid)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"second_per_grid must be a number: {error}") from error
        if not math.isfinite(seconds) or seconds <= 0:
            raise ValueError(f"second_per_grid must be more than 0 and finite, got {seconds}")
        return {
            "pixel_values_videos": pixels.detach().to("cpu", torch.float32),
            "video_grid_thw": grid,
            "video_second_per_grid": torch.tensor(seconds),
        }

    def read(self, item: object, *, hears: bool, check_rows: Callable[[int], None]) -> object:
        """Make the tensors of a file, and take its sound; see :meth:`FeatureMaker.read`.

        Frames lie as far apart as they were taken, also where rounding or a limit let fewer be
        looked at, so that the sound is in step. What is no file stays as it is.
        """
        prompt = VideoPrompt(item) if isinstance(item, str | Path | bytes) else item
        if not isinstance(prompt, VideoPrompt):
            return item
        if self.processor is None:
            raise ValueError("the checkpoint brings no image processor, which reads the frames")
        source = MediaSource(prompt.video, "video", self.limits.max_file_bytes)
        info = probe_video(source, self.limits)
        depth = int(self.processor.temporal_patch_size)
        indices = self.sampling.choose(info, depth)
        pixels, grid = self._patches(self._frames(source, info, indices), indices, check_rows)
        sampled_fps = len(indices) / info.num_frames * info.fps
        audio = None
        if hears and prompt.use_audio and info.has_sound:
            sound = read_soundtrack(source, self.limits)
            audio = None if sound is None else AudioPrompt(*sound)
        return VideoFeatures(pixels, grid, depth / sampled_fps, audio)

    def _frames(
        self, source: MediaSource, info: VideoInfo, indices: list[int]
    ) -> Iterator[tuple[Tensor, list[int]]]:
        """Each frame's patches, through the image processor: ``(patches, values)`` and its grid."""
        processor = self.processor
        side = int(processor.patch_size) * int(processor.merge_size)
        size = self.sampling.size(len(indices), int(processor.temporal_patch_size), side)
        for pixels in read_frames(source, info, indices, self.limits):
            image = Image.fromarray(pixels)
            try:
                with turn_of(processor):
                    output = processor(images=image, size=size, return_tensors="pt")
            except (ValueError, ZeroDivisionError) as error:
                raise ValueError(
                    f"frames of {image.width} x {image.height} pixels cannot be processed: {error}"
                ) from error
            yield output["pixel_values"], output["image_grid_thw"][0].tolist()

    def _patches(
        self,
        frames: Iterator[tuple[Tensor, list[int]]],
        indices: list[int],
        check_rows: Callable[[int], None],
    ) -> tuple[Tensor, tuple[int, int, int]]:
        """Lay frames behind each other: an image's patch has one frame in all of its depth."""
        depth, side = int(self.processor.temporal_patch_size), int(self.processor.patch_size)
        num_grids = -(-len(indices) // depth)
        whole: Tensor | None = None
        place = 0
        for place, (patches, (_, height, width)) in enumerate(frames):
            parts = patches.view(len(patches), -1, depth, side * side)
            if whole is None:
                # Before the others are decoded.
                check_rows(num_grids * len(patches) // int(self.processor.merge_size) ** 2)
                whole = torch.empty(num_grids, *parts.shape)
                grid = num_grids, height, width
            whole[place // depth, :, :, place % depth] = parts[:, :, 0]
        if whole is None:
            raise ValueError("the video holds no frames")
        for rest in range(place + 1, num_grids * depth):
            whole[rest // depth, :, :, rest % depth] = whole[place // depth, :, :, place % depth]
        return whole.flatten(2).flatten(0, 1), grid


def _integers(name: str, values: object) -> Tensor:
    """Integers of any form, int64 on the CPU; ``ValueError`` if they are none."""
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{name} must be integers: {error}") from error
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"{name} must be integers, got {tensor.dtype}")
    check_dense(name, tensor)
    return tensor.to("cpu", torch.int64)


logger = package_logger(__name__)

_GRID = "image_grid_thw"


class FeatureTaker(Protocol):
    """What has to be known of a model's tower before it runs."""

    @property
    def feature_names(self) -> Sequence[str]:
        """The tensors that it takes, by the names of transformers' processors."""

    def num_rows(self, features: Mapping[str, Tensor]) -> int:
        """Rows that one item gives; ``ValueError`` if the features are not those of one."""

    def places(self, features: Mapping[str, Tensor]) -> Tensor:
        """Where one item's rows lie, counted from its beginning: ``(3, num_rows)`` int64."""


@dataclass(frozen=True, slots=True)
class MissingFeatureMaker(FeatureMaker):
    """Stands in for what the checkpoint does not bring: text runs without it."""

    reason: str

    def make(self, item: Any) -> Mapping[str, Tensor]:
        """Refuse; see :meth:`FeatureMaker.make`."""
        raise ValueError(self.reason)


@dataclass(frozen=True, slots=True)
class ImageFeatureMaker(FeatureMaker):
    """Images by files or from Pillow, through the checkpoint's image processor.

    Attributes:
        names: which of the processor's tensors the tower takes.
        limits: how much of a file is read.
    """

    processor: Any
    names: Sequence[str]
    limits: MediaLimits = field(default_factory=MediaLimits)

    def make(self, item: Any) -> Mapping[str, Tensor]:
        """See :meth:`FeatureMaker.make`."""
        output = image_features(self.processor, item, self.limits)
        # Where a grid distinguishes images, their patches come in one row.
        packed = {"pixel_values"} if _GRID in self.names else set()
        return {name: output[name] if name in packed else output[name][0] for name in self.names}


class AudioFeatureMaker(FeatureMaker):
    """Sound by files or samples, through the checkpoint's feature extractor.

    Transformers fills up a window of silence (five minutes of it in published models) and masks
    its frames. Those that are masked are cut off here, so that features depend on the sound alone;
    and no more silence is put behind it than its last frame sees.
    """

    def __init__(self, extractor: SpectrogramExtractor, limits: MediaLimits | None = None) -> None:
        self._extractor = extractor
        self._reader = SampleReader.of(extractor, limits)

    def make(self, item: Any) -> Mapping[str, Tensor]:
        """Read, resample and extract: ``input_features`` ``(mel bins, frames)``."""
        prompt = item if isinstance(item, AudioPrompt) else AudioPrompt(item)
        for wish in ("language", "task", "timestamps"):
            if getattr(prompt, wish) is not None:
                raise ValueError(
                    f"{wish} is for speech models; this one is asked in words beside the sound"
                )
        samples = self._reader.read(prompt.audio, prompt.sampling_rate)
        # Silence fills up the last frame, and half of one more.
        hop = int(self._extractor.hop_length)
        filled = -(-(len(samples) + int(self._extractor.n_fft)) // hop) * hop
        with turn_of(self._extractor):
            output = self._extractor(
                samples,
                sampling_rate=self._reader.rate,
                padding="max_length",
                max_length=min(filled, int(self._extractor.n_samples)),
                return_attention_mask=True,
                return_tensors="pt",
            )
        is_sound = output["attention_mask"][0].bool()
        return {"input_features": output["input_features"][0][:, is_sound]}


def load_feature_makers(
    path: Path,
    towers: Mapping[Modality, FeatureTaker],
    limits: MediaLimits,
    *,
    trust_remote_code: bool = False,
) -> dict[Modality, FeatureMaker]:
    """Load what a checkpoint folder brings for what a model's towers take.

    A missing processor is reported in the log, and in the error of each request that needs it.

    Args:
        towers: of the model, by what they make rows of.
        limits: how much of a file is read.
        trust_remote_code: whether processors may come with their own Python code.
    """
    trust = {"trust_remote_code": trust_remote_code}
    makers: dict[Modality, FeatureMaker] = {}
    for modality, tower in towers.items():
        try:
            match modality:
                case "image":
                    processor = load_image_processor(path, **trust)
                    makers[modality] = ImageFeatureMaker(processor, tower.feature_names, limits)
                case "audio":
                    makers[modality] = AudioFeatureMaker(load_extractor(path, **trust), limits)
                case "video":
                    makers[modality] = _video_maker(path, limits, **trust)
        except ValueError as error:
            logger.warning("requests cannot show any %s: %s", modality, error)
            makers[modality] = MissingFeatureMaker(str(error))
    return makers


def _video_maker(
    path: Path, limits: MediaLimits, *, trust_remote_code: bool = False
) -> VideoFeatureMaker:
    """Frames go through the image processor; a checkpoint without one still takes tensors."""
    sampling = VideoSampling.load(path)
    try:
        processor = load_image_processor(path, trust_remote_code=trust_remote_code)
    except ValueError as error:
        logger.warning("requests cannot show files of videos: %s", error)
        processor = None
    return VideoFeatureMaker(processor, sampling, limits)

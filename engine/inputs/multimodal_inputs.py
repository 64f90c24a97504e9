"""Features of a prompt's images, sounds and videos, at the positions of their placeholders.

Rows of a video in sync with its own sound, in the order in which they are shown and heard::

    prompt      | a | <video> |  z  |
    expanded    | a | begin | v v v | ~ ~ ~ | v v v | ~ ~ ~ | ~ ~ | end | z |
    seconds             |<--- 0 to 2 -->|<--- 2 to 4 -->| 4 to

Each chunk of two seconds has its rows of the video (v), then its rows of the sound (~). So the two
items are split into pieces, and each tower still runs once. Without chunks, rows of both are
ordered by their times, the video's first.

Source: Xu et al., arXiv:2503.20215, section 2.2, and its processor in transformers."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeAlias

import torch
from PIL import Image
from torch import Tensor

from engine.files.json_file import read_json_object
from engine.inputs.encoder_decoder_inputs import features_hash
from engine.inputs.prompt_processor import (
    PlainPromptProcessor,
    PromptContent,
    PromptSources,
    items_of,
)
from engine.inputs.prompt_tokens import check_item
from engine.interface.arguments import check_dense
from engine.interface.config import MediaLimits
from engine.interface.log_fields import package_logger
from engine.interface.ownership import turn_of
from engine.interface.prompts import (
    AudioPrompt,
    ChatPrompt,
    ExplicitEncoderDecoderPrompt,
    ImagePrompt,
    Prompt,
    VideoFeatures,
    VideoPrompt,
)
from engine.media.image_file import image_features, load_image_processor
from engine.media.media_source import MediaSource
from engine.media.sound_file import SampleReader, SpectrogramExtractor, load_extractor
from engine.media.video_file import (
    VideoInfo,
    check_video_length,
    probe_video,
    read_frames,
    read_soundtrack,
)
from engine.requests.encoder_input import Modality, MultiModalInput, PromptPositions
from prefix_cache import ContentSpan


class FeatureMaker(ABC):
    """Computes the features of items of one modality."""

    @abstractmethod
    def make(self, item: Any) -> Mapping[str, Tensor]:
        """Compute the features of one item, named as by transformers' processors."""


_FPS = 2.0
"""Default of the published processors."""

_PIXELS = 28 * 28


@dataclass(frozen=True, slots=True)
class VideoSampling:
    """Number and size of the frames that a checkpoint samples from a video.

    ::

        24 frames a second   | | | | | | | | | | | | | | | | | | | | | | | | ...
        2 of them sampled    ^                       ^                       ...
        a grid of patches    |<----- temporal_patch_size of them ----->|

    Attributes:
        fps: sampled frames per second; None if ``num_frames`` is given.
        num_frames: sampled frames of the whole video; None if ``fps`` is given.
        min_frames: minimum number of frames, if the video has them.
        min_pixels: minimum pixels of a frame; a smaller one is scaled up.
        max_pixels: maximum pixels of a frame; a larger one is scaled down.
        max_video_tokens: frames are scaled down so that together they take at most nine tenths of
            this many rows, as far as ``min_pixels`` allows; None: no common limit.
    """

    fps: float | None = _FPS
    num_frames: int | None = None
    min_frames: int = 4
    max_frames: int = 768
    min_pixels: int = 128 * _PIXELS
    max_pixels: int = 768 * _PIXELS
    max_video_tokens: int | None = None
    usual_video_tokens: ClassVar[int] = 128_000

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the settings of a checkpoint's video processor from its folder.

        These are ``video_processor`` of ``processor_config.json``, or else
        ``video_preprocessor_config.json``. Missing values are those of the published processors;
        settings for images are not used for videos.

        Raises:
            ValueError: a file is unreadable, or has an invalid value; names file and key.
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
            found["max_video_tokens"] = stated.get("max_video_tokens", cls.usual_video_tokens)
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
        """Return evenly spread frame indices, in whole grids; ``ValueError`` if too few frames."""
        total, step = info.num_frames, temporal_patch_size
        if self.num_frames is not None:
            count = round(self.num_frames / step) * step
            if count > total:
                raise ValueError(
                    f"the checkpoint looks at {count} frames of a video, and this one has {total}"
                )
        else:
            limit = math.floor(min(self.max_frames, total) / step) * step
            wanted = total / info.fps * (self.fps or _FPS)
            count = math.floor(min(max(wanted, self.min_frames), limit, total) / step) * step
        if not count:
            return list(range(min(total, step)))  # less than a grid: the last frame is repeated
        return torch.arange(0, total, total / count).int().tolist()

    def size(self, num_frames: int, temporal_patch_size: int, side: int) -> dict[str, int]:
        """Return the bounds of a frame's pixels, named as by transformers' image processors."""
        limit = self.max_pixels
        if self.max_video_tokens is not None:
            share = int(self.max_video_tokens * side**2 * 0.9) * temporal_patch_size // num_frames
            limit = max(min(limit, share), int(self.min_pixels * 1.05))
        return {"shortest_edge": self.min_pixels, "longest_edge": limit}


@dataclass(frozen=True, slots=True)
class VideoFeatureMaker(FeatureMaker):
    """Features of video files or tensors; checks what a tower cannot detect from shapes.

    Attributes:
        processor: the checkpoint's image processor; None if it has none: tensors only.
    """

    processor: Any = None
    sampling: VideoSampling = field(default_factory=VideoSampling)
    limits: MediaLimits = field(default_factory=MediaLimits)

    def make(self, item: Any) -> Mapping[str, Tensor]:
        """Convert :class:`VideoFeatures`; see :meth:`FeatureMaker.make`."""
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
        grid = _read_grid(item.video_grid_thw)
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
        """Compute the tensors of a file, and read its sound.

        Frames keep the distance at which they were sampled, even if rounding or a limit reduced
        their number, so that the sound is in sync. Other items are returned unchanged.
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
            check = partial(check_video_length, source=source, limits=self.limits)
            sound = read_soundtrack(source, check)
            audio = None if sound is None else AudioPrompt(*sound)
        ends = zip(indices[::depth], [*indices[depth - 1 :: depth], indices[-1]], strict=False)
        timestamps = [(first + last) / 2 / info.fps for first, last in ends]
        return VideoFeatures(pixels, grid, depth / sampled_fps, audio, timestamps)

    def _frames(
        self, source: MediaSource, info: VideoInfo, indices: list[int]
    ) -> Iterator[tuple[Tensor, list[int]]]:
        """Yield each frame's patches ``(patches, values)`` and grid, by the image processor."""
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
        """Stack frames in time: an image's patch repeats one frame over its depth."""
        depth, side = int(self.processor.temporal_patch_size), int(self.processor.patch_size)
        num_grids = -(-len(indices) // depth)
        whole: Tensor | None = None
        index = 0
        for index, (patches, (_, height, width)) in enumerate(frames):
            parts = patches.view(len(patches), -1, depth, side * side)
            if whole is None:
                # Checked before the other frames are decoded.
                check_rows(num_grids * len(patches) // int(self.processor.merge_size) ** 2)
                whole = torch.empty(num_grids, *parts.shape)
                grid = num_grids, height, width
            whole[index // depth, :, :, index % depth] = parts[:, :, 0]
        if whole is None:
            raise ValueError("the video holds no frames")
        for rest in range(index + 1, num_grids * depth):
            whole[rest // depth, :, :, rest % depth] = whole[index // depth, :, :, index % depth]
        return whole.flatten(2).flatten(0, 1), grid


def _read_grid(values: object) -> Tensor:
    """Convert integers of any form to int64 on the CPU; ``ValueError`` for other values."""
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"video_grid_thw must be integers: {error}") from error
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"video_grid_thw must be integers, got {tensor.dtype}")
    check_dense("video_grid_thw", tensor)
    return tensor.to("cpu", torch.int64)


logger = package_logger(__name__)

_GRID = "image_grid_thw"

SoundEnd: TypeAlias = Literal["silence", "mirrored", "window"]


class FeatureTaker:
    """Properties of a model's tower that are needed before it runs.

    Attributes:
        feature_names: its input tensors, named as by transformers' processors.
        row_parts: width of its rows, as a multiple of an embedding's width.
        sound_end: padding after a sound for its features: as much ``"silence"`` as its last frame
            sees, a ``"mirrored"`` end, or silence to the end of a ``"window"``.
        sampling: sampling of frames from a video file.
        sampling_rate: rate of a sound, if the tower takes its samples as ``input_values``; None: it
            takes the output of the checkpoint's feature extractor.
    """

    feature_names: tuple[str, ...]
    row_parts: int = 1
    sampling_rate: int | None = None
    sound_end: SoundEnd = "silence"
    sampling: type[VideoSampling] = VideoSampling

    @abstractmethod
    def num_rows(self, features: Mapping[str, Tensor]) -> int:
        """Return the number of rows of one item.

        Raises:
            ValueError: the features are not those of one item that this tower supports.
        """

    def places(self, features: Mapping[str, Tensor]) -> Tensor:
        """Return the positions of one item's rows, from its beginning: ``(3, num_rows)`` int64.

        For a model with positions on three axes; by default consecutive.
        """
        return torch.arange(self.num_rows(features)).expand(3, -1)


@dataclass(frozen=True, slots=True)
class MissingFeatureMaker(FeatureMaker):
    """Placeholder for a processor that the checkpoint lacks: text runs without it."""

    reason: str

    def make(self, item: Any) -> Mapping[str, Tensor]:
        """Refuse; see :meth:`FeatureMaker.make`."""
        raise ValueError(self.reason)


@dataclass(frozen=True, slots=True)
class ImageFeatureMaker(FeatureMaker):
    """Features of image files or Pillow images, by an image processor: the named tensors."""

    processor: Any
    names: Sequence[str]
    limits: MediaLimits = field(default_factory=MediaLimits)

    def make(self, item: Any) -> Mapping[str, Tensor]:
        """See :meth:`FeatureMaker.make`."""
        output = image_features(self.processor, item, self.limits)
        # With a grid, the patches of all images are packed into one dimension.
        packed = {"pixel_values"} if _GRID in self.names else set()
        return {name: output[name] if name in packed else output[name][0] for name in self.names}


class AudioFeatureMaker(FeatureMaker):
    """Features of sound files or samples, by the checkpoint's feature extractor.

    Transformers pads with silence to a window (of five minutes in published models) and masks its
    frames. Here masked frames are cut off, so that features depend on the sound alone; and the
    silence after it is limited to what its last frame sees, or none, depending on the model. A
    model that takes whole windows gets all of their frames.
    """

    def __init__(
        self,
        extractor: SpectrogramExtractor,
        limits: MediaLimits | None = None,
        *,
        sound_end: SoundEnd = "silence",
    ) -> None:
        self._extractor, self._sound_end = extractor, sound_end
        # A sound is limited to one window if it is padded with silence.
        longest = int(extractor.n_samples) if sound_end == "silence" else None
        self._reader = SampleReader(int(extractor.sampling_rate), longest, limits or MediaLimits())
        self._logged_language = False

    def make(self, item: Any) -> Mapping[str, Tensor]:
        """Read, resample and extract ``input_features``, ``(mel bins, frames)``."""
        prompt = item if isinstance(item, AudioPrompt) else AudioPrompt(item)
        for field_name in ("task", "timestamps", "vad", "transcription"):
            if (value := getattr(prompt, field_name)) not in (None, "transcribe"):
                name = field_name if field_name != "transcription" else ", ".join(value.given)
                raise ValueError(
                    f"{name} is for speech models; this one is asked in words beside the sound"
                )
        if prompt.language is not None and not self._logged_language:
            self._logged_language = True
            logger.info(
                "a request names the language %.20r: a hint that changes nothing here, where a "
                "decoder hears",
                prompt.language,
            )
        samples = self._reader.read(prompt.audio, prompt.sampling_rate)
        padding: dict[str, Any] = {"padding": "longest", "truncation": False}
        if self._sound_end == "window":
            padding["pad_to_multiple_of"] = int(self._extractor.n_samples)
        elif self._sound_end == "silence":
            # Silence pads the last frame, and half of one more.
            hop = int(self._extractor.hop_length)
            filled = -(-(len(samples) + int(self._extractor.n_fft)) // hop) * hop
            padded = min(filled, int(self._extractor.n_samples))
            padding = {"padding": "max_length", "max_length": padded}
        elif len(samples) <= (mirrored := int(self._extractor.n_fft) // 2):
            raise ValueError(
                f"the audio is too short: of {len(samples)} samples {mirrored} cannot be mirrored"
            )
        with turn_of(self._extractor):
            output = self._extractor(
                samples,
                sampling_rate=self._reader.rate,
                return_attention_mask=True,
                return_tensors="pt",
                **padding,
            )
        features = output["input_features"][0]
        if self._sound_end != "window":
            features = features[:, output["attention_mask"][0].bool()]
        return {"input_features": features}


@dataclass(frozen=True, slots=True)
class SampleMaker(FeatureMaker):
    """Samples of sound files or arrays at one sampling rate: ``input_values`` ``(n,)``."""

    reader: SampleReader

    def make(self, item: Any) -> Mapping[str, Tensor]:
        """See :meth:`FeatureMaker.make`."""
        prompt = item if isinstance(item, AudioPrompt) else AudioPrompt(item)
        samples = self.reader.read(prompt.audio, prompt.sampling_rate)
        return {"input_values": torch.from_numpy(samples)}


def load_feature_makers(sources: PromptSources) -> dict[Modality, FeatureMaker]:
    """Load a checkpoint's processors for the inputs of its model's towers.

    A missing processor is reported in the log, and in the error of each request that needs it.
    """
    path, limits = sources.checkpoint.path, sources.media_limits
    trust = {"trust_remote_code": sources.checkpoint.trust_remote_code}
    towers: Mapping[Modality, FeatureTaker] = sources.model.towers
    makers: dict[Modality, FeatureMaker] = {}
    for modality, tower in towers.items():
        try:
            match modality:
                case "image":
                    processor = load_image_processor(path, **trust)
                    makers[modality] = ImageFeatureMaker(processor, tower.feature_names, limits)
                case "audio" if tower.sampling_rate is not None:
                    makers[modality] = SampleMaker(SampleReader(tower.sampling_rate, None, limits))
                case "audio":
                    extractor, end = load_extractor(path, **trust), tower.sound_end
                    makers[modality] = AudioFeatureMaker(extractor, limits, sound_end=end)
                case "video":
                    sampling, frames = tower.sampling.load(path), None
                    try:
                        frames = load_image_processor(path, **trust)
                    except ValueError as error:  # tensors still work
                        logger.warning("requests cannot show files of videos: %s", error)
                    makers[modality] = VideoFeatureMaker(frames, sampling, limits)
        except ValueError as error:
            logger.warning("requests cannot show any %s: %s", modality, error)
            makers[modality] = MissingFeatureMaker(str(error))
    return makers


@dataclass(frozen=True, slots=True)
class AudioInVideo:
    """Layout of a video with its sound in a model's prompt.

    Attributes:
        places_per_chunk: length of a chunk in time, in positions of rows; None: no chunks.
    """

    begin_id: int
    end_id: int
    places_per_chunk: int | None

    def __post_init__(self) -> None:
        if self.places_per_chunk is not None and self.places_per_chunk < 1:
            raise ValueError(
                f"a chunk of video and sound must have a place, got {self.places_per_chunk}"
            )

    def interleave(
        self, video: MultiModalInput, sound: MultiModalInput, times: tuple[Tensor, Tensor]
    ) -> tuple[MultiModalInput, ...]:
        """Split a video and its sound into pieces, in the order of their positions.

        Args:
            video: the whole video, at the position of its placeholder.
            times: non-decreasing positions of each one's rows, from its beginning. They are the
                model's own, so that a row is in the chunk of its position. (At a few odd frame
                rates, such as 2/49 s per grid, transformers' processor rounds differently from its
                model, and a grid on the border of two chunks falls into the other one.)

        Returns:
            The pieces, contiguous from the position after :attr:`begin_id`.
        """
        # Each block's key covers both items: a row's position depends on how both are split.
        digest = hashlib.sha256(video.content_hash + sound.content_hash).digest()
        length = video.length + sound.length + 2
        whole = ContentSpan("video with sound", video.offset, length, digest)
        offset = video.offset + 1
        pieces: list[MultiModalInput] = []
        items = video, sound
        for number, rows in self._runs(times):
            pieces.append(items[number].piece(rows, offset, whole))
            offset += pieces[-1].length
        return tuple(pieces)

    def _runs(self, times: tuple[Tensor, Tensor]) -> Iterator[tuple[int, range]]:
        """Yield runs of adjacent rows with their owner: 0 for the video, 1 for the sound."""
        if self.places_per_chunk is None:
            order = sorted(
                (time, number, row)
                for number, rows in enumerate(times)
                for row, time in enumerate(rows.tolist())
            )
            for number, run in groupby(order, key=lambda each: each[1]):
                rows = [row for _, _, row in run]
                yield number, range(rows[0], rows[-1] + 1)
            return
        per_chunk = self.places_per_chunk
        for chunk in zip_longest(*(self._chunks(rows, per_chunk) for rows in times)):
            yield from ((number, rows) for number, rows in enumerate(chunk) if rows is not None)

    @staticmethod
    def _chunks(times: Tensor, places_per_chunk: int) -> Iterator[range]:
        """Yield the rows of each chunk, as split by transformers.

        A row that is late by several chunks begins only the next one.
        """
        first, limit = 0, places_per_chunk
        for row, time in enumerate(times.tolist()):
            if time >= limit:
                yield range(first, row)
                first = row
                limit += places_per_chunk
        yield range(first, len(times))


class ItemSide:
    """Properties of a model with multi-modal input that are needed before it runs.

    Attributes:
        placeholders: ids of the items' placeholder tokens in prompts.
        towers: towers that compute the items' rows.
        audio_in_video: layout of a video with its own sound; None if unsupported.
    """

    placeholders: Mapping[Modality, int]
    towers: Mapping[Modality, FeatureTaker]
    audio_in_video: AudioInVideo | None = None

    def position_ids(
        self, prompt_ids: Sequence[int], multimodal_inputs: Sequence[MultiModalInput]
    ) -> Tensor | None:
        """Return the positions of a prompt's tokens, if they are not the indices.

        Args:
            multimodal_inputs: its items in the order of their offsets.

        Returns:
            ``(num_position_axes, len(prompt_ids))`` int64 on the CPU; generated tokens follow
            one by one after the last token's largest position. None if positions are indices.
        """
        return None


class MultiModalPromptProcessor(PlainPromptProcessor):
    """Expands placeholders, and computes the inputs of the model's towers.

    Args:
        sources: sources with a model that is an :class:`ItemSide`. A feature processor that the
            checkpoint lacks is reported when it is needed.
    """

    def __init__(self, sources: PromptSources) -> None:
        super().__init__(sources)
        self._model: ItemSide = sources.model
        self._makers = load_feature_makers(sources)
        # A template that supports a modality names it, as a type of message parts.
        template = str(getattr(sources.tokenizer, "chat_template", None) or tuple(self._makers))
        self.modalities += tuple(
            modality
            for modality, maker in self._makers.items()
            if not isinstance(maker, MissingFeatureMaker) and modality in template
        )
        self._cache_bytes = sources.encoder_cache_bytes

    def process(self, prompt: Prompt, *, cache_salt: str | None = None) -> PromptContent:
        """Replace each placeholder of a prompt by its item.

        Raises:
            ValueError: see :meth:`PromptProcessor.process`; the numbers of items and placeholders
                differ, or an item does not fit into the encoder cache.
        """
        content = self._resolve(prompt)
        if content.embeds is not None:
            return content
        items = items_of(prompt, tuple(self._makers))
        self._limits.requests.check_items(sum(map(len, items.values())))
        for modality, given in items.items():
            self._check_count(modality, content.token_ids, len(given))
        modality_of = {token_id: name for name, token_id in self._model.placeholders.items()}
        remaining = {modality: iter(enumerate(given)) for modality, given in items.items()}
        expanded: list[int] = []
        inputs: list[MultiModalInput] = []
        for token_id in content.token_ids:
            if token_id not in modality_of:
                expanded.append(token_id)
                continue
            modality = modality_of[token_id]
            number, item = next(remaining[modality])
            try:
                ids, entries = self._expand(modality, item, len(expanded), cache_salt)
            except ValueError as error:
                raise ValueError(f"{modality} {number}: {error}") from error
            inputs += entries
            expanded += ids
            # Checked before the next item is read.
            self._limits.check_length(len(expanded))
        table = self._model.position_ids(expanded, inputs)
        return PromptContent(
            expanded,
            # Each once: pieces of a video with audio share one span.
            tuple(dict.fromkeys(entry.span for entry in inputs)),
            multimodal_inputs=tuple(inputs),
            positions=None if table is None else PromptPositions.of(table),
        )

    def as_message(self, prompt: Prompt) -> Prompt:
        """Convert a lone sound or image to a user's message with nothing else."""
        lone = prompt
        if isinstance(prompt, ExplicitEncoderDecoderPrompt) and prompt.decoder_prompt is None:
            lone = prompt.encoder_prompt
        if not isinstance(lone, AudioPrompt | ImagePrompt):
            return prompt
        modality: Modality = "audio" if isinstance(lone, AudioPrompt) else "image"
        if modality not in self._makers:
            raise ValueError(f"this model takes no {modality}; it takes {', '.join(self._makers)}")
        message = {"role": "user", "content": [{"type": modality}]}
        item = lone if isinstance(lone, AudioPrompt) else lone.image
        return ChatPrompt((message,), multi_modal_data={modality: [item]})

    def _check_count(self, modality: Modality, token_ids: Sequence[int], num_items: int) -> None:
        placeholder = self._model.placeholders[modality]
        num_places = sum(token_id == placeholder for token_id in token_ids)
        if num_places != num_items:
            fix = (
                f"give one {modality} for each placeholder"
                if num_places > num_items
                else f"write a placeholder where each {modality} belongs, or, in chat messages, a "
                f"part of type {modality}"
            )
            name = f"token {placeholder}"
            if self._tokenizer is not None:
                name = f"{self._tokenizer.convert_ids_to_tokens(placeholder)}, {name}"
            raise ValueError(
                f"the prompt has {num_places} {modality} placeholders ({name}), but {num_items} "
                f"{modality} items were given; {fix}"
            )

    def _expand(
        self, modality: Modality, item: object, offset: int, cache_salt: str | None
    ) -> tuple[list[int], tuple[MultiModalInput, ...]]:
        """Expand a placeholder to token ids and the inputs whose rows replace them."""
        layout = self._model.audio_in_video
        maker, check_rows = self._makers[modality], self._limits.check_length
        if isinstance(maker, VideoFeatureMaker):
            item = maker.read(item, hears=layout is not None, check_rows=check_rows)
        if not isinstance(item, VideoFeatures) or item.audio is None:
            return self.place(modality, item, offset, cache_salt)
        if layout is None:
            raise ValueError("this model takes no video with its own sound; leave out its audio")
        entry = self.input_of(modality, maker.make(item), offset, cache_salt)
        try:
            sound_features = self._makers["audio"].make(item.audio)
            sound = self.input_of("audio", sound_features, offset, cache_salt)
        except ValueError as error:
            raise ValueError(f"its audio: {error}") from error
        towers = self._model.towers
        video_times, sound_times = (
            towers[each.modality].places(each.features)[0] for each in (entry, sound)
        )
        pieces = layout.interleave(entry, sound, (video_times, sound_times))
        ids = [layout.begin_id]
        for piece in pieces:
            ids += [self._model.placeholders[piece.modality]] * piece.length
        return [*ids, layout.end_id], pieces

    def place(
        self, modality: Modality, item: object, offset: int, cache_salt: str | None
    ) -> tuple[list[int], tuple[MultiModalInput, ...]]:
        """Return the token ids of one item from a position on, and the inputs that replace them."""
        features = self._makers[modality].make(item)
        entry = self.input_of(modality, features, offset, cache_salt)
        return [self._model.placeholders[modality]] * entry.length, (entry,)

    def input_of(
        self,
        modality: Modality,
        features: Mapping[str, Tensor],
        offset: int,
        cache_salt: str | None,
    ) -> MultiModalInput:
        """Build a tower's input for an item at a position; ``ValueError`` if it is too large."""
        tower = self._model.towers[modality]
        length, parts = tower.num_rows(features), tower.row_parts
        check_item(length, self._limits.row_bytes * parts, self._cache_bytes)
        digest = features_hash(features, length, cache_salt)
        return MultiModalInput(modality, offset, length, digest, features, row_parts=parts)

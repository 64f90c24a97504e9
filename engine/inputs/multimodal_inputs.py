"""Images and the like of a prompt, as features, in the places that they take.

A video in step with its own sound, rows of both in the order in which they are seen and heard::

    prompt      | a | <video> |  z  |
    expanded    | a | begin | v v v | ~ ~ ~ | v v v | ~ ~ ~ | ~ ~ | end | z |
    seconds             |<--- 0 to 2 -->|<--- 2 to 4 -->| 4 to

Each chunk of two seconds has the rows of the video (v) that are shown in it, then those of the
sound (~) that are heard in it. So the two items come in pieces, and each tower still runs once.
Without chunks, rows of both come in the order of their own times, the video's first.

Source: Xu et al., arXiv:2503.20215, section 2.2, and its processor in transformers."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from engine.media.video_file import VideoInfo, probe_video, read_frames, read_soundtrack
from engine.requests.encoder_input import Modality, MultiModalInput, PromptPositions, item_spans
from prefix_cache import ContentSpan


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
    usual_video_tokens: ClassVar[int] = 128_000

    @classmethod
    def load(cls, folder: Path) -> Self:
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
        """Which frames are seen, evenly spread, in whole grids; ``ValueError`` if too few."""
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
        return torch.arange(0, total, total / count).int().tolist()

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
        ends = zip(indices[::depth], [*indices[depth - 1 :: depth], indices[-1]], strict=False)
        timestamps = [(first + last) / 2 / info.fps for first, last in ends]
        return VideoFeatures(pixels, grid, depth / sampled_fps, audio, timestamps)

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

SoundEnd: TypeAlias = Literal["silence", "mirrored", "window"]


class FeatureTaker:
    """What has to be known of a model's tower before it runs.

    Attributes:
        feature_names: the tensors that it takes, by the names of transformers' processors.
        row_parts: how many times as wide as an embedding its rows are.
        sound_end: what stands behind a sound when its features are made: as much ``"silence"`` as
            its last frame sees, a ``"mirrored"`` end, or silence to the end of a ``"window"``.
        sampling: how frames of a video's file are chosen.
        sampling_rate: of a sound, where the tower takes its samples as ``input_values``; None:
            it takes what the checkpoint's feature extractor makes of them.
    """

    feature_names: tuple[str, ...]
    row_parts: int = 1
    sampling_rate: int | None = None
    sound_end: SoundEnd = "silence"
    sampling: type[VideoSampling] = VideoSampling

    @abstractmethod
    def num_rows(self, features: Mapping[str, Tensor]) -> int:
        """Rows that one item gives.

        Raises:
            ValueError: the features are not those of one item that this tower takes.
        """

    def places(self, features: Mapping[str, Tensor]) -> Tensor:
        """Where one item's rows lie, counted from its beginning: ``(3, num_rows)`` int64.

        For a model that places tokens on three axes; by default one row after the other.
        """
        return torch.arange(self.num_rows(features)).expand(3, -1)


@dataclass(frozen=True, slots=True)
class MissingFeatureMaker(FeatureMaker):
    """Stands in for what the checkpoint does not bring: text runs without it."""

    reason: str

    def make(self, item: Any) -> Mapping[str, Tensor]:
        """Refuse; see :meth:`FeatureMaker.make`."""
        raise ValueError(self.reason)


@dataclass(frozen=True, slots=True)
class ImageFeatureMaker(FeatureMaker):
    """Images by files or from Pillow, through an image processor: tensors of the given names."""

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
    and no more silence is put behind it than its last frame sees, or none, as the model has it.
    A model that hears whole windows gets all of their frames.
    """

    def __init__(
        self,
        extractor: SpectrogramExtractor,
        limits: MediaLimits | None = None,
        *,
        sound_end: SoundEnd = "silence",
    ) -> None:
        self._extractor, self._sound_end = extractor, sound_end
        # A sound is no longer than the one window, if silence fills that up.
        longest = int(extractor.n_samples) if sound_end == "silence" else None
        self._reader = SampleReader(int(extractor.sampling_rate), longest, limits or MediaLimits())
        self._told_of_language = False

    def make(self, item: Any) -> Mapping[str, Tensor]:
        """Read, resample and extract: ``input_features`` ``(mel bins, frames)``."""
        prompt = item if isinstance(item, AudioPrompt) else AudioPrompt(item)
        for wish in ("task", "timestamps", "vad", "transcription"):
            if (asked := getattr(prompt, wish)) not in (None, "transcribe"):
                name = wish if wish != "transcription" else ", ".join(asked.given)
                raise ValueError(
                    f"{name} is for speech models; this one is asked in words beside the sound"
                )
        if prompt.language is not None and not self._told_of_language:
            self._told_of_language = True
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
            # Silence fills up the last frame, and half of one more.
            hop = int(self._extractor.hop_length)
            filled = -(-(len(samples) + int(self._extractor.n_fft)) // hop) * hop
            most = min(filled, int(self._extractor.n_samples))
            padding = {"padding": "max_length", "max_length": most}
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
    """Sound by files or samples, brought to one sampling rate: ``input_values`` ``(n,)``."""

    reader: SampleReader

    def make(self, item: Any) -> Mapping[str, Tensor]:
        """See :meth:`FeatureMaker.make`."""
        prompt = item if isinstance(item, AudioPrompt) else AudioPrompt(item)
        samples = self.reader.read(prompt.audio, prompt.sampling_rate)
        return {"input_values": torch.from_numpy(samples)}


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
                case "audio" if tower.sampling_rate is not None:
                    makers[modality] = SampleMaker(SampleReader(tower.sampling_rate, None, limits))
                case "audio":
                    extractor, end = load_extractor(path, **trust), tower.sound_end
                    makers[modality] = AudioFeatureMaker(extractor, limits, sound_end=end)
                case "video":
                    sampling, frames = tower.sampling.load(path), None
                    try:
                        frames = load_image_processor(path, **trust)
                    except ValueError as error:  # tensors are still taken
                        logger.warning("requests cannot show files of videos: %s", error)
                    makers[modality] = VideoFeatureMaker(frames, sampling, limits)
        except ValueError as error:
            logger.warning("requests cannot show any %s: %s", modality, error)
            makers[modality] = MissingFeatureMaker(str(error))
    return makers


@dataclass(frozen=True, slots=True)
class AudioInVideo:
    """How a model takes a video with its sound.

    Attributes:
        places_per_chunk: how far in time, in the places of rows, a chunk reaches; None: there are
            no chunks.
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
        """Cut a video and its sound in pieces, in the order of their places.

        Args:
            video: the whole video, at the position of its placeholder.
            times: of each one's rows, in places from its beginning, never falling. They are the
                model's own, so that a row is in the chunk of its place. (At a few odd
                frame rates, such as 2/49 s to a grid, transformers' processor rounds otherwise
                than its model, and a grid on the border of two chunks goes into the other.)

        Returns:
            The pieces, from the position after that of :attr:`begin_id` on without a gap.
        """
        # All of it keys each of its blocks: where a row lies depends on how both are cut.
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
        """Rows that lie side by side, and whose they are: 0 for the video's, 1 for the sound's."""
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
        """Rows of one chunk after the other, as transformers cuts them.

        A row that comes late by several chunks begins only the next one.
        """
        first, limit = 0, places_per_chunk
        for row, time in enumerate(times.tolist()):
            if time >= limit:
                yield range(first, row)
                first = row
                limit += places_per_chunk
        yield range(first, len(times))


class ItemSide:
    """What has to be known of a model that is shown images and the like, before it runs.

    Attributes:
        placeholders: ids of the tokens that stand for them in prompts.
        towers: makes their rows.
        audio_in_video: how it takes a video with its own sound; None if it does not.
    """

    placeholders: Mapping[Modality, int]
    towers: Mapping[Modality, FeatureTaker]
    audio_in_video: AudioInVideo | None = None

    def position_ids(
        self, prompt_ids: Sequence[int], multimodal_inputs: Sequence[MultiModalInput]
    ) -> Tensor | None:
        """Places of a prompt's tokens, where a token's index in its sequence is not its place.

        Args:
            multimodal_inputs: its items in the order of their offsets.

        Returns:
            ``(num_position_axes, len(prompt_ids))`` int64 on the CPU; generated tokens follow
            one by one after the largest number of the last token. None where places are indices.
        """
        return None


class MultiModalPromptProcessor(PlainPromptProcessor):
    """Expands placeholders, and makes what the model's towers take.

    Args:
        sources: of a model that is an :class:`ItemSide`. A processor of features that the
            checkpoint lacks is reported when it is needed.
    """

    def __init__(self, sources: PromptSources) -> None:
        super().__init__(sources)
        self._model: ItemSide = sources.model
        checkpoint = sources.checkpoint
        self._makers = load_feature_makers(
            checkpoint.path,
            self._model.towers,
            sources.media_limits,
            trust_remote_code=checkpoint.trust_remote_code,
        )
        # A template that writes messages with pictures names them, as a type of their parts.
        template = str(getattr(sources.tokenizer, "chat_template", None) or tuple(self._makers))
        self.modalities += tuple(
            modality
            for modality, maker in self._makers.items()
            if not isinstance(maker, MissingFeatureMaker) and modality in template
        )
        self._cache_bytes = sources.encoder_cache_bytes

    def process(self, prompt: Prompt, *, cache_salt: str | None = None) -> PromptContent:
        """Put each item that a prompt shows in the place of its placeholder.

        Raises:
            ValueError: see :meth:`PromptProcessor.process`; there are more items than
                placeholders or fewer, or an item cannot be held in the encoder cache.
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
            # Before the next one is read.
            self._limits.check_length(len(expanded))
        table = self._model.position_ids(expanded, inputs)
        return PromptContent(
            expanded,
            item_spans(inputs),
            multimodal_inputs=tuple(inputs),
            positions=None if table is None else PromptPositions.of(table),
        )

    def as_message(self, prompt: Prompt) -> Prompt:
        """A sound or an image alone is a user's message that holds nothing else."""
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
        """What comes in the place of a placeholder: token ids, and whose rows replace them."""
        way = self._model.audio_in_video
        check_rows = self._limits.check_length
        item = self._makers[modality].read(item, hears=way is not None, check_rows=check_rows)
        if not isinstance(item, VideoFeatures) or item.audio is None:
            return self.place(modality, item, offset, cache_salt)
        if way is None:
            raise ValueError("this model takes no video with its own sound; leave out its audio")
        features = self._makers[modality].make(item)
        entry = self.input_of(modality, features, offset, cache_salt)
        try:
            heard = self._makers["audio"].make(item.audio)
            sound = self.input_of("audio", heard, offset, cache_salt)
        except ValueError as error:
            raise ValueError(f"its audio: {error}") from error
        towers = self._model.towers
        video_times, sound_times = (
            towers[each.modality].places(each.features)[0] for each in (entry, sound)
        )
        pieces = way.interleave(entry, sound, (video_times, sound_times))
        ids = [way.begin_id]
        for piece in pieces:
            ids += [self._model.placeholders[piece.modality]] * piece.length
        return [*ids, way.end_id], pieces

    def place(
        self, modality: Modality, item: object, offset: int, cache_salt: str | None
    ) -> tuple[list[int], tuple[MultiModalInput, ...]]:
        """Token ids that show one item, from a position on, and whose rows replace them."""
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
        """What a tower gets of an item at a position; ``ValueError`` if it cannot be held."""
        tower = self._model.towers[modality]
        length, parts = tower.num_rows(features), tower.row_parts
        check_item(length, self._limits.row_bytes * parts, self._cache_bytes)
        digest = features_hash(features, length, cache_salt)
        return MultiModalInput(modality, offset, length, digest, features, row_parts=parts)

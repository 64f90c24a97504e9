"""What a prompt shows, one item at a time, as the tensors that a model's tower takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from engine.inputs.feature_maker import FeatureMaker
from engine.inputs.video_features import VideoFeatureMaker, VideoSampling
from engine.interface.config import MediaLimits
from engine.interface.log_fields import package_logger
from engine.interface.ownership import turn_of
from engine.interface.prompts import AudioPrompt
from engine.media.audio_samples import SampleReader
from engine.media.image_file import image_features, load_image_processor
from engine.media.spectrogram_extractor import SpectrogramExtractor, load_extractor
from engine.requests.multimodal_input import Modality

__all__ = [
    "AudioFeatureMaker",
    "FeatureTaker",
    "ImageFeatureMaker",
    "MissingFeatureMaker",
    "load_feature_makers",
]

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
    """Stands in for what the checkpoint does not bring: text runs without it.

    Attributes:
        reason: why there is none.
    """

    reason: str

    def make(self, item: Any) -> Mapping[str, Tensor]:
        """Refuse; see :meth:`FeatureMaker.make`."""
        raise ValueError(self.reason)


@dataclass(frozen=True, slots=True)
class ImageFeatureMaker(FeatureMaker):
    """Images by files or from Pillow, through the checkpoint's image processor.

    Attributes:
        processor: of the checkpoint.
        names: which of the processor's tensors the tower takes.
        limits: how much of a file is read.
    """

    processor: Any
    names: Sequence[str]
    limits: MediaLimits = field(default_factory=MediaLimits)

    def make(self, item: Any) -> Mapping[str, Tensor]:
        """See :meth:`FeatureMaker.make`."""
        output = image_features(self.processor, item, self.limits)
        # Where a grid tells images apart, their patches come in one row.
        packed = {"pixel_values"} if _GRID in self.names else set()
        return {name: output[name] if name in packed else output[name][0] for name in self.names}


class AudioFeatureMaker(FeatureMaker):
    """Sound by files or samples, through the checkpoint's feature extractor.

    Transformers fills up a window of silence (five minutes of it in published models) and masks
    its frames. Those that are masked are cut off here, so that features depend on the sound alone;
    and no more silence is put behind it than its last frame sees.

    Args:
        extractor: of the checkpoint.
        limits: how much of a file is read.
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

    A processor that is missing is told in the log, and in the error of each request that needs it.

    Args:
        path: the folder.
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

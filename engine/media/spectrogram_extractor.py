"""What turns sound into log-mel spectrograms, by what it has to be able to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from transformers import AutoFeatureExtractor

__all__ = ["SpectrogramExtractor", "load_extractor"]

_NUMBERS = ("sampling_rate", "n_samples", "hop_length", "n_fft")


class SpectrogramExtractor(Protocol):
    """A feature extractor of transformers that works on windows of a fixed length.

    Attributes:
        sampling_rate: samples per second that it takes.
        n_samples: of its window.
        hop_length: samples from one frame to the next.
        n_fft: samples that a frame sees.
    """

    sampling_rate: int
    n_samples: int
    hop_length: int
    n_fft: int

    def __call__(self, raw_speech: Any, *, sampling_rate: int, **options: Any) -> Any:
        """Samples to ``input_features``, ``(1, mel bins, frames)``, by their names."""


def load_extractor(path: Path, *, trust_remote_code: bool = False) -> SpectrogramExtractor:
    """Load the feature extractor of a checkpoint folder.

    Args:
        path: the folder.
        trust_remote_code: whether it may come with its own Python code; no prompt asks the user.

    Raises:
        ValueError: it brings none, one that makes no spectrograms of windows, or one that cannot
            be made or needs code of its own.
    """
    try:
        extractor: Any = AutoFeatureExtractor.from_pretrained(
            path, trust_remote_code=trust_remote_code, local_files_only=not trust_remote_code
        )
    # Values of a wrong kind make transformers raise whatever it stumbles over.
    except Exception as error:
        raise ValueError(f"the feature extractor in {path} cannot be loaded: {error}") from error
    for name in _NUMBERS:
        number = getattr(extractor, name, None)
        if not isinstance(number, int) or number < 1:
            raise ValueError(
                f"the feature extractor in {path}, a {type(extractor).__name__}, must make "
                f"spectrograms of windows of a fixed length, but its {name} is {number!r}"
            )
    loaded: SpectrogramExtractor = extractor
    return loaded

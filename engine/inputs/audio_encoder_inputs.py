"""Speech for audio encoders, through the checkpoint's feature extractor."""

from __future__ import annotations

from pathlib import Path

from transformers import WhisperFeatureExtractor

from engine.inputs.encoder_inputs import EncoderInputMaker, EncoderSide
from engine.interface.prompts import AudioPrompt, EncoderPrompt
from engine.media.audio_samples import SampleReader, load_extractor
from engine.requests.encoder_input import EncoderInput

__all__ = ["AudioEncoderInputs"]


class AudioEncoderInputs(EncoderInputMaker):
    """Turns speech into the log-mel features of a fixed window.

    ::

        WAV ─► mono samples ─► the extractor's rate ─► silence up to the window ─► log-mel

    Args:
        encoder: of the model.
        extractor: of the checkpoint.
    """

    takes = "audio (a WAV file or samples)"

    def __init__(self, encoder: EncoderSide, extractor: WhisperFeatureExtractor) -> None:
        super().__init__(encoder)
        self._extractor = extractor
        self._reader = SampleReader.of(extractor)

    @classmethod
    def from_checkpoint(cls, path: Path, encoder: EncoderSide) -> AudioEncoderInputs:
        """Load the feature extractor of a checkpoint folder.

        Raises:
            ValueError: it brings none, or one of another kind.
        """
        return cls(encoder, load_extractor(path))

    @property
    def longest_s(self) -> float:
        """The window in seconds: longer speech is refused."""
        return self._reader.longest_s

    def make(self, prompt: EncoderPrompt | None, *, cache_salt: str | None) -> EncoderInput:
        """Read, resample and extract.

        Raises:
            ValueError: the prompt is no audio, or cannot be read; see :meth:`SampleReader.read`.
        """
        if not isinstance(prompt, AudioPrompt):
            raise self._refuse(prompt)
        samples = self._reader.read(prompt.audio, prompt.sampling_rate)
        features = self._extractor(samples, sampling_rate=self._reader.rate, return_tensors="pt")
        return self._of_features({"input_features": features["input_features"][0]}, cache_salt)

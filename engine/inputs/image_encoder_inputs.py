"""Images for vision encoders, through the checkpoint's image processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.inputs.encoder_inputs import EncoderInputMaker, EncoderSide
from engine.interface.prompts import EncoderPrompt, ImagePrompt
from engine.media.image_file import image_features, load_image_processor
from engine.requests.encoder_input import EncoderInput

__all__ = ["ImageEncoderInputs"]


class ImageEncoderInputs(EncoderInputMaker):
    """Turns one image into the tiles and their arrangement that a vision encoder takes.

    Args:
        encoder: of the model.
        processor: of the checkpoint: images to tensors with a batch dimension.
        feature_names: which of the processor's tensors the encoder takes.
    """

    takes = "an image"

    def __init__(
        self, encoder: EncoderSide, processor: Any, feature_names: tuple[str, ...]
    ) -> None:
        super().__init__(encoder)
        self._processor = processor
        self._feature_names = feature_names

    @classmethod
    def from_checkpoint(
        cls, path: Path, encoder: EncoderSide, feature_names: tuple[str, ...]
    ) -> ImageEncoderInputs:
        """Load the image processor of a checkpoint folder; Pillow does its work.

        Raises:
            ValueError: it brings none, or Pillow is not installed.
        """
        return cls(encoder, load_image_processor(path), feature_names)

    def make(self, prompt: EncoderPrompt | None, *, cache_salt: str | None) -> EncoderInput:
        """Open the image and cut it into tiles.

        Raises:
            ValueError: the prompt is no image, or the file cannot be read as one.
        """
        if not isinstance(prompt, ImagePrompt):
            raise self._refuse(prompt)
        features = image_features(self._processor, prompt.image)
        return self._of_features(
            {name: features[name][0] for name in self._feature_names}, cache_salt
        )

"""What a prompt shows beside its text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.prompts import (
    ChatPrompt,
    ExplicitEncoderDecoderPrompt,
    Prompt,
    TextPrompt,
    TokensPrompt,
)

__all__ = ["images_of", "refuse_images"]

_IMAGE = "image"


def images_of(prompt: Prompt) -> Sequence[object]:
    """The images in a prompt's ``multi_modal_data``.

    Raises:
        ValueError: it shows something else, or not a list of images.
    """
    if not isinstance(prompt, TextPrompt | ChatPrompt | TokensPrompt):
        return ()
    data = prompt.multi_modal_data
    unknown = sorted(set(data) - {_IMAGE})
    if unknown:
        raise ValueError(
            f"multi_modal_data has {', '.join(map(repr, unknown))}; what can be shown is {_IMAGE!r}"
        )
    images = data.get(_IMAGE, ())
    if isinstance(images, str | Path) or not isinstance(images, Sequence):
        raise ValueError(
            f"multi_modal_data[{_IMAGE!r}] must be a list of images, got {type(images).__name__}"
        )
    return images


def refuse_images(prompt: Prompt) -> None:
    """Raise ``ValueError`` if a prompt, or either side of one, shows images."""
    if isinstance(prompt, ExplicitEncoderDecoderPrompt):
        refuse_images(prompt.encoder_prompt)
        if prompt.decoder_prompt is not None:
            refuse_images(prompt.decoder_prompt)
        return
    images = images_of(prompt)
    if images:
        raise ValueError(
            f"the prompt shows {len(images)} images in multi_modal_data, but this model takes "
            "none there; a model whose encoder reads images takes one as its encoder prompt, "
            "beside a decoder prompt"
        )

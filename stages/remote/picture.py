"""Images of Pillow, as the pixels that stages make of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["picture_of", "pixels_of"]

_PIXEL_BYTES = {"RGB": 3, "I": 4, "F": 4}


def pixels_of(image: Image) -> tuple[str, tuple[int, int], NDArray[np.uint8]]:
    """Mode, size and pixels of an image, upright RGB as stages make it.

    One that stages refuse, since it does not say what is white, keeps its mode: they shall tell.

    Returns:
        The mode, ``(width, height)``, and ``(width * height * bytes of a pixel,)``.

    Raises:
        ValueError: it cannot be read.
    """
    from engine.media.image_file import upright_rgb

    try:
        image.load()
    except (OSError, SyntaxError) as error:
        raise ValueError(f"an image that cannot be read: {error}") from error
    if image.mode not in ("I", "F"):
        image = upright_rgb(image)
    return image.mode, image.size, np.frombuffer(image.tobytes(), np.uint8)


def picture_of(mode: str, size: tuple[int, int], pixels: NDArray[np.uint8]) -> Image:
    """The image that :func:`pixels_of` took apart.

    Raises:
        ValueError: there are more pixels or fewer, or the mode is another.
    """
    from PIL import Image as pillow

    width, height = size
    if mode not in _PIXEL_BYTES or pixels.size != width * height * _PIXEL_BYTES[mode]:
        raise ValueError(f"{pixels.size} bytes for an image {width} x {height} of mode {mode!r}")
    return pillow.frombytes(mode, size, pixels.tobytes())

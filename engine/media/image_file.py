"""Opens images, whatever form they come in, and makes tensors of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoImageProcessor, BatchFeature

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["image_features", "load_image_processor", "open_image"]


def open_image(image: object) -> Image:
    """Open a PNG or JPEG file, or take an image of Pillow or an array of pixels, as RGB.

    It is turned as its EXIF data says, and 16 bits of grey become 8.

    Args:
        image: the file, the image, or ``(height, width, 3)`` uint8, a tensor or of numpy.

    Raises:
        ValueError: it is none of these, cannot be read, or does not say what is white.
    """
    from PIL import Image as pillow

    if isinstance(image, pillow.Image):
        return _upright_rgb(image)
    if isinstance(image, Tensor | np.ndarray):
        return pillow.fromarray(_check_pixels(image))
    if not isinstance(image, str | Path):
        raise ValueError(
            "image must be a file, an image of Pillow or an array of pixels, "
            f"got {type(image).__name__}"
        )
    try:
        with pillow.open(image) as opened:
            return _upright_rgb(opened)
    # Pillow's decoders raise SyntaxError and ValueError for files that are broken.
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
        raise ValueError(f"image {str(image)!r} cannot be read: {error}") from error


def _upright_rgb(image: Image) -> Image:
    from PIL import Image as pillow
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I;16"):
        # Pillow's own conversion takes all that is above 255 for white.
        grey = np.asarray(upright).astype(np.uint32)
        return pillow.fromarray(((grey + 128) // 257).astype(np.uint8)).convert("RGB")
    if upright.mode in ("I", "F"):
        raise ValueError(
            f"its pixels are of mode {upright.mode!r}, which does not say what is white; "
            "convert it to RGB"
        )
    return upright.convert("RGB")


def _check_pixels(image: Tensor | NDArray[Any]) -> NDArray[np.uint8]:
    pixels = image.detach().cpu().numpy() if isinstance(image, Tensor) else image
    height_width_channels = pixels.ndim == 3 and pixels.shape[2] == 3 and pixels.size > 0
    if pixels.dtype != np.uint8 or not height_width_channels:
        raise ValueError(
            "an array of pixels must be (height, width, 3) of uint8, red, green and blue, "
            f"got {pixels.shape} of {pixels.dtype}"
        )
    return np.ascontiguousarray(pixels)


def image_features(processor: Any, image: object) -> BatchFeature:
    """Open an image and run a checkpoint's processor: tensors with a batch dimension.

    Raises:
        ValueError: it cannot be read, or not be processed.
    """
    opened = open_image(image)
    try:
        features: BatchFeature = processor(images=opened, return_tensors="pt")
    # A strip of one pixel's width may shrink to none.
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(
            f"the image of {opened.width} x {opened.height} pixels cannot be processed: {error}"
        ) from error
    return features


def load_image_processor(path: Path) -> Any:
    """Load the image processor of a checkpoint folder; Pillow does its work.

    Raises:
        ValueError: it brings none, or Pillow is not installed.
    """
    try:
        return AutoImageProcessor.from_pretrained(path, backend="pil", local_files_only=True)
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(f"the image processor in {path} cannot be loaded: {error}") from error

"""Opens images in any supported form and converts them to tensors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoImageProcessor, BatchFeature

from engine.interface.arguments import check_dense
from engine.interface.config import MediaLimits
from engine.interface.ownership import turn_of
from engine.media.media_source import MediaSource

if TYPE_CHECKING:
    from PIL.Image import Image

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")

_MAX_ASPECT_RATIO = 200
"""Maximum ratio of the sides. Processors scale the shorter side up, and the longer one with it."""

_ORIENTATION = 0x0112


def open_image(image: object, limits: MediaLimits | None = None) -> Image:
    """Open a PNG, JPEG, WebP, GIF, BMP or TIFF, or convert an open image, as RGB.

    It is rotated by its EXIF data, and 16 bits of grey become 8. Only the first frame of an
    animation is decoded.

    Args:
        image: a file, its content, or a data URL; an image of Pillow; or pixels,
            ``(height, width, 3)`` uint8, a tensor or a numpy array.
        limits: size limits, checked before it is decoded; None uses the defaults.

    Raises:
        ValueError: another type, too large, unreadable, or of a pixel mode without a white level.
    """
    from PIL import Image as pillow

    limits = limits or MediaLimits()
    if isinstance(image, pillow.Image):
        _check_size(image.size, limits)
        return upright_rgb(image)
    if isinstance(image, Tensor | np.ndarray):
        pixels = _check_pixels(image)
        _check_size((pixels.shape[1], pixels.shape[0]), limits)
        return pillow.fromarray(pixels)
    if not isinstance(image, str | Path | bytes):
        raise ValueError(
            "image must be a file, an image of Pillow or an array of pixels, "
            f"got {type(image).__name__}"
        )
    source = MediaSource(image, "image", limits.max_file_bytes)
    with _open(source, limits) as opened:
        return upright_rgb(opened)


def check_image(source: MediaSource) -> None:
    """Read only the header of an image; ``ValueError`` if it cannot be read."""
    with _open(source, None):
        pass


@contextmanager
def _open(source: MediaSource, limits: MediaLimits | None) -> Iterator[Image]:
    """Open an image by its header; without limits, its size is not checked."""
    from PIL import Image as pillow
    from PIL import UnidentifiedImageError

    # One at a time: warning filters are settings of the whole process.
    with source.open() as file, turn_of(pillow):
        # Any exception of a decoder is the fault of a broken file.
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore" if limits is None else "error", pillow.DecompressionBombWarning
                )
                opened = pillow.open(file, formats=_FORMATS)
            with opened:
                if limits is not None:
                    _check_size(opened.size, limits)
                yield opened
        except UnidentifiedImageError as error:
            raise ValueError(
                f"{source.name} cannot be read: it is none of PNG, JPEG, WebP, GIF, BMP and TIFF"
            ) from error
        except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
            limit = "" if limits is None else f", {limits.max_image_pixels}"
            raise ValueError(
                f"{source.name} cannot be read: it has more pixels than "
                f"engine.media_limits.max_image_pixels{limit}; scale it down"
            ) from error
        except Exception as error:  # see above
            raise ValueError(f"{source.name} cannot be read: {error}") from error


def _check_size(size: tuple[int, int], limits: MediaLimits) -> None:
    width, height = size
    if width * height > limits.max_image_pixels:
        raise ValueError(
            f"it has {width} x {height} pixels, and {limits.max_image_pixels} are the most; scale "
            "it down, or raise engine.media_limits.max_image_pixels"
        )
    if max(width, height) > _MAX_ASPECT_RATIO * min(width, height):
        raise ValueError(
            f"it has {width} x {height} pixels, and one side may be {_MAX_ASPECT_RATIO} times the "
            "other at most; cut it"
        )


def upright_rgb(image: Image) -> Image:
    """Convert to RGB, rotated by EXIF data, grey in 8 bits; ``ValueError`` if white is unknown."""
    from PIL import Image as pillow
    from PIL import ImageOps

    upright = image
    # Without an orientation, Pillow would make a copy.
    if image.getexif().get(_ORIENTATION, 1) != 1:
        upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I;16"):
        # Pillow's own conversion treats all values above 255 as white.
        grey = np.asarray(upright).astype(np.uint32)
        grey += 128
        grey //= 257
        return pillow.fromarray(grey.astype(np.uint8)).convert("RGB")
    if upright.mode in ("I", "F"):
        raise ValueError(
            f"its pixels are of mode {upright.mode!r}, which does not say what is white; "
            "convert it to RGB"
        )
    return upright.convert("RGB")


def _check_pixels(image: Tensor | NDArray[Any]) -> NDArray[np.uint8]:
    # Some tensor types do not exist in numpy.
    shape, kind = tuple(image.shape), str(image.dtype).removeprefix("torch.")
    if kind != "uint8" or len(shape) != 3 or shape[2] != 3 or 0 in shape:
        raise ValueError(
            "an array of pixels must be (height, width, 3) of uint8, red, green and blue, "
            f"got {shape} of {kind[:80]}"
        )
    if isinstance(image, Tensor):
        check_dense("pixels", image)
        image = image.detach().cpu().numpy()
    return np.ascontiguousarray(image)


def image_features(
    processor: Any, image: object, limits: MediaLimits | None = None
) -> BatchFeature:
    """Open an image and process it: tensors with a batch dimension; ``ValueError`` if it fails."""
    # Opened under the lock as well, so that only one large decoded image is held at a time.
    with turn_of(processor):
        opened = open_image(image, limits)
        try:
            features: BatchFeature = processor(images=opened, return_tensors="pt")
        # A strip of one pixel's width may shrink to 0.
        except (ValueError, ZeroDivisionError) as error:
            raise ValueError(
                f"the image of {opened.width} x {opened.height} pixels cannot be processed: {error}"
            ) from error
    return features


def load_image_processor(path: Path, *, trust_remote_code: bool = False) -> Any:
    """Load the image processor of a checkpoint folder, with the Pillow backend.

    Args:
        trust_remote_code: True if its own Python code may run; the user is not prompted.

    Raises:
        ValueError: there is none, it cannot be created or needs untrusted code; or Pillow is not
            installed.
    """
    try:
        return AutoImageProcessor.from_pretrained(
            path,
            backend="pil",
            trust_remote_code=trust_remote_code,
            local_files_only=not trust_remote_code,
        )
    # Values of a wrong type make transformers raise arbitrary exceptions.
    except Exception as error:
        raise ValueError(f"the image processor in {path} cannot be loaded: {error}") from error

"""Whatever form an image comes in, it is seen upright and in its own shades."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image

from engine.media.image_file import open_image

ORIENTATION = 0x0112
PIXELS = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("as_file", [True, False])
def test_a_photo_is_turned_as_its_camera_was_held(
    tmp_path: Path, orientation: int, as_file: bool
) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    path = tmp_path / "photo.png"
    Image.fromarray(PIXELS).save(path, exif=exif)
    found = np.asarray(open_image(path if as_file else Image.open(path)))
    assert (found == np.asarray(load_image(str(path)))).all()
    assert found.shape == ((40, 60, 3) if orientation < 5 else (60, 40, 3))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
def test_modes_of_8_bits_are_those_of_pillow(tmp_path: Path, mode: str) -> None:
    image = Image.fromarray(PIXELS).convert(mode)
    assert (np.asarray(open_image(image)) == np.asarray(image.convert("RGB"))).all()


def test_16_bits_of_grey_become_8_from_black_to_white(tmp_path: Path) -> None:
    grey = np.linspace(0, 65_535, 60 * 40).astype(np.uint16).reshape(40, 60)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    for image in (tmp_path / "grey.png", Image.fromarray(grey)):
        found = np.asarray(open_image(image)).astype(float)
        assert found.shape == (40, 60, 3)
        assert abs(found - grey[..., None] / 257).max() <= 0.5


@pytest.mark.parametrize("mode", ["I", "F"])
def test_numbers_without_a_white_are_refused(tmp_path: Path, mode: str) -> None:
    image = Image.fromarray(PIXELS).convert("L").convert(mode)
    with pytest.raises(ValueError, match=f"mode '{mode}', which does not say what is white"):
        open_image(image)
    image.save(tmp_path / "numbers.tiff")
    with pytest.raises(ValueError, match=r"numbers\.tiff' cannot be read: its pixels are of mode"):
        open_image(tmp_path / "numbers.tiff")

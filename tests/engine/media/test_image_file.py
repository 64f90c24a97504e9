"""Images of every form are decoded upright and with the right brightness."""

from __future__ import annotations

import struct
import threading
import tracemalloc
import zlib
from base64 import b64encode
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.image_utils import load_image

from engine.interface.config import MediaLimits
from engine.interface.ownership import turn_of
from engine.media import image_file
from engine.media.image_file import image_features, open_image

ORIENTATION = 0x0112
PIXELS = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("as_file", [True, False])
def test_a_photo_is_rotated_by_its_exif_orientation(
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
def test_8_bit_modes_are_converted_as_in_pillow(mode: str) -> None:
    image = Image.fromarray(PIXELS).convert(mode)
    assert (np.asarray(open_image(image)) == np.asarray(image.convert("RGB"))).all()


def test_16_bit_grey_is_scaled_to_8_bits(tmp_path: Path) -> None:
    grey = np.linspace(0, 65_535, 60 * 40).astype(np.uint16).reshape(40, 60)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    for image in (tmp_path / "grey.png", Image.fromarray(grey)):
        found = np.asarray(open_image(image)).astype(float)
        assert found.shape == (40, 60, 3)
        assert abs(found - grey[..., None] / 257).max() <= 0.5


@pytest.mark.parametrize("mode", ["I", "F"])
def test_modes_without_a_white_level_are_refused(tmp_path: Path, mode: str) -> None:
    image = Image.fromarray(PIXELS).convert("L").convert(mode)
    with pytest.raises(ValueError, match=f"mode '{mode}', which does not say what is white"):
        open_image(image)
    image.save(tmp_path / "numbers.tiff")
    with pytest.raises(ValueError, match=r"numbers\.tiff' cannot be read: its pixels are of mode"):
        open_image(tmp_path / "numbers.tiff")


def encoded(format: str, size: tuple[int, int] = (60, 40)) -> bytes:
    file = BytesIO()
    Image.fromarray(PIXELS).resize(size).save(file, format=format)
    return file.getvalue()


FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_read_from_every_source(format: str, tmp_path: Path) -> None:
    content = encoded(format)
    path = tmp_path / "no ending"
    path.write_bytes(content)
    url = f"data:image/{format.lower()};base64,{b64encode(content).decode()}"
    expected = np.asarray(Image.open(BytesIO(content)).convert("RGB"))
    for form in (path, str(path), content, url):
        assert (np.asarray(open_image(form)) == expected).all()


@pytest.mark.parametrize("format", ["PPM", "ICO", "PCX", "TGA", "EPS"])
def test_other_formats_are_refused(format: str) -> None:
    with pytest.raises(ValueError, match="the image cannot be read: it is none of PNG, JPEG, WebP"):
        open_image(encoded(format))


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_the_first_frame_of_an_animation_is_used(format: str) -> None:
    first, *rest = (Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "green"))
    file = BytesIO()
    first.save(file, format=format, save_all=True, append_images=rest, lossless=True)
    assert (np.asarray(open_image(file.getvalue())) == (255, 0, 0)).all()


def bomb(width: int, height: int) -> bytes:
    """A black and white PNG of equal rows, cut off after some of them."""

    def chunk(name: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + check

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes(1 + width // 8) * 100)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows)


@pytest.mark.parametrize(("width", "height"), [(8_193, 8_192), (13_300, 13_300), (60_000, 60_000)])
def test_a_bomb_is_refused_before_it_is_decoded(width: int, height: int) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="the image .*pixels.*media_limits.max_image_pixels"):
            open_image(bomb(width, height))
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_limits_are_named_and_configurable() -> None:
    image, content = Image.new("1", (50, 40)), encoded("PNG", (50, 40))
    small, enough = MediaLimits(max_image_pixels=1999), MediaLimits(max_image_pixels=2000)
    for form in (image, content, PIXELS[:, :50]):
        with pytest.raises(ValueError, match="50 x 40 pixels, and 1999 are .*max_image_pixels"):
            open_image(form, small)
        assert open_image(form, enough).size == (50, 40)
    with pytest.raises(ValueError, match="less than or equal to 89478485"):
        MediaLimits(max_image_pixels=(Image.MAX_IMAGE_PIXELS or 0) + 1)
    with pytest.raises(ValueError, match="has .* bytes, but 10 are the most"):
        open_image(content, MediaLimits(max_file_bytes=10))


def test_an_extreme_aspect_ratio_is_refused() -> None:
    with pytest.raises(ValueError, match="1 x 201 pixels, and one side may be 200 times the other"):
        open_image(Image.new("RGB", (1, 201)))
    assert open_image(Image.new("RGB", (200, 1))).size == (200, 1)


WHOLE = [encoded(format) for format in FORMATS]


@given(
    content=st.sampled_from(WHOLE),
    keep=st.floats(0, 1),
    damage=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=6),
)
def test_a_damaged_file_is_read_or_refused_by_name(
    content: bytes, keep: float, damage: list[tuple[float, int]]
) -> None:
    broken = bytearray(content)
    for position, value in damage:
        broken[int(position**4 * (len(broken) - 1))] = value
    try:
        found = open_image(bytes(broken[: round(keep * len(broken))]))
    except ValueError as error:
        assert str(error).startswith("the image cannot be read: ")
    else:
        assert found.mode == "RGB"
        assert found.width * found.height <= MediaLimits().max_image_pixels


def is_taken(thing: object) -> bool:
    """Return True if another thread cannot get a turn at ``thing``."""
    entered = threading.Event()

    def enter() -> None:
        with turn_of(thing):
            entered.set()

    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    return not entered.wait(0.1)


def test_images_of_one_processor_are_opened_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise every thread that prepares requests could hold a large decoded image."""

    class Processor:
        def __call__(self, images: Image.Image, return_tensors: str) -> tuple[int, int]:
            return images.size

    processor, was_taken = Processor(), []

    def opening(image: object, limits: MediaLimits | None = None) -> Image.Image:
        was_taken.append(is_taken(processor))
        return open_image(image, limits)

    monkeypatch.setattr(image_file, "open_image", opening)
    size: object = image_features(processor, PIXELS)
    assert size == (60, 40)
    assert was_taken == [True] and not is_taken(processor)


def test_files_are_decoded_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding changes the warning filters of the whole process."""
    was_taken = []
    convert = Image.Image.convert

    def converting(image: Image.Image, mode: str) -> Image.Image:
        was_taken.append(is_taken(Image))
        return convert(image, mode)

    monkeypatch.setattr(Image.Image, "convert", converting)
    open_image(encoded("PNG"))
    assert was_taken == [True] and not is_taken(Image)

"""Reads damaged, truncated and inconsistent audio, image and video files in separate processes.

Each must be read, or refused by a ``ValueError`` that begins with its name, within 30 seconds per
batch and 1.5 GB.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from io import BytesIO

import numpy as np
import soundfile
from PIL import Image

from engine.interface.config import MediaLimits
from engine.media.image_file import open_image
from engine.media.media_source import MediaSource
from engine.media.sound_file import SampleReader
from engine.media.video_file import (
    check_video_length,
    probe_video,
    read_frames,
    read_soundtrack,
)
from tests.support.videos import FORMATS, moving_picture, video_file
from torture.guarded_process import run_guarded
from torture.outcome_table import Tally

SECONDS, MAX_BYTES, MAX_MB = 30.0, 3 * 2**29, 1500.0
BATCH = 50
LIMITS = MediaLimits(max_audio_s=60.0, max_video_s=60.0)


def _read_sound(content: bytes) -> None:
    samples = SampleReader(16_000, None, LIMITS).read(content)
    if not (len(samples) and np.isfinite(samples).all()):
        raise AssertionError("no samples, or such that are no numbers")


def _open_image(content: bytes) -> None:
    image = open_image(content, LIMITS)
    if image.mode != "RGB" or image.width * image.height > LIMITS.max_image_pixels:
        raise AssertionError(f"an image of {image.mode} {image.size}")


def _read_video(content: bytes) -> None:
    source = MediaSource(content, "video", LIMITS.max_file_bytes)
    info = probe_video(source, LIMITS)
    for frame in read_frames(source, info, range(0, info.num_frames, 3), LIMITS):
        if frame.dtype != np.uint8 or frame.ndim != 3:
            raise AssertionError(f"a frame of {frame.dtype} {frame.shape}")
    read_soundtrack(source, partial(check_video_length, source=source, limits=LIMITS))


READERS: Mapping[str, Callable[[bytes], None]] = {
    "sound": _read_sound,
    "image": _open_image,
    "video": _read_video,
}


def whole_files() -> dict[str, tuple[str, bytes]]:
    """Create valid files: reader and content, by name."""
    tone = (0.4 * np.sin(np.arange(9_600) / 11)).astype(np.float32)
    files: dict[str, tuple[str, bytes]] = {}
    for format, subtypes in {
        "WAV": ("PCM_U8", "PCM_16", "PCM_24", "FLOAT", "DOUBLE"),
        "WAVEX": ("PCM_16",),
        "FLAC": ("PCM_16", "PCM_24"),
        "OGG": ("VORBIS", "OPUS"),
        "MP3": ("MPEG_LAYER_III",),
    }.items():
        for subtype in subtypes:
            buffer = BytesIO()
            soundfile.write(buffer, np.stack([tone, tone], 1), 48_000, subtype, format=format)
            files[f"{format} {subtype}"] = "sound", buffer.getvalue()
    picture = Image.fromarray(moving_picture(1)[0])
    for format in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"):
        buffer = BytesIO()
        picture.save(buffer, format=format)
        files[format] = "image", buffer.getvalue()
    for kind in FORMATS:
        files[kind] = "video", video_file(kind, moving_picture(6), 8, tone[:9_600])
        files[f"{kind}'s sound"] = "sound", files[kind][1]
    return files


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Change bytes, write large numbers, remove or repeat pieces, truncate; mostly in headers."""
    broken = bytearray(content)
    for _ in range(draw.randint(0, 6)):
        place = int(draw.random() ** draw.choice((1, 4)) * len(broken))
        match draw.randrange(4):
            case 0:
                broken[place : place + 1] = draw.randbytes(1)
            case 1:
                size = draw.choice((2, 4, 8))
                number = draw.choice((0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, draw.getrandbits(64)))
                order = draw.choice(("little", "big"))
                broken[place : place + size] = (number % 2 ** (8 * size)).to_bytes(size, order)
            case 2:
                del broken[place : place + draw.randint(1, 64)]
            case _:
                broken[place:place] = broken[: draw.randint(0, 64)]
    keep = draw.choice((1.0, 1.0, draw.random()))
    return bytes(broken[: round(keep * len(broken))])


def outcomes(kind: str, contents: list[bytes]) -> Iterator[tuple[str, str]]:
    """Read files in this process; yield the outcomes."""
    for content in contents:
        try:
            READERS[kind](content)
        except ValueError as error:
            named = str(error).startswith(("the ", "frames "))
            yield ("failed alone", "") if named else ("wrong", f"does not name it: {error}")
        except Exception as error:
            yield "wrong", f"{type(error).__name__}: {error}"
        else:
            yield "went on", ""


def _try(kind: str, contents: list[bytes]) -> str:
    found = list(outcomes(kind, contents))
    counts = [sum(outcome == name for outcome, _ in found) for name in ("went on", "failed alone")]
    wrong = [detail for outcome, detail in found if outcome == "wrong"]
    return "\n".join([*map(str, counts), *(each.replace("\n", " ") for each in wrong)])


def try_batch(kind: str, contents: list[bytes], tally: Tally) -> None:
    """Read files in a process; if it dies or hangs, read each in a separate one."""
    found = run_guarded(partial(_try, kind, contents), SECONDS, MAX_BYTES)
    if found.kind != "returned" or found.peak_mb > MAX_MB:
        if len(contents) == 1:
            detail = f"{found.kind} {' '.join(found.told)}, {found.peak_mb:.0f} MB"
            tally.add("hangs" if found.kind == "hangs" else "wrong", detail)
            return
        for content in contents:
            try_batch(kind, [content], tally)
        return
    went_on, failed, *wrong = found.told[0].split("\n")
    for outcome, count in (("went on", went_on), ("failed alone", failed)):
        for _ in range(int(count)):
            tally.add(outcome)
    for detail in wrong:
        tally.add("wrong", detail)


def main() -> int:
    """Try some thousands of each kind; return 1 if any outcome is not allowed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=12_000, help="how many in all")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    files, draw = whole_files(), random.Random(chosen.seed)
    for kind, content in files.values():
        READERS[kind](content)
    tallies = {kind: Tally(f"damaged files of {kind}") for kind in READERS}
    for kind, content in files.values():
        todo = chosen.inputs // len(files)
        while todo > 0:
            batch = [damaged(content, draw) for _ in range(min(BATCH, todo))]
            try_batch(kind, batch, tallies[kind])
            todo -= len(batch)
    return Tally.report(tallies.values())


if __name__ == "__main__":
    sys.exit(main())

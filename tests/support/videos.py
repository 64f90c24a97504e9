"""Small videos, as files of mp4 and webm."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from io import BytesIO
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

FORMATS = {"mp4": ("mp4", "libx264", "aac"), "webm": ("webm", "libvpx-vp9", "libopus")}
FORMATS["mpeg4"] = ("mp4", "mpeg4", "aac")
"""Container, and codecs of picture and sound."""


def moving_picture(
    num_frames: int, size: tuple[int, int] = (64, 48), seed: int = 0
) -> NDArray[np.uint8]:
    """Return ``(num_frames, height, width, 3)``: soft colours that change from frame to frame."""
    draw = np.random.default_rng(seed)
    width, height = size
    slopes = draw.uniform(-1, 1, (num_frames, 2, 3))
    down, right = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    waves = slopes[:, 0, None, None] * down[..., None] + slopes[:, 1, None, None] * right[..., None]
    frames: NDArray[np.uint8] = (127 + 120 * np.sin(3 * waves)).astype(np.uint8)
    return frames


def video_file(
    kind: str,
    frames: NDArray[np.uint8],
    fps: int = 8,
    sound: NDArray[np.float32] | None = None,
    rate: int = 48_000,
    *,
    sound_begins: float = 0.0,
) -> bytes:
    """Return the bytes of a file of a kind in :data:`FORMATS`, with mono sound or without."""
    format, picture_codec, sound_codec = FORMATS[kind]
    buffer = BytesIO()
    with av.open(buffer, "w", format=format) as container:
        picture: Any = container.add_stream(picture_codec, rate=fps)
        picture.height, picture.width = frames.shape[1:3]
        picture.pix_fmt = "yuv420p"
        track: Any = None
        if sound is not None:
            track = container.add_stream(sound_codec, rate=rate, layout="mono")
        for place, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = place, Fraction(1, fps)
            container.mux(picture.encode(frame))
        container.mux(picture.encode())
        if sound is not None:
            for part in _sound_frames(track, sound, rate, sound_begins):
                container.mux(track.encode(part))
            container.mux(track.encode())
    return buffer.getvalue()


def _sound_frames(
    track: Any, sound: NDArray[np.float32], rate: int, begins: float
) -> Sequence[av.AudioFrame]:
    frame = av.AudioFrame.from_ndarray(sound[None], format="fltp", layout="mono")
    frame.sample_rate, frame.time_base = rate, Fraction(1, rate)
    frame.pts = round(begins * rate)
    cut = av.AudioResampler(
        format=track.format, layout="mono", rate=rate, frame_size=track.frame_size or None
    )
    return [*cut.resample(frame), *cut.resample(None)]

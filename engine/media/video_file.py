"""Reads mp4, webm and AAC through PyAV: their properties, selected frames, and their sound.

One pass counts packets, one decodes the selected frames and those that they depend on, one decodes
the sound. So limits are checked before the work, and at most one frame of the file's own size is
held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine.interface.config import MediaLimits
from engine.media.media_source import MediaSource

if TYPE_CHECKING:
    from av.container import InputContainer

_VIDEO_CODECS = ("h264", "hevc", "mpeg4", "vp8", "vp9", "av1")
_AUDIO_CODECS = ("aac", "mp3", "opus", "vorbis", "flac", "alac")
_MAX_FPS = 1_000
_MAX_RATE = 96_000
_SETTINGS = "engine.media_limits"


@dataclass(frozen=True, slots=True)
class VideoInfo:
    """Properties of a video."""

    num_frames: int
    fps: float
    width: int
    height: int
    has_sound: bool


def probe_video(source: MediaSource, limits: MediaLimits) -> VideoInfo:
    """Read a video's properties without decoding it.

    Raises:
        ValueError: it is unreadable, of another kind, cut off, or beyond a limit.
    """
    with _open(source) as container:
        stream = _find_stream(source, container, "video", _VIDEO_CODECS)
        if stream is None:
            raise ValueError(f"{source.name} holds no moving picture")
        fps = float(stream.average_rate or 0)
        if not 0 < fps <= _MAX_FPS:
            raise ValueError(
                f"{source.name} states {fps:g} frames per second, and what is read has more than 0 "
                f"and at most {_MAX_FPS}"
            )
        width, height, stated = int(stream.width), int(stream.height), int(stream.frames)
        if min(width, height) < 1 or width * height > limits.max_image_pixels:
            raise ValueError(
                f"{source.name} has frames of {width} x {height} pixels, and what is read has 1 to "
                f"{limits.max_image_pixels}; scale it down, or raise {_SETTINGS}.max_image_pixels"
            )
        # The header may be wrong: packets are counted below, up to the limit.
        check_video_length(stated / fps, source, limits)
        num_frames = 0
        for packet in container.demux(stream):
            num_frames += bool(packet.size)
            check_video_length(num_frames / fps, source, limits)
        if not num_frames:
            raise ValueError(f"{source.name} is empty: it holds no frames")
        if num_frames < stated:
            raise ValueError(
                f"{source.name} is cut off: its header states {stated} frames, it holds "
                f"{num_frames}"
            )
        has_sound = bool(container.streams.audio)
    return VideoInfo(num_frames, fps, width, height, has_sound)


def check_video(source: MediaSource) -> None:
    """Read only the header of a video; ``ValueError`` if it cannot be read."""
    with _open(source) as container:
        _find_stream(source, container, "video", _VIDEO_CODECS)


def read_frames(
    source: MediaSource, info: VideoInfo, indices: Sequence[int], limits: MediaLimits
) -> Iterator[NDArray[np.uint8]]:
    """Decode selected frames one by one.

    Args:
        limits: limits the pixels of all selected frames together.

    Yields:
        ``(height, width, 3)`` red, green and blue, upright.

    Raises:
        ValueError: too many frames, or they cannot be decoded.
    """
    num_pixels = len(indices) * info.width * info.height
    if num_pixels > limits.max_video_pixels:
        raise ValueError(
            f"{source.name}: {len(indices)} frames of {info.width} x {info.height} pixels are "
            f"looked at, {num_pixels} together, and {limits.max_video_pixels} are the most; scale "
            f"it down, cut it, or raise {_SETTINGS}.max_video_pixels"
        )
    wanted, num_found = frozenset(indices), 0
    with _open(source) as container:
        for index, frame in enumerate(container.decode(video=0)):
            if index not in wanted:
                continue
            if (frame.width, frame.height) != (info.width, info.height):
                raise ValueError(
                    f"{source.name}: frame {index} has {frame.width} x {frame.height} pixels, and "
                    f"the video {info.width} x {info.height}"
                )
            pixels: Any = frame.to_ndarray(format="rgb24")
            yield upright(pixels, int(frame.rotation))
            num_found += 1
            if num_found == len(wanted):
                return
    raise ValueError(
        f"{source.name} is damaged: {num_found} of the {len(wanted)} frames that were looked for "
        "can be decoded"
    )


def upright(pixels: NDArray[np.uint8], degrees: int) -> NDArray[np.uint8]:
    """Rotate a frame upright: by quarter turns, counterclockwise."""
    return np.ascontiguousarray(np.rot90(pixels, degrees // 90))


def read_soundtrack(
    source: MediaSource, check_duration: Callable[[float], None]
) -> tuple[NDArray[np.float32], int] | None:
    """Decode the sound of a file, aligned to the first frame of a video; channels are averaged.

    Args:
        check_duration: raises ``ValueError`` for too many seconds; called while it is decoded.

    Returns:
        Mono samples ``(num_samples,)`` and their number per second; None without sound.

    Raises:
        ValueError: it cannot be decoded, or is beyond a limit.
    """
    import av

    with _open(source) as container:
        stream = _find_stream(source, container, "audio", _AUDIO_CODECS)
        if stream is None:
            return None
        rate = int(stream.rate)
        if not 0 < rate <= _MAX_RATE:
            raise ValueError(
                f"the sound of {source.name} has {rate} samples per second, and what is read has "
                f"at most {_MAX_RATE}; resample it"
            )
        to_floats = av.AudioResampler(format="fltp", layout=stream.layout, rate=rate)
        parts: list[NDArray[np.float32]] = []
        num_samples, begin = 0, 0.0
        for frame in container.decode(stream):
            if not parts:
                begin = float(frame.time or 0.0)
            for floats in to_floats.resample(frame):
                parts.append(floats.to_ndarray().mean(axis=0, dtype=np.float32))
                num_samples += len(parts[-1])
            check_duration(num_samples / rate)
        first: Any = next(iter(container.streams.video), None)
        if first is not None:
            begin -= float((first.start_time or 0) * first.time_base)
    if not parts:
        return None
    samples = np.concatenate(parts)
    if first is None:
        return samples, rate
    # Keep it in sync: sound that starts late follows silence, sound before the picture is cut.
    late = round(begin * rate)
    if late < 0:
        return samples[-late:], rate
    return np.concatenate([np.zeros(late, np.float32), samples]), rate


def stated_seconds(source: MediaSource) -> float | None:
    """Return a file's stated duration in seconds, or None; ``ValueError`` if unreadable."""
    with _open(source) as container:
        return None if container.duration is None else container.duration / 1_000_000


def check_video_length(seconds: float, source: MediaSource, limits: MediaLimits) -> None:
    """Refuse a video that is too long."""
    if seconds > limits.max_video_s:
        raise ValueError(
            f"{source.name} is longer than {limits.max_video_s:g} s, which are the most that are "
            f"read: cut it into shorter pieces, or raise {_SETTINGS}.max_video_s"
        )


def _find_stream(
    source: MediaSource, container: InputContainer, kind: str, codecs: Sequence[str]
) -> Any:
    """Return the first stream of a kind, or None."""
    streams = getattr(container.streams, kind)
    if not streams:
        return None
    context = streams[0].codec_context
    name = "unknown" if context is None else context.codec.canonical_name
    if name not in codecs:
        raise ValueError(
            f"the {kind} of {source.name} is {name}, and what is read is {', '.join(codecs)}; "
            "convert it"
        )
    return streams[0]


def kind_of(head: bytes) -> str | None:
    """Return ffmpeg's name of a file's format by its first 12 bytes; None for others.

    ffmpeg itself would try many more formats, including playlists.
    """
    if head[4:8] == b"ftyp":
        return "mov"
    if head[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    is_aac = len(head) > 1 and head[0] == 0xFF and head[1] & 0xF6 == 0xF0  # a frame of ADTS
    return "aac" if is_aac else None


@contextmanager
def _open(source: MediaSource) -> Iterator[InputContainer]:
    # Imported only for a video: other requests do not wait for it.
    import av

    with source.open() as file:
        head = file.read(12)
        file.seek(0)
        kind = kind_of(head)
        if kind is None:
            raise ValueError(
                f"{source.name} cannot be read: it is neither mp4 nor webm; convert it"
            )
        try:
            with av.open(file, "r", format=kind, metadata_errors="ignore") as container:
                yield container
        except (av.FFmpegError, EOFError, UnicodeError) as error:
            what = "a video" if source.kind == "video" else "sound"
            raise ValueError(f"{source.name} cannot be read as {what}: {error}") from error

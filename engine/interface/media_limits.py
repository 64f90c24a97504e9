"""How much of a picture, a sound or a video is read."""

from __future__ import annotations

from pydantic import Field

from engine.interface.settings import Settings

__all__ = ["MediaLimits"]

# One gibibyte of RGB, by three and by four: ``PIL.Image.MAX_IMAGE_PIXELS``.
_PILLOW_PIXELS = 2**30 // 4 // 3


class MediaLimits(Settings):
    """What media that requests show may take; the ``media_limits:`` block of ``engine:`` in YAML.

    Looked at before anything is decoded, as far as a file's header tells it. A model may take less:
    its window, its longest prompt, its encoder cache.

    Attributes:
        max_file_bytes: of a file, or of what stands in its place.
        max_audio_s: seconds of a sound. A log-mel spectrogram of the default takes about 0.75 GB
            while it is made.
        max_image_pixels: width times height of an image. Pillow itself takes images for bombs that
            have more than can be set.
        max_video_s: seconds of a video.
        max_video_pixels: of all frames of a video that are looked at, in the file's own size.
    """

    max_file_bytes: int = Field(default=256 * 2**20, ge=1)
    max_audio_s: float = Field(default=1200.0, gt=0.0, allow_inf_nan=False)
    max_image_pixels: int = Field(default=32 * 2**20, ge=1, le=_PILLOW_PIXELS)
    max_video_s: float = Field(default=600.0, gt=0.0, allow_inf_nan=False)
    max_video_pixels: int = Field(default=256 * 2**20, ge=1)

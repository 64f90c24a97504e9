"""Small pictures."""

from __future__ import annotations

from functools import cache

import numpy as np
from PIL import Image

PLACEHOLDER = {
    "llava": "<image>",
    "gemma3_vision": "<start_of_image>",
    "qwen2_5_vl": "<|image_pad|>",
    "qwen3_vl": "<|image_pad|>",
    "qwen3_5_vision": "<|image_pad|>",
}
# The first three need equally many placeholders in every family.
_SIZES = [(84, 56), (84, 56), (56, 84), (56, 28)]


@cache
def picture(number: int, size: tuple[int, int] | None = None) -> Image.Image:
    """Return a noise picture; 84 x 56 pixels are 6 placeholders for a seeded Qwen2.5-VL."""
    width, height = size or _SIZES[number % len(_SIZES)]
    noise = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)

"""Small pictures, and request streams that show them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from hypothesis import strategies as st
from PIL import Image

from engine import TokensPrompt
from tests.support.request_stream import Ask, Script, asks_of, streams_of

__all__ = ["PLACEHOLDER", "ImageAsk", "image_scripts", "picture"]

PLACEHOLDER = {"llava": "<image>", "qwen2_5_vl": "<|image_pad|>"}
# The first three take equally many placeholders in every family.
_SIZES = [(84, 56), (84, 56), (56, 84), (56, 28)]


@cache
def picture(number: int, size: tuple[int, int] | None = None) -> Image.Image:
    """A picture of noise; 84 x 56 pixels are 6 placeholders for a seeded Qwen2.5-VL."""
    width, height = size or _SIZES[number % len(_SIZES)]
    noise = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


@dataclass(frozen=True)
class ImageAsk(Ask):
    """A request of a stream that shows pictures among its tokens.

    Attributes:
        placeholder: the family's token.
        shown: before which of the family's tokens, which picture.
    """

    placeholder: int = 0
    shown: tuple[tuple[int, int], ...] = ()

    @property
    def prompt(self) -> TokensPrompt:
        text = super().prompt
        assert isinstance(text, TokensPrompt)
        ids = list(text.prompt_token_ids)
        places = sorted((min(place, self.length), number) for place, number in self.shown)
        for place, _ in reversed(places):
            ids.insert(place, self.placeholder)
        images = [picture(number) for _, number in places]
        return TokensPrompt(tuple(ids), {"image": images})


def image_scripts(placeholder: int, max_text: int) -> st.SearchStrategy[Script]:
    """Streams in which pictures return at the same and at other places, and others at theirs."""
    shown = st.lists(st.tuples(st.sampled_from([0, 2, 2, 9]), st.integers(0, 3)), max_size=2)
    asks = asks_of(ImageAsk, max_text, placeholder=st.just(placeholder), shown=shown.map(tuple))
    return streams_of(asks, max_size=24)

"""Request streams with pictures, sound and videos, and counters of a thinker's towers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from engine import LLMEngine, TokensPrompt, VideoFeatures
from engine.models.qwen2_5_omni.thinker import AudioTower
from engine.models.qwen2_5_vl.qwen2_5_vl import ImageTower
from engine.requests.encoder_input import Modality, MultiModalInput
from tests.support.pictures import picture
from tests.support.request_stream import BUDGETS, Ask, Script, asks_of, streams_of
from tests.support.thinker_reference import clip, tone

PLACEHOLDERS: dict[Modality, str] = {
    "image": "<|IMAGE|>",
    "audio": "<|AUDIO|>",
    "video": "<|VIDEO|>",
}


def _talkie(sound: NDArray[np.float32]) -> VideoFeatures:
    pixels = torch.randn(12, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(5))
    return VideoFeatures(pixels, (3, 2, 2), 1.0, sound)


# Six placeholders each, except for the last of every kind, and the video with its sound.
_SHOWN: dict[Modality, list[Any]] = {
    "image": [picture(0), picture(1), picture(3), picture(2)],
    "audio": [tone(0.25), tone(0.25, 2000.0), tone(0.1)],
    "video": [
        clip(0, grids=1),
        clip(1, grids=1),
        clip(2, grids=2),
        # The sound is also shown alone.
        _talkie(tone(0.25)),
        _talkie(tone(0.25, 2000.0)),
    ],
}
KINDS: tuple[Modality, ...] = tuple(PLACEHOLDERS)


def shows(engine: LLMEngine, *content: int | tuple[Modality, Any]) -> TokensPrompt:
    """Return token ids with items at their positions."""
    assert engine.tokenizer is not None
    vocabulary = engine.tokenizer.get_vocab()
    items: dict[str, list[Any]] = {}
    ids: list[int] = []
    for part in content:
        if isinstance(part, int):
            ids.append(part)
        else:
            ids.append(vocabulary[PLACEHOLDERS[part[0]]])
            items.setdefault(part[0], []).append(part[1])
    return TokensPrompt(tuple(ids), items)


class TowerRuns:
    """Counts the items of every run of a tower, by kind of tower."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.heard: list[int] = []
        self.seen: list[int] = []
        for tower, runs in ((AudioTower, self.heard), (ImageTower, self.seen)):
            self._count(monkeypatch, tower, runs)

    @staticmethod
    def _count(monkeypatch: pytest.MonkeyPatch, tower: type[Any], runs: list[int]) -> None:
        forward = tower.forward

        def counting(self: Any, inputs: Sequence[MultiModalInput]) -> list[Tensor]:
            runs.append(len(inputs))
            rows: list[Tensor] = forward(self, inputs)
            return rows

        monkeypatch.setattr(tower, "forward", counting)


@dataclass(frozen=True)
class ThinkerAsk(Ask):
    """A request of a stream with items among its tokens."""

    placeholders: tuple[int, ...] = ()
    kinds: tuple[Modality, ...] = ()
    shown: tuple[tuple[int, int, int], ...] = ()

    @property
    def prompt(self) -> TokensPrompt:
        text = super().prompt
        assert isinstance(text, TokensPrompt)
        # A model may generate codes, one of which has a placeholder's number.
        ids = [10 if each in self.placeholders else each for each in text.prompt_token_ids]
        places = sorted((min(place, self.length), kind, n) for place, kind, n in self.shown)
        for place, kind, _ in reversed(places):
            ids.insert(place, self.placeholders[kind])
        items: dict[str, list[Any]] = {}
        for _, kind, number in places:
            shown = _SHOWN[self.kinds[kind]]
            items.setdefault(self.kinds[kind], []).append(shown[number % len(shown)])
        return TokensPrompt(tuple(ids), items)


def thinker_scripts(
    kinds: tuple[Modality, ...],
    placeholders: tuple[int, ...],
    max_text: int,
    budgets: Sequence[int] = BUDGETS,
) -> st.SearchStrategy[Script]:
    """Draw streams in which items recur at the same and other positions, or swap them."""
    kind = st.integers(0, len(placeholders) - 1)
    item = st.tuples(st.sampled_from([0, 2, 2, 9]), kind, st.integers(0, 4))
    shown = st.lists(item, max_size=2).map(tuple)
    fixed = {"kinds": st.just(kinds), "placeholders": st.just(placeholders)}
    asks = asks_of(ThinkerAsk, max_text, shown=shown, **fixed)
    return streams_of(asks, max_size=24, budgets=budgets)

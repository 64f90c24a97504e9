"""Rows of a video and of its sound take turns as transformers has them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2_5OmniProcessor

from engine.inputs.multimodal_inputs import AudioInVideo
from engine.requests.encoder_input import MultiModalInput

WAY = AudioInVideo(begin_id=1, end_id=2, places_per_chunk=50)


def interleave(
    video_times: list[int], num_sound: int, offset: int = 7, way: AudioInVideo = WAY
) -> tuple[MultiModalInput, ...]:
    video = MultiModalInput("video", offset, len(video_times), b"v", {})
    sound = MultiModalInput("audio", offset, num_sound, b"s", {})
    return way.interleave(video, sound, (torch.tensor(video_times), torch.arange(num_sound)))


def theirs(times: list[int], places_per_chunk: int) -> list[tuple[int, int]]:
    cuts: list[tuple[int, int]] = Qwen2_5OmniProcessor.get_chunked_index(
        None, np.array(times), places_per_chunk
    )
    return cuts


@given(
    gaps=st.lists(st.integers(0, 130), max_size=20),
    num_sound=st.integers(1, 60),
    places_per_chunk=st.integers(1, 60),
)
def test_pieces_are_transformers_chunks_in_turns(
    gaps: list[int], num_sound: int, places_per_chunk: int
) -> None:
    times = [0, *np.cumsum(gaps, dtype=int).tolist()]
    pieces = interleave(times, num_sound, way=AudioInVideo(1, 2, places_per_chunk))
    for modality, rows in (("video", times), ("audio", list(range(num_sound)))):
        ours = [
            (piece.rows_before, piece.rows_before + piece.length)
            for piece in pieces
            if piece.modality == modality
        ]
        assert ours == theirs(rows, places_per_chunk)
        assert {piece.num_rows for piece in pieces if piece.modality == modality} == {len(rows)}
    turns = "".join(piece.modality[0] for piece in pieces)
    seen, heard = turns.count("v"), turns.count("a")
    both = min(seen, heard)
    assert turns == "va" * both + "v" * (seen - both) + "a" * (heard - both)


@given(
    gaps=st.lists(st.integers(0, 130), max_size=20),
    num_sound=st.integers(1, 120),
    offset=st.integers(0, 9),
)
def test_pieces_lie_side_by_side_between_their_marks(
    gaps: list[int], num_sound: int, offset: int
) -> None:
    times = [0, *np.cumsum(gaps, dtype=int).tolist()]
    pieces = interleave(times, num_sound, offset)
    assert [piece.offset for piece in pieces] == [offset + 1, *(piece.end for piece in pieces[:-1])]
    (whole,) = {piece.span for piece in pieces}
    assert (whole.offset, whole.end) == (offset, pieces[-1].end + 1)
    assert whole.length == len(times) + num_sound + 2


def test_either_half_tells_wholes_apart() -> None:
    def span(video: bytes, sound: bytes) -> bytes:
        rows = torch.zeros(1)
        items = [MultiModalInput("video", 0, 1, content, {}) for content in (video, sound)]
        return WAY.interleave(items[0], items[1], (rows, rows))[0].span.content_hash

    one, two = bytes(32), bytes([1] * 32)
    assert len({span(one, one), span(one, two), span(two, one), span(two, two)}) == 4


def test_a_chunk_without_a_place_is_refused() -> None:
    with pytest.raises(ValueError, match="must have a place, got 0"):
        AudioInVideo(1, 2, 0)

"""Cuts a transcription into what is said between two times, over all windows of a recording."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

if TYPE_CHECKING:
    from engine import WindowStart

__all__ = ["TIMESTAMP", "TranscriptionSegment", "segments_of"]

TIMESTAMP = re.compile(r"<\|\d+\.\d\d\|>")
"""How tokenizers that know Whisper's timestamps write them."""

_TIMESTAMP_S = 0.02


class TranscriptionSegment(Struct, kw_only=True):
    """What is said from one time to another, in seconds of the recording.

    ``seek`` is where the window begins that it was heard in, in hundredths of a second.
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]


def segments_of(
    token_ids: Sequence[int],
    windows: Sequence[WindowStart],
    duration_s: float | None,
    tokenizer: Any,
) -> list[TranscriptionSegment]:
    """Cut a transcription at its timestamps; text that no timestamp ends goes to its window's end.

    Args:
        token_ids: of all windows, one after the other.
        windows: where each begins; none for a recording that takes one.
        duration_s: of the recording; None if it is not known.
        tokenizer: the model's.
    """
    starts = [(each.first_token, each.begin_s) for each in windows] or [(0, 0.0)]
    found: list[TranscriptionSegment] = []
    ends = [*starts[1:], (len(token_ids), duration_s)]
    for (first, begin), (last, end) in zip(starts, ends, strict=True):
        for start, stop, ids in _between(token_ids[first:last], begin, end, tokenizer):
            text = str(tokenizer.decode(ids, skip_special_tokens=True))
            found.append(
                TranscriptionSegment(
                    id=len(found), seek=round(begin * 100), start=start, end=stop, text=text,
                    tokens=ids,
                )
            )  # fmt: skip
    return found


def _between(
    token_ids: Sequence[int], begin: float, end: float | None, tokenizer: Any
) -> Iterator[tuple[float, float, list[int]]]:
    """Every run of tokens that say something, with the times before and after it.

    All ids above that of ``<|notimestamps|>`` are times. Many tokenizers have no text for them.
    """
    start = begin
    ids: list[int] = []
    first_time = tokenizer.get_added_vocab().get("<|notimestamps|>", sys.maxsize) + 1
    special = set(tokenizer.all_special_ids)
    for token_id in token_ids:
        if token_id < first_time:
            ids += [] if token_id in special else [token_id]
            continue
        now = round(begin + (token_id - first_time) * _TIMESTAMP_S, 2)
        if ids:
            yield start, now, ids
        start, ids = now, []
    if ids:
        yield start, max(start, end if end is not None else start), ids

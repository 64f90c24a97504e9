"""A video in step with its own sound: rows of both in the order in which they are seen and heard.

::

    prompt      | a | <video> |  z  |
    expanded    | a | begin | v v v | ~ ~ ~ | v v v | ~ ~ ~ | ~ ~ | end | z |
    seconds             |<--- 0 to 2 -->|<--- 2 to 4 -->| 4 to

Each chunk of two seconds has the rows of the video (v) that are shown in it, then those of the
sound (~) that are heard in it. So the two items come in pieces, and each tower still runs once.

Source: Xu et al., arXiv:2503.20215, section 2.2, and its processor in transformers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from torch import Tensor

from engine.requests.multimodal_input import MultiModalInput
from prefix_cache import ContentSpan

__all__ = ["AudioInVideo"]


@dataclass(frozen=True, slots=True)
class AudioInVideo:
    """How a model takes a video with its sound.

    Attributes:
        begin_id: token before the two.
        end_id: token after them.
        places_per_chunk: how far in time, in the places of rows, a chunk reaches.
    """

    begin_id: int
    end_id: int
    places_per_chunk: int

    def __post_init__(self) -> None:
        if self.places_per_chunk < 1:
            raise ValueError(
                f"a chunk of video and sound must have a place, got {self.places_per_chunk}"
            )

    def interleave(
        self, video: MultiModalInput, sound: MultiModalInput, times: tuple[Tensor, Tensor]
    ) -> tuple[MultiModalInput, ...]:
        """Cut a video and its sound in pieces, in the order of their places.

        Args:
            video: the whole video, at the position of its placeholder.
            sound: the whole sound.
            times: of each one's rows, in places from its beginning, never falling. They are the
                model's own, so that a row is in the chunk that its place tells. (At a few odd
                frame rates, such as 2/49 s to a grid, transformers' processor rounds otherwise
                than its model, and a grid on the border of two chunks goes into the other.)

        Returns:
            The pieces, from the position after that of :attr:`begin_id` on without a gap.
        """
        # All of it keys each of its blocks: where a row lies depends on how both are cut.
        digest = hashlib.sha256(video.content_hash + sound.content_hash).digest()
        length = video.length + sound.length + 2
        whole = ContentSpan("video with sound", video.offset, length, digest)
        offset = video.offset + 1
        pieces: list[MultiModalInput] = []
        chunks = (self._chunks(rows) for rows in times)
        for chunk in zip_longest(*chunks):
            for item, rows in zip((video, sound), chunk, strict=True):
                if rows is not None:
                    pieces.append(item.piece(rows, offset, whole))
                    offset += pieces[-1].length
        return tuple(pieces)

    def _chunks(self, times: Tensor) -> Iterator[range]:
        """Rows of one chunk after the other, as transformers cuts them.

        A row that comes late by several chunks begins only the next one.
        """
        first, limit = 0, self.places_per_chunk
        for row, time in enumerate(times.tolist()):
            if time >= limit:
                yield range(first, row)
                first = row
                limit += self.places_per_chunk
        yield range(first, len(times))

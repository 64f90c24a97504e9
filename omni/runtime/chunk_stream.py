"""What flows over a streamed edge: one request's chunks, cut from what its source has made."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine import Prompt
from engine.interface.deferred import items_from, num_items, with_fields
from stages import Stage, StageOutput

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Chunk", "ChunkStream"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a source's output.

    Attributes:
        output: the source's, with the ``token_ids`` and the rows of ``tensors`` that are new.
        first_row: place of the first of these rows in the source's sequence.
    """

    output: StageOutput
    first_row: int


@dataclass(slots=True)
class ChunkStream:
    """One request on one streamed edge.

    A chunk is due when the source has generated ``chunk_size`` tokens since the one before, or is
    done. It holds all that is new. The newest token's forward pass is still to come, so that rows
    lag by one, and the last token of all never has one. With a prompt of 3 tokens and a
    ``chunk_size`` of 2::

        sequence      p0 p1 p2 t0 t1 t2 t3 t4
        row           r0 r1 r2 r3 r4 r5 r6  -

        after t1     |r0 r1 r2 r3|                t0 t1    next_token = 2, next_row = 4
        after t3                 |r4 r5|          t2 t3    next_token = 4, next_row = 6
        t4, done                       |r6|       t4

    Tokens and rows of a chunk fit together, so a source that cannot hand out the rows at that
    moment, such as one that has just given its blocks back, makes the chunk wait for its next
    output; nothing is lost or handed on twice.

    Attributes:
        source: the stage that the chunks come from.
        consumer: the stage that takes them.
        chunk_size: tokens after which the next chunk is due.
        max_pending: chunks that may wait; see :attr:`is_full`.
        next_token: how many generated tokens have been handed on.
        next_row: how many rows have.
        pending: prompts made of the chunks that the consumer has yet to take.
        is_open: whether the consumer takes any more.
    """

    source: Stage
    consumer: Stage
    chunk_size: int
    max_pending: int
    next_token: int = 0
    next_row: int = 0
    pending: deque[Prompt] = field(default_factory=deque)
    is_open: bool = True

    @property
    def is_full(self) -> bool:
        """Whether no more chunks should come for now."""
        return len(self.pending) >= self.max_pending

    def close(self) -> None:
        """Drop what is pending and take no more: the consumer is done."""
        self.is_open = False
        self.pending.clear()

    def cut(self, output: StageOutput) -> Chunk | None:
        """Take the next chunk off what the source has made so far; None if none is due.

        Args:
            output: the newest of the source.

        Raises:
            Exception: whatever the source raises when it is asked for its rows.
        """
        if not self.is_open:
            return None
        if output.finished:
            tensors = {name: rows[self.next_row :] for name, rows in output.tensors.items()}
            return self._take(output, tensors)
        num_tokens = num_items(output, "token_ids")
        if num_tokens - self.next_token < self.chunk_size:
            return None
        num_rows = output.num_prompt_tokens + num_tokens - 1 - self.next_row
        rows = self._partial_tensors(output.request_id, num_rows)
        return None if rows is None else self._take(output, rows)

    def _partial_tensors(self, request_id: str, num_rows: int) -> Mapping[str, Tensor] | None:
        """The next rows of a live request; None if the source does not have them now."""
        if self.source.outputs == ():
            return {}
        tensors = self.source.partial_tensors(request_id, self.next_row)
        if not tensors or any(rows.shape[0] < num_rows for rows in tensors.values()):
            return None
        return {name: rows[:num_rows] for name, rows in tensors.items()}

    def _take(self, output: StageOutput, tensors: Mapping[str, Tensor]) -> Chunk:
        first_row = self.next_row
        token_ids = items_from(output, "token_ids", self.next_token)
        self.next_token += len(token_ids)
        self.next_row += max((rows.shape[0] for rows in tensors.values()), default=0)
        return Chunk(with_fields(output, token_ids=token_ids, tensors=tensors), first_row)

"""State of one request in one stage, and division of its output into chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from engine import Prompt
from engine.interface.outputs import OutputDelta
from stages.stage import Stage, StageRequest
from stages.stage_output import OutputAccumulator, StageOutput
from stages.worker.messages import Chunk, Enter, StreamedEdge, StreamPlace

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class ChunkCutter:
    """One request on one streamed edge, in the source's worker.

    A chunk is due when the source has generated ``chunk_size`` tokens since the previous one, or is
    done. It holds everything new. The newest token's forward pass is still to come, so rows lag by
    one, and the last token of all has none. Rows that are sampled together with a token do not lag;
    then only a token that ends the output has no row. With a prompt of 3 tokens and a
    ``chunk_size`` of 2::

        sequence      p0 p1 p2 t0 t1 t2 t3 t4
        row           r0 r1 r2 r3 r4 r5 r6  -

        after t1     |r0 r1 r2 r3|                t0 t1    next_token = 2, next_row = 4
        after t3                 |r4 r5|          t2 t3    next_token = 4, next_row = 6
        t4, done                       |r6|       t4

    Tokens and rows of a chunk belong together. If the source cannot provide the rows at that
    moment, for example because it has just freed its blocks, the chunk waits for the next output;
    nothing is lost or sent twice.

    Attributes:
        place: progress of the request on the edge.
    """

    source: Stage
    edge: StreamedEdge
    place: StreamPlace

    @property
    def is_full(self) -> bool:
        """True if the consumer has no room for more chunks at present."""
        return self.place.is_open and self.place.outstanding >= self.edge.max_pending

    def cut(self, delta: OutputDelta, so_far: OutputAccumulator) -> Chunk | None:
        """Cut the next chunk off the source's output up to its newest delta, if one is due.

        Raises:
            Exception: whatever the source raises when its rows are read.
        """
        if not self.place.is_open or delta.failure is not None:
            return None
        if delta.finished:
            tensors = {name: rows[self.place.next_row :] for name, rows in delta.tensors.items()}
            return self._take(so_far.output(), tensors)
        num_tokens = len(so_far.token_ids)
        if num_tokens - self.place.next_token < self.edge.chunk_size:
            return None
        num_rows = delta.num_prompt_tokens + num_tokens - self.place.next_row
        rows = self._partial_tensors(delta.request_id, num_rows)
        return None if rows is None else self._take(so_far.output(), rows)

    def _partial_tensors(self, request_id: str, num_rows: int) -> Mapping[str, Tensor] | None:
        """Return the next ``num_rows`` rows, or one less; None if the source lacks them now."""
        if self.source.outputs == ():
            return {}
        tensors = self.source.partial_tensors(request_id, self.place.next_row)
        if not tensors or any(rows.shape[0] < num_rows - 1 for rows in tensors.values()):
            return None
        return {name: rows[:num_rows] for name, rows in tensors.items()}

    def _take(self, output: StageOutput, tensors: Mapping[str, Tensor]) -> Chunk:
        first_row = self.place.next_row
        token_ids = output.token_ids[self.place.next_token :]
        num_rows = max((rows.shape[0] for rows in tensors.values()), default=0)
        self.place = self.place.after(len(token_ids), num_rows)
        piece = replace(output, token_ids=token_ids, tensors=tensors)
        return Chunk(self.edge.consumer, piece, first_row)


@dataclass(slots=True, eq=False)
class RequestState:
    """One request in one stage. ::

        entered ──► prepared ──► inside ──► paused, resumed ──► out

    Attributes:
        cutters: chunk cutter of every outgoing streamed edge, by consumer.
        request: the request passed to the stage; None before its prompt is made.
        pending: prompts made of chunks that the stage has yet to consume.
        so_far: accumulated output, if chunks are cut from it or it is not shown to the user; else
            None.
        has_emitted: true if any output of it was emitted.
        was_restarted: true if it was restarted after the stage broke.
        has_cut: true if a chunk was cut since the last decision about pausing it.
        is_paused: true if it is paused, because a consumer does not keep up.
        last: previous output, of a stage whose outputs are cumulative.
    """

    request_id: str
    enter: Enter
    cutters: Mapping[str, ChunkCutter]
    request: StageRequest | None = None
    is_inside: bool = False
    is_streamed: bool = False
    pending: deque[Prompt] = field(default_factory=deque)
    so_far: OutputAccumulator | None = None
    has_emitted: bool = False
    was_restarted: bool = False
    has_cut: bool = False
    is_paused: bool = False
    last: StageOutput | None = None

    def begin_output(self, stage: str) -> None:
        """Reset the accumulated output, if any."""
        self.last = None
        if self.so_far is not None:
            self.so_far = OutputAccumulator(self.request_id, stage)

    @property
    def is_held_up(self) -> bool:
        """True if its next chunks should wait."""
        return any(cutter.is_full for cutter in self.cutters.values())

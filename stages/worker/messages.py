"""Commands to a stage's worker, and events from it.

Commands go from the orchestrator to a worker, events come back. They hold live objects; for a
worker in another process they are encoded, with tensors in shared memory or an object store::

    orchestrator ── Enter, Extend, Credit, Lift, Abort ──► worker
    orchestrator ◄── Output, Ack, Failed ─────────────── worker
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import msgspec

from engine import SamplingParams
from engine.interface.hints import AnyPrompt
from engine.interface.outputs import OutputDelta
from stages.stage_output import StageOutput


@dataclass(frozen=True, slots=True)
class StreamedEdge:
    """An edge with a ``chunk_size``, from the view of its source's worker.

    Attributes:
        chunk_size: generated tokens per chunk.
        max_pending: number of unconsumed chunks at which the request is paused.
    """

    consumer: str
    chunk_size: int
    max_pending: int


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """Progress of a request on one streamed edge.

    Attributes:
        next_token: number of generated tokens sent so far.
        next_row: number of rows sent so far.
        outstanding: chunks that the consumer has not consumed yet.
    """

    next_token: int = 0
    next_row: int = 0
    outstanding: int = 0
    is_open: bool = True

    def after(self, num_tokens: int, num_rows: int) -> StreamPlace:
        """Return the place after one more chunk."""
        return replace(
            self,
            next_token=self.next_token + num_tokens,
            next_row=self.next_row + num_rows,
            outstanding=self.outstanding + 1,
        )

    def answered(self, credit: Credit) -> StreamPlace:
        """Return the place after the consumer has consumed a chunk, or closed the stream."""
        if credit.closes:
            return replace(self, is_open=False)
        return replace(self, outstanding=max(0, self.outstanding - 1))


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a source's output, sent over a streamed edge.

    Attributes:
        output: the source's output, with only the new ``token_ids`` and rows of ``tensors``.
        first_row: position of the first of these rows in the source's sequence.
    """

    consumer: str
    output: StageOutput
    first_row: int


class Enter(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Start a request in a stage. Events about it carry its ``ticket``.

    Attributes:
        ticket: identifies this request in this stage, unique even among requests of the same id.
        sources: inputs of the stage's transform, which makes the prompt: the finished outputs of
            the stages that feed it, or the first chunk of a streamed edge; ``()`` for a root,
            which gets the user's prompt.
        first_row: ``first_row`` of the first chunk; else 0.
        streams: start of its streamed edges, by consumer, if not the beginning.
        wants_tensors: true if the finished output needs its tensors; chunks always have theirs.
    """

    ticket: int
    request_id: str
    prompt: AnyPrompt
    sources: tuple[StageOutput, ...] = ()
    first_row: int = 0
    sampling: SamplingParams | None = None
    priority: int = 0
    cache_salt: str | None = None
    speaker: str | None = None
    streams: Mapping[str, StreamPlace] = {}
    wants_tensors: bool = True


class Extend(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Pass the next chunk of a request that the stage has."""

    request_id: str
    source: StageOutput
    first_row: int


class Credit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Report that a consumer has consumed a chunk of a request that this stage has.

    Attributes:
        closes: true if it accepts no more chunks instead.
    """

    request_id: str
    consumer: str
    closes: bool = False


class Lift(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Resume a paused request until its next chunk, because the pipeline is stalled."""

    request_id: str


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Drop a request; no event about it follows."""

    request_id: str


Command: TypeAlias = Enter | Extend | Credit | Lift | Abort


class Output(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """New output of a stage. If the delta is finished, the request has left the stage.

    A stage whose output is not shown to the user emits a single delta at the end.

    Attributes:
        delta: new output; None if there are only chunks.
        chunks: new chunks on its streamed edges.
    """

    ticket: int
    delta: OutputDelta | None
    chunks: tuple[Chunk, ...] = ()


class Ack(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A stage has consumed a chunk."""

    ticket: int


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Failure of a request, which has left the stage.

    Attributes:
        error: the reason, with the stage's name.
        has_begun: true if the stage had accepted it.
        refused: true if the request itself is invalid, for the client to fix.
        is_stages: true if the stage failed as a whole, so that a retry may succeed.
    """

    ticket: int
    error: str
    has_begun: bool = True
    refused: bool = False
    is_stages: bool = False


Event: TypeAlias = Output | Ack | Failed

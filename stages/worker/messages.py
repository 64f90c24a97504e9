"""Commands to a stage's worker, and events from it.

Commands go from the orchestrator to a worker, events come back. They hold live objects; a worker in
another process gets them encoded, tensors apart::

    orchestrator ── Enter, Extend, Credit, CloseStream, Lift, Abort ──► worker
    orchestrator ◄── Output, Ack, Failed ──────────────────────────── worker
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
    """An edge with a ``chunk_size``, as its source's worker knows it.

    Attributes:
        chunk_size: generated tokens after which the next chunk is due.
        max_pending: chunks that the consumer may not have taken yet before a request is paused.
    """

    consumer: str
    chunk_size: int
    max_pending: int


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """How much of a request has gone over one streamed edge.

    Attributes:
        next_token: generated tokens that were handed on.
        next_row: rows that were.
        outstanding: chunks that the consumer has not taken yet.
    """

    next_token: int = 0
    next_row: int = 0
    outstanding: int = 0
    is_open: bool = True

    def after(self, num_tokens: int, num_rows: int) -> StreamPlace:
        """The place behind one more chunk."""
        return replace(
            self,
            next_token=self.next_token + num_tokens,
            next_row=self.next_row + num_rows,
            outstanding=self.outstanding + 1,
        )

    def answered(self, command: Credit | CloseStream) -> StreamPlace:
        """The same when the consumer has taken a chunk, or takes no more."""
        if isinstance(command, CloseStream):
            return replace(self, is_open=False)
        return replace(self, outstanding=max(0, self.outstanding - 1))


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a source's output, on its way over a streamed edge.

    Attributes:
        output: the source's, with the ``token_ids`` and the rows of ``tensors`` that are new.
        first_row: place of the first of these rows in the source's sequence.
    """

    consumer: str
    output: StageOutput
    first_row: int


class Enter(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request comes to a stage. Events about it carry its ``ticket``.

    Attributes:
        ticket: marks this request in this stage, unlike any other one, of the same id as well.
        sources: what the stage's transform makes its prompt of: the finished outputs of the stages
            that feed it, or the first chunk over a streamed edge; ``()`` for a root, which gets
            the user's prompt.
        first_row: of the first chunk; else 0.
        streams: by consumer, where its streamed edges begin, if not at the beginning.
        wants_tensors: whether the finished output is to have its tensors; chunks have theirs.
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
    """The next chunk of a request that the stage has."""

    request_id: str
    source: StageOutput
    first_row: int


class Credit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A consumer has taken a chunk of a request that this stage has."""

    request_id: str
    consumer: str


class CloseStream(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A consumer takes no more chunks of a request that this stage has."""

    request_id: str
    consumer: str


class Lift(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Let a paused request go on until it has made a chunk: the pipeline stands still."""

    request_id: str


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Drop a request; no event about it follows."""

    request_id: str


Command: TypeAlias = Enter | Extend | Credit | CloseStream | Lift | Abort


class Output(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A stage put something out. If the delta is finished, the stage has the request no more.

    Of a stage of which the user gets nothing, there is one delta in the end.

    Attributes:
        delta: what is new; None if only the chunks are.
        chunks: what is due on its streamed edges.
    """

    ticket: int
    delta: OutputDelta | None
    chunks: tuple[Chunk, ...] = ()


class Ack(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A stage has taken a chunk."""

    ticket: int


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request cannot go on; the stage has it no more.

    Attributes:
        error: why, with the stage's name.
        has_begun: whether the stage had let it in.
        refused: whether it could not run as it was asked for: it is the client's to fix.
        is_stages: whether the stage failed as a whole, so that another run may come through.
    """

    ticket: int
    error: str
    has_begun: bool = True
    refused: bool = False
    is_stages: bool = False


Event: TypeAlias = Output | Ack | Failed

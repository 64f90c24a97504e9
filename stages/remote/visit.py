"""A request in a worker that may die under it, and what is needed to begin again elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from engine.interface.deferred import num_items, with_fields
from stages.remote.control import Grown
from stages.remote.growing_output import GrowingOutput
from stages.remote.segments import SharedTensors
from stages.stage import StageOutput
from stages.worker.messages import Chunk, Enter, Extend, Moved, StreamedEdge, StreamPlace

__all__ = ["ContradictionError", "Visit"]


class ContradictionError(Exception):
    """A second run did not say what the first one had said."""


@dataclass(slots=True, eq=False)
class Visit:
    """One request's stay in a stage, through all the workers that have it one after another. ::

        first run    a b c d ✗            the worker died; a b c were told, c was cut into a chunk
        second run           a b c | d e  what was told is not told again, and chunks go on after c

    What it says depends on its prompt, its parameters and its seed alone, so that a second run says
    the same.

    Attributes:
        enter: as the orchestrator sent it.
        ticket: of the present run, in the worker's words.
        extends: the chunks that came after the first one.
        places: by consumer, how far its streamed edges have come.
        told: what the orchestrator knows of it.
        again: what the present run has said, as long as that is nothing new; None if it is.
        num_took: chunks that the orchestrator knows to be taken.
        num_taken_again: chunks that the present run has taken.
        num_runs: that were begun.
        replica: which worker has it, or gets it when it is up.
        is_sent: whether that was told of the present run.
    """

    enter: Enter
    ticket: int
    extends: list[Extend] = field(default_factory=list)
    places: dict[str, StreamPlace] = field(default_factory=dict)
    told: GrowingOutput = field(default_factory=GrowingOutput)
    again: GrowingOutput | None = None
    num_took: int = 0
    num_taken_again: int = 0
    num_runs: int = 1
    replica: int = 0
    is_sent: bool = False

    @classmethod
    def of(cls, enter: Enter, ticket: int, edges: tuple[StreamedEdge, ...]) -> Visit:
        """A first run."""
        places = {edge.consumer: StreamPlace() for edge in edges} | dict(enter.streams)
        return cls(enter, ticket, places=places)

    def begin_again(self, ticket: int) -> None:
        """Another run begins, in a worker that knows nothing of it."""
        self.ticket = ticket
        self.again = GrowingOutput()
        self.num_taken_again = 0
        self.num_runs += 1
        self.is_sent = False

    def entry(self) -> Enter:
        """What the present run begins by."""
        return replace(self.enter, ticket=self.ticket, streams=dict(self.places))

    def credit(self, consumer: str) -> None:
        """A consumer has taken a chunk."""
        place = self.places[consumer]
        self.places[consumer] = replace(place, outstanding=max(0, place.outstanding - 1))

    def close_stream(self, consumer: str) -> None:
        """A consumer takes no more chunks."""
        self.places[consumer] = replace(self.places[consumer], is_open=False)

    def take(self) -> bool:
        """The present run has taken a chunk; whether that is news."""
        self.num_taken_again += 1
        if self.num_taken_again <= self.num_took:
            return False
        self.num_took = self.num_taken_again
        return True

    def hear(self, event: Moved | Grown) -> Moved | None:
        """What is new in what the present run says; None if nothing is.

        Raises:
            ContradictionError: it says something else than the run before.
        """
        for chunk in event.chunks:
            self._note(chunk)
        output = self._whole(event)
        if output is None and not event.chunks:
            return None
        return Moved(self.enter.ticket, output, event.chunks)

    def _whole(self, event: Moved | Grown) -> StageOutput | None:
        assert event.output is not None, "what a stage tells has an output"
        if self.again is None:
            if isinstance(event, Grown):
                return self.told.grow(event)
            return event.output
        sound_start = self.again.num_samples
        if isinstance(event, Moved):
            # Of the whole sound, not of its last piece alone.
            output, sound_start = with_fields(event.output, audio_delta=event.output.audio), 0
            if event.output.failure is not None:
                return event.output
        else:
            output = self.again.grow(event)
            if self.again.is_behind(self.told):
                return None
        if self.told.contradicts(output):
            raise ContradictionError
        output = self.told.news_since(output, sound_start)
        self.told, self.again = self.again, None
        return output

    def _note(self, chunk: Chunk) -> None:
        place = self.places[chunk.consumer]
        self.places[chunk.consumer] = replace(
            place,
            next_token=place.next_token + num_items(chunk.output, "token_ids"),
            next_row=place.next_row + _num_rows(chunk.output.tensors),
            outstanding=place.outstanding + 1,
        )


def _num_rows(tensors: Mapping[str, object]) -> int:
    """Rows of the longest tensor, none of which is mapped for it."""
    entries = tensors.entries if isinstance(tensors, SharedTensors) else tensors
    shapes = [entry.shape for entry in entries.values()]  # type: ignore[attr-defined]
    return max((shape[0] for shape in shapes), default=0)

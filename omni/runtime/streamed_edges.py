"""Hands chunks on over a pipeline's streamed edges, and holds up sources that are too fast."""

from __future__ import annotations

from collections.abc import Iterable

from omni.runtime.chunk_stream import ChunkStream
from omni.runtime.guarded_stages import GuardedStages, blamed_on
from omni.runtime.live_request import LiveRequest
from stages import Stage, StageOutput

__all__ = ["StreamedEdges"]


class StreamedEdges:
    """What moves over the edges that have a ``chunk_size``.

    A request whose chunks are not taken as fast as they come is paused in the stage that makes
    them. Stages have few seats, so paused requests can stand in the way of those that could go on:
    when a turn finds no stage with anything to do, the oldest request's pause is lifted, for one
    chunk above the bound.

    Args:
        guarded: the pipeline's stages.

    Attributes:
        has_moved: whether anything came out of a stage, or was taken by one, in this turn.
    """

    def __init__(self, guarded: GuardedStages) -> None:
        self._guarded = guarded
        self._stages = guarded.pipeline.stages
        self.has_moved = False
        self._idle_at: int | None = None

    def streams(self) -> dict[str, ChunkStream]:
        """A request's chunks on every streamed edge, of which there are none yet."""
        return {
            name: ChunkStream(
                self._stages[stage.inputs.sources[0]],
                stage,
                stage.inputs.chunk_size,
                stage.inputs.max_pending_chunks,
            )
            for name, stage in self._stages.items()
            if stage.inputs is not None and stage.inputs.chunk_size is not None
        }

    def hand_on(self, live: LiveRequest, source: Stage, output: StageOutput) -> None:
        """Hand on what is due on the edges that leave a stage; pause it if they are full.

        Raises:
            ValueError: the source, a transform or a consumer refused.
        """
        has_cut = False
        for stream in live.streams_from(source.name):
            with blamed_on(source, live):
                chunk = stream.cut(output)
            if chunk is None:
                continue
            has_cut = True
            sources = (chunk.output,)
            stream.pending.append(
                self._guarded.prompt(live, stream.consumer, sources, first_row=chunk.first_row)
            )
            self._deliver(live, stream)
        # Only after a cut: a request whose pause was lifted goes on until it has made a chunk.
        if has_cut and not output.finished and live.is_held_up(source.name):
            with blamed_on(source, live):
                source.pause_request(live.request_id)
            live.paused.add(source.name)

    def feed(self, stage: Stage) -> dict[str, str]:
        """Hand a stage the chunks that its requests wait for.

        Returns:
            ``request_id -> error`` of those that it refused.
        """
        refused: dict[str, str] = {}
        for live in list(self._guarded.inside[stage.name].values()):
            stream = live.streams.get(stage.name)
            if stream is None or not stream.pending:
                continue
            try:
                self._deliver(live, stream)
            except ValueError as error:
                refused[live.request_id] = str(error)
        return refused

    def leave(self, live: LiveRequest, stage: Stage) -> None:
        """A stage is done with a request: it rests there no more and takes no more chunks."""
        live.paused.discard(stage.name)
        stream = live.streams.get(stage.name)
        if stream is not None:
            stream.close()
            self._resume_if_drained(live, stream.source)

    def give_way(self, oldest_first: Iterable[LiveRequest]) -> None:
        """Lift the oldest request's pause if the pipeline would stand still otherwise.

        A turn without an output need not mean that: a long prompt takes several steps, and a
        vocoder many to one piece of sound. Stages count the steps in which they had work.
        """
        paused = (
            (live, self._stages[name])
            for live in oldest_first
            for name in reversed(self._guarded.pipeline.order)
            if name in live.paused
        )
        if self.has_moved or (first := next(paused, None)) is None:
            self._idle_at = None
            return
        num_steps = sum(stage.stats().num_steps for stage in self._stages.values())
        if num_steps != self._idle_at:
            self._idle_at = num_steps
            return
        self._idle_at = None
        self._guarded.resume(*first)

    def _deliver(self, live: LiveRequest, stream: ChunkStream) -> None:
        """Hand a consumer the chunks that it can use now.

        Raises:
            ValueError: the consumer refused.
        """
        stage = stream.consumer
        while stream.pending:
            if stage.name in live.waiting:
                self._guarded.enter(live, stage, stream.pending.popleft())
            else:
                with blamed_on(stage, live):
                    if not stage.needs_input(live.request_id):
                        break
                    stage.extend_request(live.request_id, stream.pending.popleft())
            self.has_moved = True
        self._resume_if_drained(live, stream.source)

    def _resume_if_drained(self, live: LiveRequest, source: Stage) -> None:
        if source.name in live.paused and not live.is_held_up(source.name):
            self._guarded.resume(live, source)

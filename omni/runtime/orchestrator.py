"""Moves requests over a pipeline's stages, by turns, in one thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine import CodecPrompt, FinishReason, Prompt, SpeechPrompt
from omni.pipelines.pipeline import Pipeline
from omni.requests.request import OmniOutput, OmniRequest
from omni.runtime.chunk_stream import ChunkStream
from omni.runtime.live_request import LiveRequest
from omni.runtime.request_sampling import request_sampling
from stages import Stage, StageOutput, StageRequest, TransformContext

__all__ = ["Orchestrator"]

_logger = logging.getLogger(__name__)


class Orchestrator:
    """Runs requests over a pipeline.

    A turn (:meth:`step`) lets every stage that has requests do one unit of work, the last stages
    first, so that what is nearly done leaves before more comes in. A request enters a stage as
    soon as all the stages that feed it are done with it. With stages ``a -> b`` and requests 1, 2::

        turn     1    2    3    4    5
        a       1 2  1 2   2
        b                 1    1 2  2      request 1 left a in turn 2, request 2 in turn 3

    On an edge with a ``chunk_size`` it enters with the first chunk and gets the others when it
    has used up what it had. A request whose chunks are not taken as fast as they come is paused
    in the stage that makes them. Stages have few seats, so paused requests can stand in the way of
    those that could go on: when a turn finds no stage with anything to do, the oldest request's
    pause is lifted, for one chunk above the bound.

    Whatever goes wrong with one request ends that request alone, and frees what it held in all
    stages. Not safe to call from several threads at once.

    Args:
        pipeline: the stages; they must be idle.
        on_stage_output: called with every stage's finished output of every request, the
            stages that are not final included.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        on_stage_output: Callable[[StageOutput], None] | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._on_stage_output = on_stage_output
        self._live: dict[str, LiveRequest] = {}
        self._inside: dict[str, dict[str, LiveRequest]] = {name: {} for name in pipeline.order}
        self._broken: dict[str, str] = {}
        self._has_moved = False
        self._idle_at: int | None = None

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether :meth:`step` has work."""
        return bool(self._live)

    @property
    def live_request_ids(self) -> tuple[str, ...]:
        """The requests on their way, oldest first."""
        return tuple(self._live)

    def add_request(self, request: OmniRequest) -> None:
        """Let a request enter the stages that take the user's prompt.

        Raises:
            ValueError: it has no id or that of a live request, names a stage that does not exist
                or samples nothing, or a speaker that nobody knows, or one of the root stages
                cannot run it. Nothing has changed.
        """
        if not request.request_id:
            raise ValueError("a request needs a request_id that is not empty")
        if request.request_id in self._live:
            raise ValueError(
                f"request_id {request.request_id!r} belongs to a request that is still running"
            )
        self._pipeline.check_speaker(request.speaker)
        live = LiveRequest(
            request=request,
            request_id=request.request_id,
            sampling=request_sampling(self._pipeline, request),
            speaker=request.speaker if request.speaker is not None else self._pipeline.speaker,
            waiting=set(self._pipeline.order),
            streams=self._streams(),
            final_stages=self._pipeline.final_stages,
        )
        try:
            self._enter_ready_stages(live)
        except ValueError:
            self._leave_stages(live)
            raise
        self._live[live.request_id] = live

    def step(self) -> list[OmniOutput]:
        """Take one turn; return the requests that ended or of which the user gets something new."""
        self._has_moved = False
        moved: dict[str, OmniOutput | None] = {}
        for name in reversed(self._pipeline.order):
            if self._inside[name]:
                moved |= self._step_stage(self._pipeline.stages[name])
        self._give_way()
        return [
            output if output is not None else self._live[request_id].snapshot()
            for request_id, output in moved.items()
        ]

    def abort(self, request_id: str, reason: str = "aborted") -> OmniOutput | None:
        """End a request wherever it is and free what it holds.

        Args:
            request_id: None is returned if no such request is live.
            reason: becomes the ``error`` of its last output, which is returned.
        """
        live = self._live.get(request_id)
        return None if live is None else self._end(live, reason, FinishReason.ABORT)

    def _streams(self) -> dict[str, ChunkStream]:
        stages = self._pipeline.stages
        return {
            name: ChunkStream(
                stages[stage.inputs.sources[0]],
                stage,
                stage.inputs.chunk_size,
                stage.inputs.max_pending_chunks,
            )
            for name, stage in stages.items()
            if stage.inputs is not None and stage.inputs.chunk_size is not None
        }

    def _step_stage(self, stage: Stage) -> dict[str, OmniOutput | None]:
        """One unit of work of one stage: who moved, with the last output of those that ended.

        A request that would wait for ever, since the stage failed or forgot it, ends here.
        """
        inside = self._inside[stage.name]
        moved: dict[str, OmniOutput | None] = {}
        outputs, failure = self._run(stage)
        for output in outputs:
            live = inside.get(output.request_id)
            if live is None:
                continue
            ended = self._advance(live, stage, output)
            if ended is not None or stage.final_output:
                moved[live.request_id] = ended
        if failure is None and inside and not stage.has_unfinished_requests:
            failure = "it lost the request: it has no work left, but never put it out"
        if failure is not None:
            for live in list(inside.values()):
                moved[live.request_id] = self._end(live, f"stage {stage.name!r}: {failure}")
            self._recover(stage)
        self._has_moved |= bool(outputs) or failure is not None
        return moved | self._feed(stage)

    def _run(self, stage: Stage) -> tuple[list[StageOutput], str | None]:
        if stage.name in self._broken:
            return [], self._broken[stage.name]
        try:
            return stage.step(), None
        except Exception as error:  # whatever it is, the other stages' requests go on
            _logger.exception("stage %r failed in a step", stage.name)
            return [], f"its step failed: {type(error).__name__}: {error}"

    def _recover(self, stage: Stage) -> None:
        """After a failed step, trust nothing that the stage had cached."""
        if stage.name in self._broken:
            return
        try:
            stage.reset_prefix_cache()
            stage.check_integrity()
        except Exception as error:
            self._break(stage, error)

    def _break(self, stage: Stage, error: Exception) -> None:
        _logger.exception("stage %r cannot go on", stage.name)
        self._broken[stage.name] = (
            f"it cannot be used any more, since it could not be cleaned up after a failure: "
            f"{type(error).__name__}: {error}"
        )

    def _advance(self, live: LiveRequest, stage: Stage, output: StageOutput) -> OmniOutput | None:
        """Take note of what a stage put out; None if the request goes on."""
        if output.finished:
            del self._inside[stage.name][live.request_id]
            if self._on_stage_output is not None:
                self._on_stage_output(output)
        try:
            self._pass_on(live, stage, output)
        except ValueError as error:
            return self._end(live, str(error))
        if live.waiting or any(live.request_id in inside for inside in self._inside.values()):
            return None
        del self._live[live.request_id]
        return live.snapshot(finished=True)

    def _pass_on(self, live: LiveRequest, stage: Stage, output: StageOutput) -> None:
        """Show what a stage put out to the user, and hand it to the stages behind.

        Raises:
            ValueError: the stage failed the request, or one behind refused it.
        """
        with _blamed_on(stage, live):
            if stage.final_output:
                live.show(stage, output)
            if (failure := _failure(output)) is not None:
                raise ValueError(failure)
        if output.finished:
            self._leave(live, stage)
        self._stream(live, stage, output)
        if output.finished:
            live.finished[stage.name] = output
            self._enter_ready_stages(live)

    def _enter_ready_stages(self, live: LiveRequest) -> None:
        """Let a request into every stage whose sources are all done with it.

        Raises:
            ValueError: a transform or a stage refused it; it may be in some stages by then.
        """
        whole = {
            name: () if inputs is None else inputs.sources
            for name in self._pipeline.order
            if name in live.waiting and name not in live.streams
            for inputs in [self._pipeline.stages[name].inputs]
        }
        for name, sources in whole.items():
            if all(source in live.finished for source in sources):
                stage = self._pipeline.stages[name]
                outputs = tuple(live.finished[source] for source in sources)
                self._enter(live, stage, self._prompt(live, stage, outputs))
        # Tensors of a long request are large: nothing is kept longer than somebody waits for it.
        needed = {source for name in whole if name in live.waiting for source in whole[name]}
        live.finished = {name: out for name, out in live.finished.items() if name in needed}

    def _enter(self, live: LiveRequest, stage: Stage, prompt: Prompt) -> None:
        if stage.name in self._broken:
            raise ValueError(f"stage {stage.name!r}: {self._broken[stage.name]}")
        live.waiting.discard(stage.name)
        self._inside[stage.name][live.request_id] = live
        with _blamed_on(stage, live):
            stage.add_request(
                StageRequest(
                    request_id=live.request_id,
                    prompt=prompt,
                    sampling=live.sampling.get(stage.name),
                    priority=live.request.priority,
                    cache_salt=live.request.cache_salt,
                )
            )

    def _prompt(
        self,
        live: LiveRequest,
        stage: Stage,
        sources: tuple[StageOutput, ...],
        *,
        first_row: int = 0,
        is_last: bool = True,
    ) -> Prompt:
        if stage.name not in self._pipeline.transforms:
            with _blamed_on(stage, live):
                _check_end(live.request.prompt, is_last)
            return live.request.prompt
        context = TransformContext(
            live.request_id,
            live.request.prompt,
            sources,
            speaker=live.speaker,
            first_row=first_row,
            is_last=is_last,
        )
        with _blamed_on(stage, live):
            prompt = self._pipeline.transforms[stage.name](context)
            if not isinstance(prompt, Prompt):
                raise ValueError(f"its transform returned a {type(prompt).__name__}, not a prompt")
            _check_end(prompt, is_last)
        return prompt

    def _stream(self, live: LiveRequest, source: Stage, output: StageOutput) -> None:
        """Hand on what is due on the streamed edges that leave a stage; pause it if they are full.

        Raises:
            ValueError: the source, a transform or a consumer refused.
        """
        has_cut = False
        for stream in live.streams_from(source.name):
            with _blamed_on(source, live):
                chunk = stream.cut(output)
            if chunk is None:
                continue
            has_cut = True
            stream.pending.append(
                self._prompt(
                    live,
                    stream.consumer,
                    (chunk.output,),
                    first_row=chunk.first_row,
                    is_last=chunk.is_last,
                )
            )
            self._deliver(live, stream)
        # Only after a cut: a request whose pause was lifted goes on until it has made a chunk.
        if has_cut and not output.finished and _is_held_up(live, source):
            with _blamed_on(source, live):
                source.pause_request(live.request_id)
            live.paused.add(source.name)

    def _deliver(self, live: LiveRequest, stream: ChunkStream) -> None:
        """Hand a consumer the chunks that it can use now.

        Raises:
            ValueError: the consumer refused.
        """
        stage = stream.consumer
        while stream.pending:
            if stage.name in live.waiting:
                self._enter(live, stage, stream.pending.popleft())
            else:
                with _blamed_on(stage, live):
                    if not stage.needs_input(live.request_id):
                        break
                    stage.extend_request(live.request_id, stream.pending.popleft())
            self._has_moved = True
        self._resume_if_drained(live, stream.source)

    def _feed(self, stage: Stage) -> dict[str, OmniOutput | None]:
        """Hand a stage the chunks that its requests wait for; return those that it refused."""
        ended: dict[str, OmniOutput | None] = {}
        for live in list(self._inside[stage.name].values()):
            stream = live.streams.get(stage.name)
            if stream is None or not stream.pending:
                continue
            try:
                self._deliver(live, stream)
            except ValueError as error:
                ended[live.request_id] = self._end(live, str(error))
        return ended

    def _leave(self, live: LiveRequest, stage: Stage) -> None:
        """A stage is done with a request: it rests there no more and takes no more chunks."""
        live.paused.discard(stage.name)
        stream = live.streams.get(stage.name)
        if stream is not None:
            stream.close()
            self._resume_if_drained(live, stream.source)

    def _resume_if_drained(self, live: LiveRequest, source: Stage) -> None:
        if source.name in live.paused and not _is_held_up(live, source):
            self._resume(live, source)

    def _resume(self, live: LiveRequest, source: Stage) -> None:
        live.paused.discard(source.name)
        try:
            source.resume_request(live.request_id)
        except Exception as error:  # its requests end when it is next due
            self._break(source, error)

    def _give_way(self) -> None:
        """Lift the oldest request's pause if the pipeline would stand still otherwise.

        A turn without an output need not mean that: a long prompt takes several steps, and a
        vocoder many to one piece of sound. Stages count the steps in which they had work.
        """
        paused = (
            (live, self._pipeline.stages[name])
            for live in self._live.values()
            for name in reversed(self._pipeline.order)
            if name in live.paused
        )
        if self._has_moved or (first := next(paused, None)) is None:
            self._idle_at = None
            return
        num_steps = sum(stage.stats().num_steps for stage in self._pipeline.stages.values())
        if num_steps != self._idle_at:
            self._idle_at = num_steps
            return
        self._idle_at = None
        self._resume(*first)

    def _end(
        self, live: LiveRequest, error: str, reason: FinishReason = FinishReason.ERROR
    ) -> OmniOutput:
        """Cut a request short; free what it holds everywhere."""
        self._leave_stages(live)
        self._live.pop(live.request_id, None)
        live.cut_short(reason)
        return live.snapshot(finished=True, error=error)

    def _leave_stages(self, live: LiveRequest) -> None:
        for name, inside in self._inside.items():
            if inside.pop(live.request_id, None) is None:
                continue
            stage = self._pipeline.stages[name]
            try:
                stage.abort(live.request_id)
            except Exception as error:  # the request is over either way; the stage may be as well
                self._break(stage, error)


@contextmanager
def _blamed_on(stage: Stage, live: LiveRequest) -> Iterator[None]:
    """Turn whatever a stage or its transform raises, which may be anybody's code, into one error.

    Raises:
        ValueError: with the stage's name.
    """
    try:
        yield
    except ValueError as error:
        raise ValueError(f"stage {stage.name!r}: {error}") from error
    except Exception as error:
        _logger.exception("stage %r failed on request %r", stage.name, live.request_id)
        raise ValueError(f"stage {stage.name!r}: {type(error).__name__}: {error}") from error


def _check_end(prompt: Prompt, is_last: bool) -> None:
    """Refuse a prompt after which a stage would wait for more, which never comes."""
    if is_last and isinstance(prompt, CodecPrompt | SpeechPrompt) and not prompt.is_last:
        raise ValueError(
            f"it got a {type(prompt).__name__} with is_last=False, but nothing follows; a "
            "transform hands on the is_last of its context"
        )


def _is_held_up(live: LiveRequest, source: Stage) -> bool:
    return any(stream.is_full for stream in live.streams_from(source.name))


def _failure(output: StageOutput) -> str | None:
    if not output.finished:
        return None
    if output.error is not None:
        return output.error
    if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
        return f"it ended the request early ({output.finish_reason})"
    return None

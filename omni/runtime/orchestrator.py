"""Moves requests over a pipeline's stages, by turns, in one thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from engine import FinishReason
from engine.interface.engine import Admit, Prepare
from omni.pipelines.pipeline import Pipeline
from omni.requests.request import OmniOutput, OmniRequest
from omni.runtime.guarded_stages import GuardedStages, blamed_on
from omni.runtime.live_request import LiveRequest
from omni.runtime.preparations import Preparation, Preparations, is_light
from omni.runtime.streamed_edges import StreamedEdges
from stages import Stage, StageOutput

__all__ = ["Orchestrator", "refusal"]


class Orchestrator:
    """Runs requests over a pipeline.

    A turn (:meth:`step`) lets every stage that has requests do one unit of work, the last stages
    first, so that what is nearly done leaves before more comes in. A request enters a stage as
    soon as all the stages that feed it are done with it. With stages ``a -> b`` and requests 1, 2::

        turn     1    2    3    4    5
        a       1 2  1 2   2
        b                 1    1 2  2      request 1 left a in turn 2, request 2 in turn 3

    On an edge with a ``chunk_size`` it enters with the first chunk and gets the others when it
    has used up what it had; see :class:`~omni.runtime.streamed_edges.StreamedEdges`.

    Whatever goes wrong with one request ends that request alone, and frees what it held in all
    stages. Not safe to call from several threads at once.

    Args:
        pipeline: the stages; they must be idle.
        on_stage_output: called with every stage's finished output of every request, the
            stages that are not final included.
    """

    def __init__(
        self, pipeline: Pipeline, *, on_stage_output: Callable[[StageOutput], None] | None = None
    ) -> None:
        self._pipeline = pipeline
        self._on_stage_output = on_stage_output
        self._live: dict[str, LiveRequest] = {}
        self._guarded = GuardedStages(pipeline)
        self._edges = StreamedEdges(self._guarded)
        self._preparations: Preparations[LiveRequest] | None = None

    def prepare_aside(self, on_done: Callable[[], None]) -> None:
        """Have requests prepared in other threads from now on, so that no turn waits for it.

        A request that cannot run is then refused by an output of :meth:`step`, and not by
        :meth:`add_request`, which tells only what it sees at once. To be closed.

        Args:
            on_done: called in another thread when there may be work for :meth:`step`.
        """
        self._preparations = Preparations(on_done)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._live)

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has work: not while all requests are only being prepared."""
        if not self._preparations:
            return bool(self._live)
        return self._preparations.has_ready or any(self._guarded.inside.values())

    @property
    def time_to_work(self) -> float | None:
        """Seconds after which :attr:`has_work` may change by itself; None if it will not."""
        return None if self._preparations is None else self._preparations.time_to_ready

    def close(self) -> None:
        """Wait for the threads that prepare requests, if there are any."""
        if self._preparations is not None:
            self._preparations.close()

    @property
    def live_request_ids(self) -> tuple[str, ...]:
        """The requests on their way, oldest first."""
        return tuple(self._live)

    def add_request(self, request: OmniRequest, group: object | None = None) -> None:
        """Let a request enter the stages that take the user's prompt.

        Args:
            request: with its id set.
            group: requests of one group enter in one turn if they are prepared in about the same
                time; None for one that enters by itself.

        Raises:
            ValueError: it has no id or that of a live request, names a stage that does not exist
                or samples nothing, or a speaker that no stage has, or one of the root stages
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
            sampling=self._pipeline.merge_sampling(request.sampling),
            speaker=request.speaker if request.speaker is not None else self._pipeline.speaker,
            waiting=set(self._pipeline.order),
            streams=self._edges.streams(),
            final_stages=self._pipeline.final_stages,
        )
        try:
            self._enter_ready_stages(live, group or live)
        except ValueError:
            self._abort(live)
            raise
        self._live[live.request_id] = live

    def step(self) -> list[OmniOutput]:
        """Take one turn; return the requests that ended or of which the user gets something new."""
        self._edges.has_moved = False
        moved: dict[str, OmniOutput | None] = {**self._admit_prepared()}
        for name in reversed(self._pipeline.order):
            if self._guarded.inside[name]:
                moved |= self._step_stage(self._pipeline.stages[name])
        self._edges.give_way(self._live.values())
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

    def _step_stage(self, stage: Stage) -> dict[str, OmniOutput | None]:
        """One unit of work of one stage: who moved, with the last output of those that ended.

        A request that would wait for ever, since the stage failed or forgot it, ends here.
        """
        inside = self._guarded.inside[stage.name]
        moved: dict[str, OmniOutput | None] = {}
        outputs, lost = self._guarded.step(stage)
        for output in outputs:
            live = inside.get(output.request_id)
            if live is None:
                continue
            ended = self._advance(live, stage, output)
            if ended is not None or stage.final_output:
                moved[live.request_id] = ended
        if not lost and inside and not stage.has_unfinished_requests:
            message = "it lost the request: it has no work left, but never put it out"
            lost = dict.fromkeys(inside, message)
        for request_id, failure in lost.items():
            moved[request_id] = self._end(inside[request_id], f"stage {stage.name!r}: {failure}")
        if lost and not inside:
            self._guarded.recover(stage)
        self._edges.has_moved |= bool(outputs) or bool(lost)
        for request_id, error in self._edges.feed(stage).items():
            moved[request_id] = self._end(self._live[request_id], error)
        return moved

    def _advance(self, live: LiveRequest, stage: Stage, output: StageOutput) -> OmniOutput | None:
        """Take note of what a stage put out; None if the request goes on."""
        if output.finished:
            self._guarded.leave(live, stage, has_failed=_failure(output) is not None)
            if self._on_stage_output is not None:
                self._on_stage_output(output)
        try:
            self._pass_on(live, stage, output)
        except ValueError as error:
            return self._end(live, str(error))
        if live.waiting or live.preparing or self._guarded.has(live):
            return None
        del self._live[live.request_id]
        return live.snapshot(finished=True)

    def _pass_on(self, live: LiveRequest, stage: Stage, output: StageOutput) -> None:
        """Show what a stage put out to the user, and hand it to the stages behind.

        Raises:
            ValueError: the stage failed the request, or one behind refused it.
        """
        with blamed_on(stage, live):
            if stage.final_output:
                live.show(stage, output)
            if (failure := _failure(output)) is not None:
                raise ValueError(failure)
        if output.finished:
            self._edges.leave(live, stage)
        self._edges.hand_on(live, stage, output)
        if output.finished:
            live.finished[stage.name] = output
            self._enter_ready_stages(live)

    def _admit_prepared(self) -> dict[str, OmniOutput]:
        """Let in what has been prepared; the last outputs of those that were refused."""
        refused: dict[str, OmniOutput] = {}
        for done in [] if self._preparations is None else self._preparations.take():
            live, had_begun = done.owner, done.owner.has_begun
            try:
                if done.error is not None:
                    raise done.error
                for stage_name, admit in done.made:
                    live.preparing.discard(stage_name)
                    admit()
                    live.has_begun = True
            except ValueError as error:
                refused[live.request_id] = self._end(live, str(error))
                if not had_begun:
                    # As if it had never been added.
                    refused[live.request_id] = refusal(live.request_id, error)
        return refused

    def _enter_ready_stages(self, live: LiveRequest, group: object | None = None) -> None:
        """Let a request into every stage whose sources are all done with it.

        Args:
            live: the request.
            group: None for stages behind others: what takes no time worth speaking of enters them
                at once.

        Raises:
            ValueError: a transform or a stage refused it; it may be in some stages by then.
        """
        whole = {
            name: () if inputs is None else inputs.sources
            for name in self._pipeline.order
            if name in live.waiting and name not in live.streams
            for inputs in [self._pipeline.stages[name].inputs]
        }
        begun: dict[str, Prepare] = {}
        all_light = True
        for name, sources in whole.items():
            if all(source in live.finished for source in sources):
                stage = self._pipeline.stages[name]
                outputs = [live.finished[source] for source in sources]
                prompt = self._guarded.prompt(live, stage, outputs)
                light = is_light(prompt)
                if self._preparations is None or (group is None and light):
                    self._guarded.enter(live, stage, prompt)
                else:
                    begun[name] = self._guarded.begin(live, stage, prompt)
                    all_light &= light
        if begun and self._preparations is not None:
            live.preparing |= begun.keys()
            work = partial(_prepare_all, begun)
            self._preparations.submit(Preparation(live, work, group), light=all_light)
        # Tensors of a long request are large: nothing is kept longer than a stage waits for it.
        needed = {source for name in whole if name in live.waiting for source in whole[name]}
        live.finished = {name: out for name, out in live.finished.items() if name in needed}

    def _end(
        self, live: LiveRequest, error: str, reason: FinishReason = FinishReason.ERROR
    ) -> OmniOutput:
        """Cut a request short; free what it holds everywhere."""
        self._abort(live)
        self._live.pop(live.request_id, None)
        live.cut_short(reason)
        return live.snapshot(finished=True, error=error)

    def _abort(self, live: LiveRequest) -> None:
        self._guarded.abort(live)
        if self._preparations is not None:
            self._preparations.drop(live)
            live.preparing.clear()


def refusal(request_id: str, error: Exception) -> OmniOutput:
    """The one output of a request that no stage has begun with."""
    is_told = isinstance(error, ValueError)
    return OmniOutput(
        request_id,
        {},
        finished=True,
        error=str(error) if is_told else repr(error),
        # Whether whoever asked can mend it; a stage's own mistakes come as ValueErrors as well.
        refused=is_told and isinstance(error.__cause__, ValueError | None),
    )


def _prepare_all(begun: Mapping[str, Prepare]) -> list[tuple[str, Admit]]:
    return [(name, prepare()) for name, prepare in begun.items()]


def _failure(output: StageOutput) -> str | None:
    if not output.finished:
        return None
    if output.error is not None:
        return output.error
    if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
        return f"it ended the request early ({output.finish_reason})"
    return None

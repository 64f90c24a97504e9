"""Moves requests over a pipeline's stages, by turns, in one thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from pydantic import ValidationError

from engine import FinishReason, Prompt, SamplingParams
from omni.pipeline import Pipeline
from omni.request import OmniOutput, OmniRequest
from omni.schema_error import explain_validation_error
from omni.suggestion import suggest
from stages import Stage, StageOutput, StageRequest, TransformContext

__all__ = ["Orchestrator"]

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _LiveRequest:
    """A request on its way.

    Attributes:
        request: with its id set.
        sampling: ``stage -> parameters`` where the request brings its own.
        waiting: stages that it has yet to enter.
        finished: full outputs of stages that it has left and that a waiting stage still needs.
        visible: what the user has been or is about to be told, by final stage.
    """

    request: OmniRequest
    request_id: str
    sampling: Mapping[str, SamplingParams]
    waiting: set[str]
    finished: dict[str, StageOutput] = field(default_factory=dict)
    visible: dict[str, StageOutput] = field(default_factory=dict)


class Orchestrator:
    """Runs requests over a pipeline.

    A turn (:meth:`step`) lets every stage that has requests do one unit of work, the last stages
    first, so that what is nearly done leaves before more comes in. A request enters a stage as
    soon as all the stages that feed it are done with it. With stages ``a -> b`` and requests 1, 2::

        turn     1    2    3    4    5
        a       1 2  1 2   2
        b                 1    1 2  2      request 1 left a in turn 2, request 2 in turn 3

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
        self._live: dict[str, _LiveRequest] = {}
        self._inside: dict[str, dict[str, _LiveRequest]] = {name: {} for name in pipeline.order}
        self._broken: dict[str, str] = {}

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
                or samples nothing, or one of the root stages cannot run it. Nothing has changed.
        """
        if not request.request_id:
            raise ValueError("a request needs a request_id that is not empty")
        if request.request_id in self._live:
            raise ValueError(
                f"request_id {request.request_id!r} belongs to a request that is still running"
            )
        live = _LiveRequest(
            request=request,
            request_id=request.request_id,
            sampling=self._sampling(request),
            waiting=set(self._pipeline.order),
        )
        try:
            self._enter_ready_stages(live)
        except ValueError:
            self._leave_stages(live)
            raise
        self._live[live.request_id] = live

    def step(self) -> list[OmniOutput]:
        """Take one turn; return the requests that ended or of which the user gets something new."""
        moved: dict[str, OmniOutput | None] = {}
        for name in reversed(self._pipeline.order):
            if self._inside[name]:
                moved |= self._step_stage(self._pipeline.stages[name])
        return [
            output if output is not None else self._snapshot(self._live[request_id])
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

    def _sampling(self, request: OmniRequest) -> dict[str, SamplingParams]:
        merged = {}
        for name, override in request.sampling.items():
            stage = self._pipeline.stages.get(name)
            if stage is None:
                raise ValueError(
                    f"sampling for stage {name!r}, which does not exist"
                    f"{suggest(name, self._pipeline.stages)}"
                )
            try:
                merged[name] = stage.merge_sampling(override)
            except ValidationError as error:
                mistakes = explain_validation_error(error, SamplingParams, override)
                raise ValueError(f"sampling for stage {name!r}: {mistakes}") from error
            except ValueError as error:
                raise ValueError(f"sampling for stage {name!r}: {error}") from error
            if merged[name].n > 1 and self._pipeline.consumers[name]:
                raise ValueError(
                    f"sampling for stage {name!r}: n={merged[name].n} completions, but it feeds "
                    f"{', '.join(self._pipeline.consumers[name])}, which takes one"
                )
        return merged

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
        return moved

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

    def _advance(self, live: _LiveRequest, stage: Stage, output: StageOutput) -> OmniOutput | None:
        """Take note of what a stage put out; None if the request goes on."""
        if stage.final_output:
            self._show(live, stage, output)
        if not output.finished:
            return None
        del self._inside[stage.name][live.request_id]
        if self._on_stage_output is not None:
            self._on_stage_output(output)
        failure = _failure(output)
        if failure is not None:
            return self._end(live, f"stage {stage.name!r}: {failure}")
        live.finished[stage.name] = output
        try:
            self._enter_ready_stages(live)
        except ValueError as error:
            return self._end(live, str(error))
        if live.waiting or any(live.request_id in inside for inside in self._inside.values()):
            return None
        del self._live[live.request_id]
        return self._snapshot(live, finished=True)

    def _enter_ready_stages(self, live: _LiveRequest) -> None:
        """Let a request into every stage whose sources are all done with it.

        Raises:
            ValueError: a transform or a stage refused it; it may be in some stages by then.
        """
        for name in [name for name in self._pipeline.order if name in live.waiting]:
            stage = self._pipeline.stages[name]
            sources = stage.inputs.sources if stage.inputs is not None else ()
            if all(source in live.finished for source in sources):
                self._enter(live, stage, [live.finished[source] for source in sources])
        needed = {
            source
            for name in live.waiting
            if (inputs := self._pipeline.stages[name].inputs) is not None
            for source in inputs.sources
        }
        # Tensors of a long request are large: nothing is kept longer than somebody waits for it.
        live.finished = {name: out for name, out in live.finished.items() if name in needed}

    def _enter(self, live: _LiveRequest, stage: Stage, sources: Iterable[StageOutput]) -> None:
        if stage.name in self._broken:
            raise ValueError(f"stage {stage.name!r}: {self._broken[stage.name]}")
        live.waiting.discard(stage.name)
        self._inside[stage.name][live.request_id] = live
        try:
            stage.add_request(
                StageRequest(
                    request_id=live.request_id,
                    prompt=self._prompt(live, stage, tuple(sources)),
                    sampling=live.sampling.get(stage.name),
                    priority=live.request.priority,
                    cache_salt=live.request.cache_salt,
                )
            )
        except ValueError as error:
            raise ValueError(f"stage {stage.name!r}: {error}") from error
        except Exception as error:  # a transform may be anybody's code
            _logger.exception("request %r could not enter stage %r", live.request_id, stage.name)
            raise ValueError(f"stage {stage.name!r}: {type(error).__name__}: {error}") from error

    def _prompt(self, live: _LiveRequest, stage: Stage, sources: tuple[StageOutput, ...]) -> Prompt:
        if stage.name not in self._pipeline.transforms:
            return live.request.prompt
        prompt = self._pipeline.transforms[stage.name](
            TransformContext(live.request_id, live.request.prompt, sources)
        )
        if not isinstance(prompt, Prompt):
            raise ValueError(f"its transform returned a {type(prompt).__name__}, not a prompt")
        return prompt

    def _end(
        self, live: _LiveRequest, error: str, reason: FinishReason = FinishReason.ERROR
    ) -> OmniOutput:
        """Cut a request short; free what it holds everywhere."""
        self._leave_stages(live)
        self._live.pop(live.request_id, None)
        for name in self._pipeline.final_stages:
            shown = live.visible.get(name, StageOutput(live.request_id, name, finished=False))
            if not shown.finished:
                live.visible[name] = replace(shown, finished=True, finish_reason=reason)
        return self._snapshot(live, finished=True, error=error)

    def _leave_stages(self, live: _LiveRequest) -> None:
        for name, inside in self._inside.items():
            if inside.pop(live.request_id, None) is None:
                continue
            stage = self._pipeline.stages[name]
            try:
                stage.abort(live.request_id)
            except Exception as error:  # the request is over either way; the stage may be as well
                self._break(stage, error)

    def _show(self, live: _LiveRequest, stage: Stage, output: StageOutput) -> None:
        """Put what the user asked to get of a stage into the request's next output."""
        before = live.visible.get(stage.name)
        unseen = before.delta if before is not None else ""
        if "tensors" not in stage.final_output:
            output = replace(output, tensors={})
        if "text" in stage.final_output:
            output = replace(output, delta=unseen + output.delta)
        else:
            output = replace(output, text=None, delta="", logprobs=None, completions=())
        live.visible[stage.name] = output

    def _snapshot(
        self, live: _LiveRequest, *, finished: bool = False, error: str | None = None
    ) -> OmniOutput:
        """The request's state now; what it tells is told."""
        visible = live.visible
        stages = {name: visible[name] for name in self._pipeline.final_stages if name in visible}
        for name, output in stages.items():
            if output.delta:
                live.visible[name] = replace(output, delta="")
        return OmniOutput(live.request_id, stages, finished, error)


def _failure(output: StageOutput) -> str | None:
    if output.error is not None:
        return output.error
    if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
        return f"it ended the request early ({output.finish_reason})"
    return None

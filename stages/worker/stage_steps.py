"""Steps any kind of stage for what is new."""

from __future__ import annotations

from engine import FinishReason
from engine.interface.log_fields import package_logger
from engine.interface.outputs import OutputDelta
from stages.engine_stage import EngineStage
from stages.stage import Stage, StageOutput
from stages.stage_output import delta_since

__all__ = ["StageSteps"]

_logger = package_logger(__name__)


class StageSteps:
    """Steps a stage, and returns what is new of the requests that moved.

    Stages around an engine say that themselves. A kind of stage from outside returns cumulative
    outputs from ``step``: what they add to the ones before is found here.

    Args:
        stage: to step.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._last: dict[str, StageOutput] = {}

    def step(self) -> list[OutputDelta]:
        """One unit of work of the stage."""
        stage = self._stage
        # One whose ``step`` was overridden, in a subclass or by a test, is asked that way.
        own = getattr(stage.step, "__func__", None)
        if isinstance(stage, EngineStage) and own is EngineStage.step:
            return stage.step_deltas()
        return [self._delta(output) for output in stage.step()]

    def _delta(self, output: StageOutput) -> OutputDelta:
        request_id = output.request_id
        before = self._last.pop(request_id, None)
        try:
            delta = delta_since(output, before)
        except ValueError as error:  # its neighbours' outputs are emitted once, now or never
            about = {"request_id": request_id}
            _logger.exception("an output of request %r is not cumulative", request_id, extra=about)
            self._stage.abort(request_id)
            return OutputDelta(
                request_id, finished=True, finish_reason=FinishReason.ERROR, error=str(error)
            )
        if not output.finished:
            self._last[request_id] = output
        return delta

    def forget(self, request_id: str) -> None:
        """The stage has a request no more."""
        self._last.pop(request_id, None)

    def clear(self) -> None:
        """The stage has no request any more."""
        self._last.clear()

"""A kind of stage, for YAML, that proceeds only while a test allows it."""

from __future__ import annotations

import threading
from typing import Annotated, Literal

from engine import ChatPrompt
from omni.pipelines.pipeline_config import PipelineConfig
from stages import StageConfig, StageOutput, StageRequest, register_stage_kind
from stages.stage import OneOrMore
from tests.support.fake_stage import FakeStage


class Gate:
    """Holds a stage's steps back until it is opened, permanently or for some steps."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_steps = 0.0

    def open(self, num_steps: float = float("inf")) -> None:
        """Allow so many more steps."""
        with self._changed:
            self._num_steps += num_steps
            self._changed.notify_all()

    def passes(self) -> bool:
        """Wait briefly; return True if a step may run."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._num_steps >= 1, 0.005):
                return False
            self._num_steps -= 1
            return True


GATES: dict[str, Gate] = {}
"""Gates by stage name."""


@register_stage_kind
class GatedStageConfig(StageConfig):
    """A :class:`FakeStage` behind a gate.

    Attributes:
        steps: number of steps per request.
        fails: if true, every request ends with an error.
    """

    kind: Literal["gated"]
    steps: int = 2
    fails: bool = False
    final_output: Annotated[tuple[Literal["text"], ...], OneOrMore] = ()

    def build_stage(self, name: str) -> GatedStage:
        return GatedStage(name, self)


class GatedStage(FakeStage):
    """See :class:`GatedStageConfig`."""

    def __init__(self, name: str, config: GatedStageConfig) -> None:
        super().__init__(
            name,
            config.inputs.sources if config.inputs is not None else (),
            steps=config.steps,
            final=bool(config.final_output),
        )
        self.says_chats = False
        self._fails = config.fails
        self._gate = GATES.setdefault(name, Gate())

    def step(self) -> list[StageOutput]:
        if not self._gate.passes():
            return []
        if self._fails:
            self.fail = tuple(self.held)
        return super().step()

    def expected(self, request: StageRequest) -> str:
        if self.says_chats and isinstance(request.prompt, ChatPrompt):
            return f"{self.name}({request.prompt.messages[-1]['content']})"
        return super().expected(request)


def gated_pipeline(name: str, **settings: object) -> PipelineConfig:
    """Return a pipeline of one such stage with the pipeline's name; its gate is closed."""
    GATES[name] = Gate()
    stage = {"kind": "gated", "final_output": "text", **settings}
    return PipelineConfig.model_validate({"name": name, "stages": {name: stage}})

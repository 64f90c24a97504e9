"""A kind of stage, for YAML, that goes on only while a test lets it."""

from __future__ import annotations

import threading
from typing import Annotated, Literal

from omni.pipelines.pipeline_config import PipelineConfig
from stages import StageConfig, StageOutput, register_stage_kind
from stages.stage import OneOrMore
from tests.support.fake_stage import FakeStage

__all__ = ["GATES", "GatedStage", "GatedStageConfig", "gated_pipeline"]

GATES: dict[str, threading.Event] = {}
"""By stage name: set, it is open."""


@register_stage_kind
class GatedStageConfig(StageConfig):
    """A :class:`FakeStage` behind a gate.

    Attributes:
        steps: how many steps a request takes.
        fail: ids, or a part of them, that end with an error.
        explode: whether every step raises.
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
        self._fails = config.fails
        self._gate = GATES.setdefault(name, threading.Event())

    def step(self) -> list[StageOutput]:
        if not self._gate.wait(0.005):
            return []
        if self._fails:
            self.fail = tuple(self.held)
        return super().step()


def gated_pipeline(name: str, **settings: object) -> PipelineConfig:
    """A pipeline of one such stage, which has the pipeline's name; its gate is closed."""
    GATES[name] = threading.Event()
    stage = {"kind": "gated", "final_output": "text", **settings}
    return PipelineConfig.model_validate({"name": name, "stages": {name: stage}})

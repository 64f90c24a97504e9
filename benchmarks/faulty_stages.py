"""Kinds of stages whose steps raise when their process is told to, for ``benchmarks.chaos``."""

from __future__ import annotations

import signal
import threading
from typing import Any, Literal

from omni.pipelines.pipeline_config import PipelineConfig
from stages import Stage, StageOutput
from stages.autoregressive import AutoregressiveStageConfig
from stages.generator import GeneratorStageConfig
from stages.stage_config import StageConfig, register_stage_kind

__all__ = ["FAULT", "faulty"]

FAULT = signal.SIGUSR1
"""Makes a step raise: the present one at whatever line it has come to, or the next one."""


class InjectedError(Exception):
    """What no stage expects."""


class _Breaker:
    """Stands before a stage's steps.

    Args:
        stage: its ``step`` is replaced.
    """

    def __init__(self, stage: Stage) -> None:
        self._step = stage.step
        self._is_inside = self._is_due = False
        stage.step = self.step  # type: ignore[method-assign]
        if threading.current_thread() is threading.main_thread():
            signal.signal(FAULT, self._told)

    def _told(self, *_: object) -> None:
        if self._is_inside:
            raise InjectedError("in the middle of a step")
        self._is_due = True

    def step(self) -> list[StageOutput]:
        if self._is_due:
            self._is_due = False
            raise InjectedError("before a step")
        self._is_inside = True
        try:
            return self._step()
        finally:
            self._is_inside = False


@register_stage_kind
class FaultyAutoregressiveConfig(AutoregressiveStageConfig):
    kind: Literal["faulty_autoregressive"]  # type: ignore[assignment]

    def build_stage(self, name: str) -> Any:
        stage = super().build_stage(name)
        _Breaker(stage)
        return stage


@register_stage_kind
class FaultyGeneratorConfig(GeneratorStageConfig):
    kind: Literal["faulty_generator"]  # type: ignore[assignment]

    def build_stage(self, name: str) -> Any:
        stage = super().build_stage(name)
        _Breaker(stage)
        return stage


_KINDS: dict[str, type[StageConfig]] = {
    "autoregressive": FaultyAutoregressiveConfig,
    "generator": FaultyGeneratorConfig,
}


def faulty(config: PipelineConfig) -> PipelineConfig:
    """The same pipeline, of stages whose steps raise when told to.

    Raises:
        KeyError: a stage is of another kind than those that there are here.
    """
    stages = {
        name: _KINDS[stage.kind].model_validate(dict(stage) | {"kind": f"faulty_{stage.kind}"})
        for name, stage in config.stages.items()
    }
    return config.model_copy(update={"stages": stages})

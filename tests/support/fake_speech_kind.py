"""The model-free speech stages as a kind of stage, for workers that build their own stages."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal

from engine.interface.log_fields import package_logger
from omni.pipelines.pipeline_config import PipelineConfig
from stages import Stage, StageConfig, StageOutput, StageRequest, register_stage_kind
from stages.stage import OneOrMore
from tests.support.fake_speech import FakeSpeechStage, Talker, Thinker, Vocoder

_LOG = package_logger("tests.fake_speech")
_ROLES: dict[str, type[FakeSpeechStage]] = {
    "thinker": Thinker,
    "talker": Talker,
    "code2wav": Vocoder,
}


@register_stage_kind
class FakeSpeechConfig(StageConfig):
    """The stage of :mod:`tests.support.fake_speech` that it is named after.

    Attributes:
        tail: tokens after the last unit of its input; negative values fail to build.
        pause_s: duration of each step, in seconds.
        logs: a warning logged for every request.
        outputs: tensors that it passes on; None for those its consumers need.
    """

    takes_chunks: ClassVar[bool] = True
    gives_chunks: ClassVar[bool] = True

    kind: Literal["fake_speech"]
    tail: int = 1
    pause_s: float = 0.0
    logs: str | None = None
    outputs: tuple[str, ...] | None = None
    final_output: Annotated[tuple[Literal["text", "audio"], ...], OneOrMore] = ()

    def build_stage(self, name: str) -> Stage:
        if self.tail < 0:
            raise ValueError(f"tail must not be negative, got {self.tail}")
        inputs, pause_s, logs = self.inputs, self.pause_s, self.logs
        role: Any = _ROLES[name]

        class Slow(role):
            def add_request(self, request: StageRequest) -> None:
                if logs is not None:
                    _LOG.warning(logs)
                super().add_request(request)

            def _step(self) -> list[StageOutput]:
                time.sleep(pause_s)
                outputs: list[StageOutput] = super()._step()
                return outputs

        return Slow(
            name,
            () if inputs is None else inputs.sources,
            None if inputs is None else inputs.transform,
            chunk_size=None if inputs is None else inputs.chunk_size,
            tail=self.tail,
            final_output=self.final_output,
            outputs=self.outputs,
        )


def fake_speech(
    runtime: dict[str, Any], wanted: Collection[str] = tuple(_ROLES), **changes: dict[str, Any]
) -> PipelineConfig:
    """Return a thinker, a talker and a vocoder that stream; keyword arguments by stage."""
    edge = {"from": "thinker", "transform": "thinker_to_talker", "chunk_size": 2}
    sound = {"from": "talker", "transform": "talker_to_code2wav", "chunk_size": 3}
    stages: dict[str, dict[str, Any]] = {
        "thinker": {"final_output": "text"},
        "talker": {"inputs": edge, "tail": 6},
        "code2wav": {"inputs": sound, "tail": 0, "final_output": "audio"},
    }
    given = {
        name: {"kind": "fake_speech", **stage, **changes.get(name, {})}
        for name, stage in stages.items()
        if name in wanted
    }
    return PipelineConfig.model_validate(
        {"name": "fake_speech", "runtime": runtime, "stages": given}
    )

"""Pipelines composed of stages in Python also run in processes, or report why they cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from pydantic import Field

from engine import EngineConfig, LLMEngine, Prompt, SamplingParams, TextPrompt
from omni import Omni, OmniOutput, Pipeline
from omni.pipelines.runtime_config import RuntimeConfig
from stages import (
    AutoregressiveStage,
    EncoderStage,
    Stage,
    StageConfig,
    StageInputs,
    TransformContext,
    register_stage_kind,
)
from stages.placement import Placement
from stages.remote.remote_stage import RemoteStage
from tests.support.fake_stage import FakeStage

BEGINNING = "A quick brown fox jumps over the lazy dog, and over all "
PROMPTS = [BEGINNING + "cats", BEGINNING + "rivers"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def shouted(context: TransformContext) -> Prompt:
    return TextPrompt(str(context.sources[0].text).upper() + "!")


@register_stage_kind
class EchoConfig(StageConfig):
    """A user-defined kind, which echoes its prompt slowly."""

    kind: Literal["echo_in_tests"]
    steps: int = Field(default=2, description="until it has said all")

    def build_stage(self, name: str) -> Stage:
        assert self.inputs is not None
        return FakeStage(
            name, self.inputs.sources, transform=self.inputs.transform, steps=self.steps
        )


def engine_config(model: str) -> EngineConfig:
    return EngineConfig(model=model, device="cpu", block_size=8, num_blocks=64, max_model_len=128)


def composed() -> Pipeline:
    writer = AutoregressiveStage("writer", engine_config("seeded:qwen2"), sampling=GREEDY)
    embedder = EncoderStage(
        "embedder",
        engine_config("seeded:bert"),
        pooling="cls",
        normalize=True,
        outputs=["pooled"],
        inputs=StageInputs(("writer",), shouted),
    )
    echo = EchoConfig(
        kind="echo_in_tests",
        steps=3,
        inputs=StageInputs(("writer",), "text_as_prompt"),
        final_output=("text",),
        placement=Placement(num_cpus=0.5),  # for a cluster; ignored elsewhere
    )
    return Pipeline([writer, embedder, echo.build_stage("echo")])


def reported(outputs: list[OmniOutput]) -> list[Any]:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [
        {
            name: (stage.text, stage.token_ids, stage.num_cached_tokens)
            for name, stage in output.stages.items()
        }
        for output in outputs
    ]


def test_what_is_composed_in_python_says_the_same_in_processes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here = composed()
    here.stages["embedder"].enable_prefix_caching = False
    with Omni(here) as inline:
        expected = [inline.generate(prompt)[0] for prompt in PROMPTS]
    again = composed()
    again.stages["embedder"].enable_prefix_caching = False
    with Omni(again, runtime="processes") as omni:
        assert caplog.messages == [
            f"stages.echo.placement.num_cpus: 0.5 is not for runtime {kind}; left out"
            for kind in ("inline", "processes")
        ]
        stages = omni.pipeline.stages
        assert all(isinstance(stage, RemoteStage) for stage in stages.values())
        assert [stage.enable_prefix_caching for stage in stages.values()] == [True, False, True]
        found = [omni.generate(prompt)[0] for prompt in PROMPTS]
        assert reported(found) == reported(expected)
        assert found[1].stages["writer"].num_cached_tokens > 0
        for ours, theirs in zip(found, expected, strict=True):
            rows = (each.stages["embedder"].tensors["pooled"] for each in (ours, theirs))
            torch.testing.assert_close(*rows)
    with pytest.raises(RuntimeError, match="stage 'writer' is closed"):
        again.stages["writer"].ownership.check()


@pytest.mark.parametrize("runtime", ["inline", RuntimeConfig(), None])
def test_requirements_that_one_process_cannot_meet_are_reported_once(
    runtime: str | RuntimeConfig | None, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"kind": "echo_in_tests", "final_output": "text"}
    placement = Placement(replicas=2, num_cpus=0.5)
    inputs = StageInputs(("first",), "text_as_prompt")
    echo = EchoConfig.model_validate(given | {"inputs": inputs, "placement": placement})
    with Omni(Pipeline([FakeStage("first"), echo.build_stage("echo")]), runtime=runtime) as omni:
        assert omni.generate("hm")[0].error is None
    assert caplog.messages == [
        "stages.echo.placement.replicas: 2 is not for runtime inline; left out",
        "stages.echo.placement.num_cpus: 0.5 is not for runtime inline; left out",
    ]


class Loud(AutoregressiveStage):
    """Declares no more than its base class."""


def of_an_engine(name: str) -> Stage:
    return AutoregressiveStage(name, LLMEngine(engine_config("seeded:qwen2")))


def of_arguments(name: str) -> Stage:
    return FakeStage(name)


def of_a_class_of_its_own(name: str) -> Stage:
    return Loud(name, engine_config("seeded:qwen2"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (of_an_engine, "given an engine that exists, .* give it the EngineConfig"),
        (of_arguments, "a FakeStage that was made of arguments .* have its StageConfig build it"),
        (of_a_class_of_its_own, r"a Loud that was made of arguments .* override configuration\(\)"),
    ],
)
def test_what_no_worker_can_build_is_reported_before_anything_is_closed(
    make: Callable[[str], Stage], message: str
) -> None:
    first = AutoregressiveStage("first", engine_config("seeded:qwen2"), sampling=GREEDY)
    pipeline = Pipeline([first, make("second")])
    with pytest.raises(ValueError, match=rf"^stage 'second': .*{message}"):
        Omni(pipeline, runtime="processes")
    with Omni(pipeline, runtime="inline") as omni:
        assert omni.generate("Hello")[0].stages["first"].text is not None


def test_a_pipeline_that_another_omni_runs_is_left_to_it() -> None:
    with Omni(composed()) as omni:
        with pytest.raises(RuntimeError, match="belongs to another Omni"):
            Omni(omni.pipeline, runtime="processes")
        assert reported(omni.generate(PROMPTS))

"""Kinds of stages that are not ours work in YAML as ours do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from typer.testing import CliRunner, Result

from omni.commands.cli import app
from omni.documents.document_error import ConfigError
from omni.pipelines.pipeline import Pipeline
from omni.pipelines.pipeline_config import PipelineConfig
from stages import (
    ModelReference,
    Stage,
    StageConfig,
    StageInputs,
    register_stage_kind,
    stage_config,
)
from tests.support.fake_stage import FakeStage
from tests.support.import_graph import ROOT

SHOUT = """\
name: loud
stages:
  first:
    kind: shout
    volume: 3
  second:
    kind: shout
    lexicon: seeded:qwen2
    inputs: {from: first, transform: text_as_prompt}
    final_output: text
"""
# What a process that finds a mistake never builds, it need not import: torch takes seconds.
PACKAGE = """\
from typing import Literal

from stages import StageConfig


class MurmurStageConfig(StageConfig):
    kind: Literal["murmur"]
    volume: int = 1

    def build_stage(self, name):
        from tests.support.fake_stage import FakeStage

        return FakeStage(name, steps=self.volume)


class OtherStageConfig(MurmurStageConfig):
    kind: Literal["other"]
"""


class ShoutStageConfig(StageConfig):
    """As a user would write it: keys of its own, and a second model."""

    takes_chunks: ClassVar[bool] = True

    kind: Literal["shout"]
    volume: int = 1
    lexicon: ModelReference | None = None

    def build_stage(self, name: str) -> Stage:
        assert self.lexicon is None or Path(self.lexicon).is_dir(), "models are resolved before"
        sources = self.inputs.sources if self.inputs else ()
        return FakeStage(name, sources, steps=self.volume, final=bool(self.final_output))


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch, checkpoint_cache: Path) -> None:
    monkeypatch.setattr(stage_config, "_KINDS", dict(stage_config._KINDS))
    register_stage_kind(ShoutStageConfig)


@pytest.fixture
def loud(tmp_path: Path) -> Path:
    path = tmp_path / "loud.yaml"
    path.write_text(SHOUT)
    return path


def omni(*arguments: str | Path) -> Result:
    return CliRunner().invoke(
        app, [str(argument) for argument in arguments], catch_exceptions=False
    )


def error_of(path: Path, **overrides: object) -> str:
    with pytest.raises(ConfigError) as caught:
        PipelineConfig.load(path, {f"stages.second.{key}": each for key, each in overrides.items()})
    return str(caught.value)


def test_its_settings_and_models_reach_its_stage(loud: Path) -> None:
    config = PipelineConfig.load(loud)
    assert config.stages["second"].inputs == StageInputs(("first",), "text_as_prompt")
    first, second = Pipeline.from_config(config).stages.values()
    assert isinstance(first, FakeStage) and isinstance(second, FakeStage)
    assert (first.steps, second.steps) == (3, 1)


def test_its_mistakes_are_told_as_those_of_our_kinds(loud: Path) -> None:
    assert "second.volum: unknown key; did you mean 'volume'?" in error_of(loud, volum=2)
    assert "second.volume: should be a valid integer, got '2'" in error_of(loud, volume="2")
    assert "did you mean 'llama'?" in error_of(loud, lexicon="seeded:lama")
    message = error_of(loud, kind="shut")
    assert "stages.second.kind: unknown kind 'shut'; did you mean 'shout'?" in message
    edge = {"from": "first", "transform": "text_as_prompt", "chunk_size": 1}
    assert "'first' is of kind 'shout'" in error_of(loud, inputs=edge)


def test_every_command_works_with_it(loud: Path) -> None:
    assert "loud.yaml: valid; stages: first, second" in omni("validate", loud).stdout
    explained = omni("explain", loud).stdout
    assert "first  ──text_as_prompt──► second => text" in explained
    assert "volume: 3" in explained
    assert "second(first(hi))" in omni("run", loud, "--prompt", "hi", "--quiet").stdout
    verified = omni("verify", loud, "--prompt", "hi")
    assert verified.exit_code == 3, verified.output  # it keeps nothing that could be hit


@pytest.mark.parametrize("kind", [str, Literal["a", "b"], Literal[3]])
def test_a_kind_is_one_name(kind: object) -> None:
    config = type("Nameless", (StageConfig,), {"__annotations__": {"kind": kind}})
    with pytest.raises(ValueError, match="Nameless must declare its kind as a Literal of one name"):
        register_stage_kind(config)


def test_a_kind_is_registered_once() -> None:
    assert register_stage_kind(ShoutStageConfig) is ShoutStageConfig
    other = type("Other", (StageConfig,), {"__annotations__": {"kind": Literal["encoder"]}})
    with pytest.raises(ValueError, match="'encoder' is registered already"):
        register_stage_kind(other)


@pytest.mark.parametrize(
    ("entry_point", "status", "expected"),
    [
        ("murmur = murmuring:MurmurStageConfig", 0, "murmurer(hi)"),
        ("murmur = murmuring:Nothing", 2, "kind 'murmur': 'murmuring:Nothing' cannot be loaded"),
        (
            "murmurs = murmuring:MurmurStageConfig",
            2,
            "unknown kind 'murmur'; did you mean 'murmurs'?",
        ),
        (
            "murmur = murmuring:OtherStageConfig",
            2,
            "'murmuring:OtherStageConfig' is of another kind",
        ),
    ],
)
def test_an_installed_package_brings_its_kinds(
    entry_point: str, status: int, expected: str, tmp_path: Path
) -> None:
    installed = tmp_path / "installed"
    (installed / "murmuring-1.0.dist-info").mkdir(parents=True)
    (installed / "murmuring.py").write_text(PACKAGE)
    about = installed / "murmuring-1.0.dist-info"
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: murmuring\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[omni_pipeline.stage_kinds]\n{entry_point}\n")
    config = tmp_path / "quiet.yaml"
    stage = "{kind: murmur, volume: 2, final_output: text}"
    config.write_text(f"name: quiet\nstages:\n  murmurer: {stage}\n")
    done = subprocess.run(
        [sys.executable, "-m", "omni", "run", config, "--prompt", "hi", "--quiet"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stderr
    assert expected in done.stdout + done.stderr

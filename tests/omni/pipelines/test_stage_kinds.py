"""Kinds of stages defined by users work in YAML like ours."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import ClassVar, Literal
from unittest.mock import patch

import pytest

from omni.pipelines.config_file import ConfigError
from omni.pipelines.pipeline import Pipeline
from omni.pipelines.pipeline_config import PipelineConfig
from stages import (
    AutoregressiveStageConfig,
    ModelReference,
    Stage,
    StageConfig,
    StageInputs,
    register_stage_kind,
    stage_config,
)
from tests.support.command_line import omni
from tests.support.fake_stage import FakeStage
from tests.support.tables import rows

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
# A process that finds a mistake need not import what it never builds: torch takes seconds.
PACKAGE = """\
from typing import Literal

from stages import StageConfig


class MurmurStageConfig(StageConfig):
    kind: Literal["murmur"]
    volume: int = 1

    def build_stage(self, name):
        from tests.support.fake_stage import FakeStage

        sources = () if self.inputs is None else self.inputs.sources
        transform = "text_as_prompt" if self.inputs is None else self.inputs.transform
        final = bool(self.final_output)
        return FakeStage(name, sources, transform=transform, steps=self.volume, final=final)


class OtherStageConfig(MurmurStageConfig):
    kind: Literal["other"]
"""


class ShoutStageConfig(StageConfig):
    """A config as a user would write it: custom keys, and a second model."""

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


def test_its_mistakes_are_reported_like_those_of_our_kinds(loud: Path) -> None:
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
    omni("verify", loud, "--prompt", "hi", status=3)


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


IN_FILE = (
    PACKAGE.replace("volume: int = 1", "volume: int = 1\n    words: Path | None = None").replace(
        "from typing", "from pathlib import Path\nfrom typing"
    )
    + """

def as_prompt(context):
    from engine import TextPrompt

    return TextPrompt(context.sources[0].text)
"""
)


def in_file(folder: Path, kind: str, module: str = "own") -> Path:
    """Write a pipeline whose kind and transform are in one file next to it."""
    (folder / f"{module}.py").write_text(IN_FILE)
    path = folder / "mine.yaml"
    path.write_text(
        "name: mine\nstages:\n"
        f"  first: {{kind: '{kind}', volume: 2, words: data/words.txt}}\n"
        f"  second: {{kind: '{kind}', final_output: text,\n"
        f"           inputs: {{from: first, transform: '{module}.py:as_prompt'}}}}\n"
    )
    return path


@pytest.mark.parametrize("kind", ["own.py:MurmurStageConfig", "own:MurmurStageConfig"])
def test_a_kind_may_be_in_a_file_beside_the_pipelines(kind: str, tmp_path: Path) -> None:
    path = in_file(tmp_path, kind)
    assert "valid; stages: first, second" in omni("validate", path).stdout
    assert "second(first(hi))" in omni("run", path, "--prompt", "hi", "--quiet").stdout
    message = error_of(path, volum=3)
    assert "second.volum: unknown key; did you mean 'volume'?" in message
    explained = omni("explain", path, "--no-load").stdout.partition("Every setting:\n\n")[2]
    assert f"kind: {tmp_path / 'own.py'}:MurmurStageConfig" in explained
    again = tmp_path / "elsewhere" / "again.yaml"
    again.parent.mkdir()
    again.write_text(explained)
    assert "valid; stages: first, second" in omni("validate", again).stdout


HALF = """\
from typing import Literal

from omni import Stage, StageConfig


class Half(Stage):
    def step(self):
        return []


class Base(Stage):
    pass


class HalfConfig(StageConfig):
    kind: Literal["half"]

    def build_stage(self, name) -> Half:
        return Half(name)


class UntypedConfig(HalfConfig):
    kind: Literal["untyped"]

    def build_stage(self, name):
        return Half(name)


class NoBuildConfig(StageConfig):
    kind: Literal["none"]
"""
MISSING = "class Half must define abort, add_request, "


@pytest.mark.parametrize(
    ("kind", "command", "printed"),
    [
        ("HalfConfig", "validate", "mine.yaml:2: stages.a.kind: kind 'half.py:HalfConfig': class "),
        ("HalfConfig", "validate", MISSING),
        ("NoBuildConfig", "validate", "class NoBuildConfig must define build_stage"),
        ("UntypedConfig", "run -p x", f"stage 'a': {MISSING}"),
        ("UntypedConfig", "run -p x --runtime processes", f"stage 'a': {MISSING}"),
    ],
)
def test_a_class_that_lacks_methods_is_named_with_them(
    kind: str, command: str, printed: str, tmp_path: Path
) -> None:
    (tmp_path / "half.py").write_text(HALF)
    path = tmp_path / "mine.yaml"
    path.write_text(f"name: m\nstages: {{a: {{kind: 'half.py:{kind}', final_output: text}}}}\n")
    name, *flags = command.split()
    assert printed in omni(name, path, *flags, status=2).stderr


def test_a_base_class_may_stand_for_the_stage_that_is_built(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text(
        HALF + "class Whole(Base):\n    pass\n"
        "class BaseConfig(StageConfig):\n    kind: Literal['base']\n"
        "    def build_stage(self, name) -> Base: ...\n"
    )
    path = tmp_path / "mine.yaml"
    path.write_text("name: m\nstages: {a: {kind: 'half.py:BaseConfig', final_output: text}}\n")
    assert omni("validate", path).exit_code == 0


def test_a_relative_path_starts_at_the_pipelines_file(tmp_path: Path) -> None:
    path = in_file(tmp_path, "own.py:MurmurStageConfig")
    config = PipelineConfig.load(path)
    for stage in (config.stages["first"], config.resolved("first")):
        assert stage.words == tmp_path / "data/words.txt"  # type: ignore[attr-defined]
    assert config.stages["second"].words is None  # type: ignore[attr-defined]
    absolute = PipelineConfig.load(path, {"stages.first.words": "/elsewhere"}).stages["first"]
    assert absolute.words == Path("/elsewhere")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "printed"),
    rows(f"""
own.py:MurmurStage | has no 'MurmurStage'; did you mean 'MurmurStageConfig'?
other.py:Murmur | kind 'other.py:Murmur': there is no file
other:Murmur | kind 'other:Murmur': module 'other' is not beside
own.py:Literal | kind 'own.py:Literal' is no subclass of omni.StageConfig
own.py:as_prompt | kind 'own.py:as_prompt' is no subclass of omni.StageConfig
own.py: | kind 'own.py:' must have the form
{"x" * 500} | unknown kind 'x{{80}}'; known are
murmurs | unknown kind 'murmurs'; .*file.py:Class.*'omni_pipeline.stage_kinds'
"""),
)
def test_a_file_without_that_kind_is_reported(kind: str, printed: str, tmp_path: Path) -> None:
    path = in_file(tmp_path, "own.py:MurmurStageConfig")
    assert re.search(f"overrides: stages.second.kind: .*{printed}", error_of(path, kind=kind))


def test_a_file_of_kinds_that_is_imported_may_hold_the_transforms_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = in_file(tmp_path, "murmur", "kinds_and_transforms")
    file = tmp_path / "kinds_and_transforms.py"
    text = file.read_text().replace("class Mur", "@register_stage_kind\nclass Mur")
    file.write_text(text.replace("import StageConfig", "import StageConfig, register_stage_kind"))
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("kinds_and_transforms")
    del sys.modules["kinds_and_transforms"]
    monkeypatch.setitem(sys.modules, "kinds_and_transforms", module)
    assert "second(first(hi))" in omni("run", path, "--prompt", "hi", "--quiet").stdout


@pytest.mark.parametrize(
    ("decorators", "printed"),
    rows("""
 | needs a transform that works chunk by chunk, which 'own:f' does not; mark .* @omni
@omni.requires(num_sources=1) | which 'own:f' does not; mark one that does with @omni
@requires('hidden_states') | which 'own:f' does not; mark one that does with @omni
@requires('codes') @chunkable | stage 'second' needs 'codes' of 'first' with its
@requires(num_sources=2) @chunkable | transform 'own:f' takes 2 source
"""),
)
def test_what_a_users_transform_declares_is_checked_before_a_model_is_loaded(
    decorators: str, printed: str, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(
        "import omni\nfrom omni import chunkable, requires\n"
        + "\n".join([*decorators.split(), "def f(context): ...\n"])
    )
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\nstages:\n"
        "  first: {kind: autoregressive, model: 'seeded:qwen2'}\n"
        "  second: {kind: autoregressive, model: 'seeded:qwen2_5_omni', part: talker,\n"
        "           final_output: text,\n"
        "           inputs: {from: first, transform: 'own.py:f', chunk_size: 4}}\n"
    )
    config = PipelineConfig.load(path)  # which runs nothing
    with (
        patch.object(AutoregressiveStageConfig, "build_stage", side_effect=AssertionError),
        pytest.raises(ValueError, match=printed),
    ):
        Pipeline.from_config(config)


@pytest.mark.parametrize(
    ("entry_point", "status", "expected"),
    [
        ("murmur = murmuring:MurmurStageConfig", 0, "murmurer(hi)"),
        ("murmur = murmuring:Nothing", 2, "kind 'murmur': 'murmuring:Nothing' cannot be loaded"),
        ("murmurs = murmuring:MurmurStageConfig", 2, "'murmur'; did you mean 'murmurs'?"),
        ("murmur = murmuring:OtherStageConfig", 2, "OtherStageConfig' is of another kind"),
    ],
)
def test_an_installed_package_brings_its_kinds(
    entry_point: str, status: int, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    monkeypatch.syspath_prepend(installed)
    monkeypatch.delitem(sys.modules, "murmuring", raising=False)
    done = omni("run", config, "--prompt", "hi", "--quiet", status=status)
    assert expected in done.stdout + done.stderr

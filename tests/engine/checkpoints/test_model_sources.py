"""A model may be named as a package brings it, in every place that takes a model."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from engine import EncoderEngine, EngineConfig, LLMEngine, SamplingParams, TokensPrompt
from engine.checkpoints import checkpoint
from engine.checkpoints.checkpoint import ENTRY_POINTS, Checkpoint, folder_of_source
from omni import AutoregressiveStage, Omni, Pipeline

LIMITS: dict[str, Any] = {"num_blocks": 32, "block_size": 4, "max_model_len": 32}


def bring(monkeypatch: pytest.MonkeyPatch, **objects: str) -> None:
    """Install packages that bring names of models."""
    found = EntryPoints(EntryPoint(name, value, ENTRY_POINTS) for name, value in objects.items())
    monkeypatch.setattr(checkpoint, "entry_points", lambda **chosen: found.select(**chosen))


def locate(reference: str) -> str:
    if reference != "made:up":
        raise ValueError(f"there is no model {reference!r}")
    return "/a/folder"


@pytest.mark.parametrize("model", ["org/name", "gpt2", "a folder", "C:/models/mine", "./x", ""])
def test_what_has_no_source_is_left_alone(model: str) -> None:
    assert folder_of_source(model) is None


def test_a_package_brings_names(monkeypatch: pytest.MonkeyPatch) -> None:
    bring(monkeypatch, made=f"{__name__}:locate")
    assert folder_of_source("made:up") == Path("/a/folder")
    with pytest.raises(ValueError, match="there is no model 'made:down'"):
        folder_of_source("made:down")


def test_a_source_that_is_not_there_is_told_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bring(monkeypatch, made=f"{__name__}:locate", torn="nowhere.at.all:locate")
    with pytest.raises(ValueError, match="'maid:up': no installed .* known are made:, torn:"):
        Checkpoint.open("maid:up")
    with pytest.raises(ValueError, match="'torn:x': 'nowhere.at.all:locate' cannot be loaded: Mod"):
        Checkpoint.open("torn:x")


def test_a_folder_of_such_a_name_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring(monkeypatch, made=f"{__name__}:locate")
    monkeypatch.chdir(tmp_path)
    Path("made:up").mkdir()
    with pytest.raises(ValueError, match="config.json"):
        Checkpoint.open("made:up")


@pytest.mark.usefixtures("checkpoint_cache")
def test_the_seeded_models_are_known_by_name_wherever_a_model_is() -> None:
    prompt, greedy = TokensPrompt((5, 6, 7)), SamplingParams(temperature=0.0, max_tokens=3)
    config = EngineConfig(model="seeded:qwen2", **LIMITS)
    said = LLMEngine(config).generate(prompt, greedy)[0].outputs[0].token_ids
    with Omni(Pipeline([AutoregressiveStage("writer", config, sampling=greedy)])) as omni:
        assert omni.generate(prompt)[0].stages["writer"].token_ids == said
    assert EncoderEngine(EngineConfig(model="seeded:bert", **LIMITS)).hidden_size
    with pytest.raises(ValueError, match="unknown seeded model 'seeded:qwne2'"):
        LLMEngine(EngineConfig(model="seeded:qwne2"))

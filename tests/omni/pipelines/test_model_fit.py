"""Errors of a pipeline's models that are found before any of them is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from engine import EngineConfig, LLMEngine
from engine.models.registry import ENTRY_POINTS, FAMILIES, FamilyRegistry
from omni import Omni
from omni.pipelines.config_file import ConfigError
from omni.pipelines.pipeline_config import PipelineConfig
from omni.seeded.checkpoints import SEEDED_MODELS
from prefix_cache import ENCODER_HIDDEN_STATES
from stages.model_fit import family_row

PIPELINE = """\
name: mine
stages:
  writer:
    kind: {kind}
    model: {model}
    part: {part}
    final_output: {final}
"""
FINAL = {"autoregressive": "text", "encoder": "tensors", "generator": "audio"}
BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
QWEN = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
VOCODER = {"model_type": "mine", "architectures": ["Qwen2_5OmniToken2WavModel"]}
WHOLE = {"model_type": "qwen2_5_omni", "architectures": ["Qwen2_5OmniModel"]}

FITS: dict[str, tuple[Any, str, str]] = {
    "a decoder": (QWEN, "autoregressive", "null"),
    "an embedding model that is a decoder": (QWEN, "encoder", "null"),
    "a text encoder": (BERT, "encoder", "null"),
    "a vocoder": (VOCODER, "generator", "null"),
    "a thinker": (WHOLE, "autoregressive", "thinker"),
    "a vocoder of several": (WHOLE, "generator", "code2wav"),
    "a config that says nothing": ({}, "autoregressive", "x"),
    "architectures that are none": ({"architectures": 3}, "autoregressive", "null"),
    "no architectures": ({"architectures": []}, "generator", "null"),
    "a model type that is a list": ({"model_type": ["x"]}, "autoregressive", "null"),
    "a config that is a list": ([], "autoregressive", "null"),
    "a config that is no JSON": ("{", "autoregressive", "null"),
    "a config that is deep": ("[" * 100_000, "autoregressive", "null"),
}
MISFITS: dict[str, tuple[Any, str, str, str]] = {
    "an encoder as a decoder": (
        BERT, "autoregressive", "null",
        "stages.writer.kind: model 'm': architecture 'BertForMaskedLM' is none that generates "
        "tokens here; if it is a text encoder, use kind: encoder",
    ),
    "a vocoder as a decoder": (
        VOCODER, "autoregressive", "null",
        "stages.writer.kind: model 'm': architecture 'Qwen2_5OmniToken2WavModel' makes sound of "
        "codes; use kind: generator",
    ),
    "a decoder as a vocoder": (
        QWEN, "generator", "null",
        "stages.writer.kind: model 'm': architecture 'Qwen2ForCausalLM' generates tokens; use "
        "kind: autoregressive",
    ),
    "a thinker as a vocoder": (
        WHOLE, "generator", "thinker",
        "stages.writer.kind: model 'm': part 'thinker' generates tokens; use kind: autoregressive",
    ),
    "a vocoder of several as a decoder": (
        WHOLE, "autoregressive", "code2wav",
        "stages.writer.kind: model 'm': part 'code2wav' makes sound of codes; use kind: generator",
    ),
    "a part of a misspelt name": (
        WHOLE, "autoregressive", "thinkr",
        "stages.writer.part: model 'm': the checkpoint has no part 'thinkr', but thinker, talker, "
        "code2wav; did you mean 'thinker'?",
    ),
    "no part of several": (
        WHOLE, "autoregressive", "null",
        "stages.writer.part: model 'm': missing; the checkpoint holds several models: thinker",
    ),
    "a part of one": (
        QWEN, "autoregressive", "thinker",
        "stages.writer.part: model 'm': got 'thinker', but the checkpoint is one model without "
        "parts: leave it out",
    ),
}  # fmt: skip


def load(folder: Path, config: Any, kind: str, part: str) -> PipelineConfig:
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "m").mkdir()
    (folder / "m/config.json").write_text(text)
    file = folder / "mine.yaml"
    file.write_text(PIPELINE.format(kind=kind, model="m", part=part, final=FINAL[kind]))
    return PipelineConfig.load(file)


@pytest.mark.parametrize("case", FITS)
def test_a_model_that_may_fit_is_left_alone(case: str, tmp_path: Path) -> None:
    assert load(tmp_path, *FITS[case]).stages["writer"].kind == FITS[case][1]


@pytest.mark.parametrize("case", MISFITS)
def test_a_model_that_cannot_fit_is_reported_with_its_line(case: str, tmp_path: Path) -> None:
    config, kind, part, message = MISFITS[case]
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, config, kind, part)
    assert message in str(raised.value).replace(f"{tmp_path}/m'", "m'")
    assert "mine.yaml:" in str(raised.value)


@pytest.mark.parametrize(
    ("model", "kind", "part", "message"),
    [
        ("seeded:bert", "autoregressive", "null", "use kind: encoder"),
        ("seeded:qwen2_5_omni", "autoregressive", "talkr", "did you mean 'talker'?"),
        ("seeded:gemma3", "autoregressive", "thinker", "one model without parts"),
    ],
)
def test_a_seeded_model_need_not_be_built_for_that(
    model: str, kind: str, part: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNI_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "mine.yaml"
    file.write_text(PIPELINE.format(kind=kind, model=model, part=part, final=FINAL[kind]))
    with pytest.raises(ConfigError, match=message):
        PipelineConfig.load(file)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", ["qwen2", "gemma3", "gemma3_vision", "t5", "qwen2_5_omni", "bert"])
def test_a_seeded_model_matches_its_description(name: str, seeded: Callable[[str], str]) -> None:
    built = json.loads(Path(seeded(name), "config.json").read_text())
    says = SEEDED_MODELS[name].known_fields
    assert {key: built[key] for key in says} == dict(says)


def test_a_model_on_the_hub_is_looked_at_if_it_was_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--org--bert/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(BERT))
    (tmp_path / "models--org--bert/refs").mkdir()
    (tmp_path / "models--org--bert/refs/main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    for model, wrong in (("org/bert", True), ("org/other", False)):
        file = tmp_path / "mine.yaml"
        text = PIPELINE.format(kind="autoregressive", model=model, part="null", final="text")
        file.write_text(text)
        if not wrong:
            PipelineConfig.load(file)
            continue
        with pytest.raises(ConfigError, match="use kind: encoder"):
            PipelineConfig.load(file)


def test_what_other_packages_may_bring_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def some(**query: str) -> list[str]:
        asked.append(query["group"])
        return ["an entry point, which is not loaded"]

    monkeypatch.setattr("engine.models.registry.entry_points", some)
    monkeypatch.setattr(FAMILIES, "_failures", None)
    load(tmp_path, QWEN | {"architectures": ["MineForCausalLM"]}, "autoregressive", "null")
    assert asked == [ENTRY_POINTS]


def test_parts_are_known_by_their_names_without_and_with_torch() -> None:
    registry = FamilyRegistry(dict.fromkeys(FAMILIES.rows.values()))
    names = ["thinker", "talker", "code2wav"]
    assert list(registry.known_parts("qwen2_5_omni")) == names
    assert [part.name for part in registry.parts_of({"model_type": "qwen2_5_omni"})] == names


def test_outputs_that_a_transform_needs_are_missed_without_a_model() -> None:
    for outputs in ([], ["pooled"]):
        with pytest.raises(ConfigError) as raised:
            PipelineConfig.load("two_step", {"stages.writer.outputs": outputs})
        assert (
            f"overrides: stages.writer.outputs: {outputs} is not what stage 'reader' needs with "
            "its transform 'hidden_states_as_prompt_embeds': add 'hidden_states' to them"
        ) in str(raised.value)
    PipelineConfig.load("two_step", {"stages.writer.outputs": None})


def test_outputs_that_a_model_does_not_emit_are_missed_without_it() -> None:
    for outputs in (["hidden_states", "hidden_statez"], ["hidden_states", "pooled"]):
        with pytest.raises(ConfigError, match="outputs: model 'seeded:qwen2': the model has no "):
            PipelineConfig.load("two_step", {"stages.writer.outputs": outputs})


def test_what_a_transform_needs_and_no_model_emits_is_missed_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNI_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "codes.py").write_text(
        "from omni import TextPrompt, requires\n"
        "@requires('codes')\n"
        "def from_codes(context):\n"
        "    return TextPrompt('x')\n"
    )
    file = tmp_path / "mine.yaml"
    file.write_text(
        "name: mine\nstages:\n"
        "  writer: {kind: autoregressive, model: 'seeded:qwen2'}\n"
        "  reader: {kind: autoregressive, model: 'seeded:qwen2', final_output: text,\n"
        "           inputs: {from: writer, transform: 'codes.py:from_codes'}}\n"
    )
    with pytest.raises(ValueError, match="needs 'codes' of 'writer' .* emits hidden"):
        Omni(file)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("qwen2", None),
        ("jamba", None),
        ("bart", None),
        ("whisper", None),
        ("mllama", None),
        ("llava", None),
        ("gemma3_vision", None),
        ("qwen2_5_vl", None),
        ("qwen3_vl", None),
        ("qwen2_5_omni", "thinker"),
        ("qwen2_5_omni", "talker"),
    ],
)
def test_the_table_names_what_models_take_and_emit(
    name: str, part: str | None, seeded: Callable[[str], str]
) -> None:
    folder = seeded(name)
    config = json.loads(Path(folder, "config.json").read_text())
    settings = EngineConfig(model=folder, part=part, device="cpu", num_blocks=64, max_model_len=64)
    with closing(LLMEngine(settings)) as engine:
        emitted = set(engine.memory_plan.stage_output_bytes)
        emitted |= {ENCODER_HIDDEN_STATES} if engine.is_encoder_decoder else set()
        taken = engine.describe().get("input_modalities", ())
    row = family_row(config, part)
    assert row is not None
    assert row.outputs == tuple(sorted(emitted))
    # Seeded checkpoints have files for all modalities of their models.
    assert set(row.modalities) == set(taken)

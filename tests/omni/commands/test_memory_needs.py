"""Memory estimates before loading equal the memory in use after it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pytest
from gguf import GGMLQuantizationType as Kind

from engine import GeneratorConfig, GeneratorEngine
from engine.checkpoints.quantized_weight import SCHEMES
from engine.layers import Linear
from omni.commands.explanation import describe_needs, estimate_stage
from omni.pipelines.pipeline import Pipeline
from omni.pipelines.pipeline_config import PipelineConfig
from tests.support.gguf_files import write_gguf
from tests.support.packed_checkpoints import PACKED, write_packed

Seeded: TypeAlias = Callable[[str], str]

FORMATS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "int4": {"dtype": "float32", "quantization": "int4"},
}
ENCODER_FORMATS = [("qwen2_5_omni", "thinker", "int8"), ("whisper", None, "int4")]
LOADED = (
    ("autoregressive", "qwen2", None, tuple(FORMATS)),
    ("autoregressive", "jamba", None, ("int4",)),
    ("autoregressive", "qwen2_5_omni", "talker", ("float32",)),
    ("generator", "qwen2_5_omni", "code2wav", ("float32",)),
)


def pipeline(kind: str, model: str, part: str | None, **engine: Any) -> PipelineConfig:
    sized = {} if kind == "generator" else {"max_model_len": 64, "num_blocks": 20, **engine}
    out = {"encoder": "tensors", "generator": "audio"}.get(kind, "text")
    engine = {"device": "cpu", **sized}
    stage = {"kind": kind, "model": model, "part": part, "engine": engine, "final_output": out}
    return PipelineConfig.model_validate({"name": "needs", "stages": {"only": stage}})


def held_by(config: PipelineConfig) -> tuple[int, int]:
    """Bytes of weights and pages in the loaded engine of the only stage."""
    with closing(Pipeline.from_config(config)) as loaded:
        engine: Any = loaded.stages["only"].engine  # type: ignore[attr-defined]
        plan = getattr(engine, "memory_plan", None)
        if plan is None:
            return engine._model.nbytes, 0
        return plan.weights_bytes, plan.kv_cache_bytes


@pytest.mark.usefixtures("checkpoint_cache")
@pytest.mark.parametrize(("name", "part", "form"), ENCODER_FORMATS)
def test_quantized_encoders_are_estimated(name: str, part: str | None, form: str) -> None:
    config = pipeline("autoregressive", f"seeded:{name}", part, encoder_quantization=form)
    known = estimate_stage(config.stages["only"])
    assert known["float32"].weights == pytest.approx(held_by(config)[0], rel=0.02)


@pytest.mark.usefixtures("checkpoint_cache")
@pytest.mark.parametrize(("kind", "name", "part", "forms"), LOADED)
def test_estimated_weights_and_pages_equal_those_of_the_loaded_engine(
    kind: str, name: str, part: str | None, forms: tuple[str, ...]
) -> None:
    known = estimate_stage(pipeline(kind, f"seeded:{name}", part).stages["only"])
    assert list(known) == (
        list(FORMATS) if kind == "autoregressive" else ["float32", "int8", "int4"]
    )
    for form in forms:
        weights, pages = held_by(pipeline(kind, f"seeded:{name}", part, **FORMATS[form]))
        assert known[form].weights == pytest.approx(weights, rel=0.02), form
        assert known[form].pages == pages


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_quantized_vocoders_are_estimated(form: Literal["int8", "int4"], seeded: Seeded) -> None:
    folder = seeded("qwen2_5_omni")
    known = estimate_stage(pipeline("generator", folder, "code2wav").stages["only"])
    config = GeneratorConfig(model=folder, part="code2wav", device="cpu", quantization=form)
    with closing(GeneratorEngine(config)) as engine:
        linears = [x for x in engine._model.modules() if isinstance(x, Linear)]
        # Kernels pad the narrow matrices of a tiny model.
        padding = sum(
            sum(packed.nbytes for packed in x._packed)
            - SCHEMES[form].nbytes(x.out_features, x.in_features)
            for x in linears
        )
        assert known[form].weights == pytest.approx(engine._model.nbytes - padding, rel=0.02)


def folder_of(form: str, source: str, tmp_path: Path) -> Path:
    """A checkpoint whose weights are stored quantized."""
    if form == "GGUF":
        kinds = {"up_proj": Kind.Q4_0, "embed_tokens": Kind.Q8_0, "down_proj": Kind.F16}
        return write_gguf(
            source, tmp_path / "a.gguf", lambda name: kinds.get(name.split(".")[-2], Kind.Q8_0)
        )
    return write_packed(source, tmp_path / "packed", PACKED[form], tmp_path / "plain")


@pytest.mark.parametrize("form", ["GGUF", "GPTQ"])
def test_a_quantized_file_is_estimated_in_its_loaded_form(
    form: str, seeded: Callable[[str], str], tmp_path: Path
) -> None:
    config = pipeline("autoregressive", str(folder_of(form, seeded("qwen2"), tmp_path)), None)
    ((stored, estimate),) = estimate_stage(config.stages["only"]).items()
    assert stored.startswith(form)
    assert estimate.weights == pytest.approx(held_by(config)[0], rel=0.02)


@pytest.mark.parametrize(("name", "part"), [("qwen2_5_omni", "thinker"), ("bert", None)])
def test_the_config_alone_is_enough(
    name: str, part: str | None, seeded: Callable[[str], str], tmp_path: Path
) -> None:
    kind = "encoder" if part is None else "autoregressive"
    shutil.copy(Path(seeded(name), "config.json"), tmp_path)
    alone, whole = (
        estimate_stage(pipeline(kind, str(folder), part).stages["only"])
        for folder in (tmp_path, seeded(name))
    )
    assert alone == whole


@pytest.mark.usefixtures("checkpoint_cache")
def test_a_pipeline_fits_in_the_formats_that_are_small_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = PipelineConfig.load("two_step")
    least = [
        sum(estimate_stage(stage)[form].least for stage in config.stages.values())
        for form in FORMATS
    ]
    for free in sorted(least):
        monkeypatch.setattr("omni.commands.explanation.free_bytes", lambda device, n=free: n)
        verdicts = re.findall(r"^  together .*  (fits|does not fit)$", describe_needs(config), re.M)
        assert verdicts == ["fits" if each <= free else "does not fit" for each in least]


@pytest.mark.usefixtures("checkpoint_cache")
def test_a_model_without_a_local_config_is_named_and_the_others_are_estimated() -> None:
    stages = {
        "far": {"kind": "autoregressive", "model": "nobody/has-this", "final_output": "text"},
        "near": {"kind": "autoregressive", "model": "seeded:qwen2", "final_output": "text"},
    }
    reported = describe_needs(PipelineConfig.model_validate({"name": "two", "stages": stages}))
    assert "far is left out: model 'nobody/has-this' is no folder here" in reported
    assert len(re.findall(r"^  near ", reported, re.M)) == len(FORMATS)
    assert "fits" not in reported, "the total is unknown"

"""Model families of other packages: this file declares two and runs both by ``omni run``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlavaConfig,
    PreTrainedConfig,
)
from typer.testing import CliRunner

from engine import (
    CausalModel,
    Checkpoint,
    DecoderConfig,
    EngineConfig,
    ItemTower,
    LLMEngine,
    ModelFamily,
    ModelSettings,
    MultiModalModel,
    MultiModalPromptProcessor,
    SamplingParams,
    TokensPrompt,
    build_decoder,
    decoder_family,
    register_model_family,
)
from engine.models.decoders.decoder import LayerKind
from engine.models.registry import FAMILIES, FamilyRegistry, imported
from engine.requests.encoder_input import MultiModalInput

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = ModelSettings(torch.float32, torch.device("cpu"), 4, 64)
PLACEHOLDER, SIDE, PATCH = 60, 8, 4
COMMON = {
    "words": 64,
    "width": 32,
    "depth": 2,
    "heads": 4,
    "head_dim": 8,
    "positions": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}


class LadderConfig(PreTrainedConfig):
    model_type = "made_up_ladder"
    attribute_map: ClassVar = {"hidden_size": "width", "max_position_embeddings": "positions"}


class PeepholeConfig(PreTrainedConfig):
    model_type = "made_up_peephole"


def read_config(config: Any) -> DecoderConfig:
    return DecoderConfig(
        hidden_size=config.width,
        intermediate_size=2 * config.width,
        layers=(LayerKind(),) * config.depth,
        num_heads=config.heads,
        num_kv_heads=config.heads // 2,
        head_dim=config.head_dim,
        vocab_size=config.words,
        max_position_embeddings=config.positions,
        activation="silu",
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        attention_scale=config.head_dim**-0.5,
        qk_norm=True,
    )


class Peephole(ItemTower):
    """A tower with one row for each quarter of a picture."""

    feature_names = ("pixel_values",)

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3 * PATCH * PATCH, width), requires_grad=False)

    def targets(self, stored: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        yield "peephole.weight", self.weight.data

    def num_rows(self, features: Mapping[str, Tensor]) -> int:
        self.require_features(features)
        return (SIDE // PATCH) ** 2

    def forward(self, inputs: Sequence[MultiModalInput]) -> list[Tensor]:
        pixels = torch.stack([item.features["pixel_values"] for item in inputs])
        patches = nn.functional.unfold(pixels, PATCH, stride=PATCH).transpose(1, 2)
        return list(patches @ self.weight)


def build_peephole(checkpoint: Checkpoint, settings: ModelSettings) -> MultiModalModel:
    return peephole(checkpoint.config, settings, checkpoint.weight_files)


def peephole(config: Any, settings: ModelSettings, stored: Collection[str]) -> MultiModalModel:
    decoder = build_decoder(read_config, config, settings)
    return MultiModalModel(
        decoder, {"image": Peephole(config.width)}, {"image": config.hole}, stored
    )


def positions(config: Any) -> int:
    return config.positions


LADDER = decoder_family(
    "ladder",
    ("LadderForCausalLM",),
    read_config,
    config_class=LadderConfig,
    max_positions=positions,
)
PEEPHOLE = ModelFamily(
    "peephole",
    ("PeepholeForConditionalGeneration",),
    build=build_peephole,
    prompts=MultiModalPromptProcessor,
    config_class=PeepholeConfig,
    max_positions=positions,
)


def save(folder: Path, family: ModelFamily, model: CausalModel, config: PreTrainedConfig) -> Path:
    folder.mkdir()
    config.architectures = list(family.architectures)
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(7)
    weights = {
        name: torch.randn(tensor.shape, generator=generator) * 0.3
        for name, tensor in model.targets("model.")
    }
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LadderConfig(**COMMON)
    model = build_decoder(read_config, config, SETTINGS)
    return save(tmp_path_factory.mktemp("made_up") / "ladder", LADDER, model, config)


@pytest.fixture(scope="module")
def keyhole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = PeepholeConfig(**(COMMON | {"hole": PLACEHOLDER}))
    model = peephole(config, SETTINGS, {"model.embed_tokens.weight", "lm_head.weight"})
    folder = save(tmp_path_factory.mktemp("made_up") / "peephole", PEEPHOLE, model, config)
    size = {"height": SIDE, "width": SIDE}
    CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=size).save_pretrained(folder)
    return folder


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FAMILIES, "_added", {})
    register_model_family(LADDER)
    register_model_family(PEEPHOLE)


def run_files(folder: Path, model: Path, requests: Sequence[dict[str, Any]]) -> list[str]:
    """Return arguments of ``omni run``, except for its output folder."""
    stage = {
        "kind": "autoregressive",
        "model": str(model),
        "engine": {"device": "cpu", "block_size": 4, "num_blocks": 64, "max_num_seqs": 1},
        "sampling": {"temperature": 0.0, "max_tokens": 6},
        "outputs": ["hidden_states"],
        "final_output": "tensors",
    }
    config = folder / "pipeline.yaml"
    config.write_text(json.dumps({"name": "made_up", "stages": {"only": stage}}))
    lines = folder / "requests.jsonl"
    lines.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return ["run", str(config), "--input", str(lines), "--output-dir"]


UNCACHED = ["--set", "stages.only.engine.enable_prefix_caching=false"]


def omni(*arguments: str) -> None:
    from omni.commands.cli import app

    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output


def results(folder: Path) -> list[tuple[list[int], Tensor, int]]:
    """Return tokens, rows and number of cached tokens of each request."""
    found = []
    for line in (folder / "outputs.jsonl").read_text("utf-8").splitlines():
        output = json.loads(line)["stages"]["only"]
        (rows,) = load_file(folder / output["tensors"]["hidden_states"]).values()
        found.append((output["token_ids"], rows, output["num_cached_tokens"]))
    return found


def check_equal(cached: Path, uncached: Path) -> None:
    pairs = list(zip(results(cached), results(uncached), strict=True))
    for (tokens, rows, _), (expected_tokens, expected_rows, num_cached) in pairs:
        assert tokens == expected_tokens and len(tokens) == 6 and num_cached == 0
        torch.testing.assert_close(rows, expected_rows, atol=1e-5, rtol=0)
    # Of the two that share a block, the one that came second.
    has_hit = [cached > 0 for (_, _, cached), _ in pairs]
    assert sorted(has_hit[:2]) == [False, True] and not has_hit[2]


def test_a_registered_decoder_runs_cached_as_uncached(
    registered: None, ladder: Path, tmp_path: Path
) -> None:
    shared = list(range(1, 15))
    prompts = [[*shared, 20], [*shared, 21], [30, 31, 32]]
    arguments = run_files(tmp_path, ladder, [{"prompt_token_ids": ids} for ids in prompts])
    omni(*arguments, str(tmp_path / "cached"))
    omni(*arguments, str(tmp_path / "uncached"), *UNCACHED)
    check_equal(tmp_path / "cached", tmp_path / "uncached")


def write_distribution(folder: Path, *entries: str) -> dict[str, str]:
    """Write a distribution with entry points in this file; return an environment with both."""
    info = folder / "made_up-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: made-up\nVersion: 1.0\n")
    lines = "\n".join(entries)
    (info / "entry_points.txt").write_text(f"[omni_pipeline.model_families]\n{lines}\n")
    path = os.pathsep.join([str(folder), str(Path(__file__).parent), str(ROOT)])
    return os.environ | {"PYTHONPATH": path}


def test_a_multimodal_family_of_an_entry_point_runs_cached_as_uncached(
    registered: None, keyhole: Path, tmp_path: Path
) -> None:
    environment = write_distribution(
        tmp_path / "site", "peephole = test_model_families:PEEPHOLE", "broken = nothing_here:X"
    )
    pictures = []
    for color in ("teal", "orange"):
        pictures.append(str(tmp_path / f"{color}.png"))
        Image.new("RGB", (SIDE, SIDE), color).save(pictures[-1])
    ids = [1, 2, PLACEHOLDER, 3, 4, 5, 6, 7]
    asks = ((8, pictures[0]), (9, pictures[0]), (8, pictures[1]))
    requests = [{"prompt_token_ids": [*ids, last], "images": [image]} for last, image in asks]
    arguments = run_files(tmp_path, keyhole, requests)
    command = [sys.executable, "-m", "omni", *arguments, str(tmp_path / "cached")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "entry point broken = nothing_here:X of distribution made-up" in done.stderr
    omni(*arguments, str(tmp_path / "uncached"), *UNCACHED)
    # The last request differs in its picture alone, and shares no block.
    check_equal(tmp_path / "cached", tmp_path / "uncached")
    first, _, other = results(tmp_path / "cached")
    assert not torch.equal(first[1][2:6], other[1][2:6]), "the picture makes no difference"


def test_other_families_build_on_a_decoder_by_its_model_type(registered: None) -> None:
    assert LADDER.name != LadderConfig.model_type
    assert FAMILIES.decoder_config_of(LadderConfig(**COMMON)) is read_config
    known_to_transformers = decoder_family(
        "rungs", ("GraniteForCausalLM",), read_config, model_type="granite"
    )
    register_model_family(known_to_transformers)
    assert FAMILIES.decoder_config_of(AutoConfig.for_model("granite")) is read_config


def test_a_family_of_ours_is_built_on_a_decoder_from_outside(
    registered: None, tmp_path: Path
) -> None:
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
    )
    text = LadderConfig(**(COMMON | {"tie_word_embeddings": False}))
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=PLACEHOLDER)
    family = FAMILIES.find("LlavaForConditionalGeneration")
    assert family is not None and family.build is not None
    settings = replace(SETTINGS, decoder_config_of=FAMILIES.decoder_config_of)
    stored = ("model.embed_tokens", "lm_head", "multi_modal_projector.linear_1")
    given: Any = SimpleNamespace(config=config, weight_files={f"{n}.weight": None for n in stored})
    model = family.build(given, settings)
    folder = save(tmp_path / "llava", family, model, config)
    size = {"height": SIDE, "width": SIDE}
    CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=size).save_pretrained(folder)
    engine = LLMEngine(EngineConfig(model=str(folder), device="cpu", block_size=4, num_blocks=32))
    pictures = [Image.new("RGB", (SIDE, SIDE), color) for color in ("teal", "orange")]
    outputs = engine.generate(
        [TokensPrompt((1, PLACEHOLDER, 2), {"image": [each]}) for each in pictures],
        SamplingParams(temperature=0.0, max_tokens=3),
    )
    assert [output.num_prompt_tokens for output in outputs] == [2 + (SIDE // PATCH) ** 2] * 2
    rows = [output.outputs[0].tensors["hidden_states"][-1] for output in outputs]
    assert not torch.allclose(*rows), "the decoder saw no picture"


@pytest.mark.parametrize("model_type", ["granite", "gemma2", "made_up_peephole"])
def test_the_error_for_an_unsupported_decoder_lists_the_supported_ones(
    registered: None, model_type: str
) -> None:
    config = AutoConfig.for_model(model_type)
    message = f"on a decoder of type '{model_type}'; supported are llama, made_up_ladder, mistral"
    with pytest.raises(ValueError, match=message):
        FAMILIES.decoder_config_of(config)


def test_an_architecture_has_one_family(registered: None) -> None:
    register_model_family(LADDER)
    taken = decoder_family("stairs", LADDER.architectures, read_config)
    with pytest.raises(ValueError, match="'LadderForCausalLM' of model family 'stairs'.*'ladder'"):
        register_model_family(taken)
    llamas = decoder_family("alpaca", ("AlpacaForCausalLM", "LlamaForCausalLM"), read_config)
    with pytest.raises(ValueError, match="'LlamaForCausalLM'.*belongs to the family 'llama'"):
        register_model_family(llamas)
    assert FAMILIES.find("AlpacaForCausalLM") is None, "half a family was added"
    with pytest.raises(ValueError, match="a model family is a ModelFamily, got str"):
        register_model_family("ladder")


def test_a_model_type_has_one_config(registered: None) -> None:
    class OtherConfig(PreTrainedConfig):
        model_type = "made_up_ladder"

    other = decoder_family("other", ("OtherForCausalLM",), read_config, config_class=OtherConfig)
    with pytest.raises(ValueError, match="model_type 'made_up_ladder' of model family 'other'"):
        register_model_family(other)


def test_a_family_says_how_one_thing_is_made() -> None:
    with pytest.raises(ValueError, match="give build= .* or generator="):
        ModelFamily("nothing", ("NothingForCausalLM",))
    with pytest.raises(ValueError, match="names no architecture"):
        decoder_family("nameless", (), read_config)


def test_the_error_for_an_unknown_architecture_names_broken_entry_points(
    ladder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "clash.py").write_text(
        "from engine import decoder_family\n"
        "from engine.models.decoders.families import llama_config\n"
        "LLAMA = decoder_family('mine', ('LlamaForCausalLM',), llama_config)\n"
    )
    write_distribution(tmp_path, "clash = clash:LLAMA")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(FAMILIES, "_added", {})
    monkeypatch.setattr(FAMILIES, "_failures", None)
    broken = r"entry point clash = .* of distribution made-up brings no model family: architecture"
    with pytest.raises(ValueError, match=f"unsupported architecture 'Ladder.*{broken}"):
        LLMEngine(EngineConfig(model=str(ladder), device="cpu", num_blocks=8))


@pytest.mark.parametrize(
    "row", dict.fromkeys(FAMILIES.rows.values()), ids=lambda row: row.architectures[0]
)
def test_the_families_of_the_table_exist(row: Any) -> None:
    family = row.load()
    assert family.makes_sound == row.makes_sound and family.base_type == row.base_type
    assert row.speakers is None or callable(imported(row.speakers))


def test_the_table_names_each_architecture_once() -> None:
    rows = set(FAMILIES.rows.values())
    assert sum(len(row.architectures) for row in rows) == len(FAMILIES.rows)
    assert FamilyRegistry(rows).architectures() != ()

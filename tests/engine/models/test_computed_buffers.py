"""Computed buffers come out as they are, and may be stored under their old names."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniToken2WavBigVGANModel,
)

from engine.checkpoints.config_file import hidden_progress_bars, quiet_config_log
from engine.models.base import ModelSettings
from engine.models.encoder_module import build_empty, make_unplaced, place
from engine.models.model_loader import is_supported, load_generator, load_model, open_checkpoint
from tests.support.published_layout import publish

OMNI = "qwen2_5_omni"
FAMILIES = [
    *("qwen2", "qwen3", "llama", "mistral", "ministral", "gemma2", "gemma3", "jamba", "bamba"),
    *("bart", "t5", "whisper", "mllama", "llava", "qwen2_5_vl"),
]
MODELS = [*((name, None) for name in FAMILIES), *((OMNI, p) for p in ("thinker", "code2wav"))]
SETTINGS = ModelSettings(torch.float32, torch.device("cpu"), 4, 64, pack_weights=False)


def load(folder: str | Path, part: str | None) -> Mapping[str, Tensor]:
    """All tensors of a model: its weights, and what it computes."""
    checkpoint = open_checkpoint(folder, part=part)
    model = (
        load_model(checkpoint, SETTINGS)
        if is_supported(checkpoint.architecture)
        else load_generator(checkpoint, torch.device("cpu"))
    )
    return dict(model.named_parameters()) | dict(model.named_buffers())


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.fixture(scope="module")
def with_all_buffers(
    seeded: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, int]]:
    """A checkpoint in which transformers has stored all buffers, as 7; and how many there are."""

    def build(name: str) -> tuple[Path, int]:
        folder = tmp_path_factory.mktemp(name) / "checkpoint"
        shutil.copytree(seeded(name), folder)
        with quiet_config_log(), hidden_progress_bars():
            (architecture,) = AutoConfig.from_pretrained(folder).architectures
            model: Any = getattr(transformers, architecture).from_pretrained(folder)
            stored = set(model.state_dict())
            for module in model.modules():
                module._non_persistent_buffers_set.clear()
            computed = [buffer for key, buffer in model.named_buffers() if key not in stored]
            for buffer in computed:
                buffer.fill_(7)
            model.save_pretrained(folder)
        return folder, len(computed)

    return build


@pytest.mark.parametrize(("name", "part"), MODELS)
def test_a_checkpoint_that_stores_all_computed_buffers_loads_as_one_that_stores_none(
    name: str,
    part: str | None,
    seeded: Callable[[str], str],
    with_all_buffers: Callable[[str], tuple[Path, int]],
):
    folder, count = with_all_buffers(name)
    before = len(load_file(Path(seeded(name)) / "model.safetensors"))
    assert len(load_file(folder / "model.safetensors")) == before + count
    assert count or name in ("jamba", "t5", "bart", "whisper"), "nothing was tried"
    assert_same(load(folder, part), load(seeded(name), part))


OLD_NAMES = [
    ("qwen2", None, "model.layers.1.self_attn.rotary_emb.inv_freq"),
    ("llama", None, "model.layers.0.self_attn.rotary_emb.inv_freq"),
    ("mllama", None, "language_model.model.layers.0.self_attn.rotary_emb.inv_freq"),
    ("bart", None, "model.encoder.version"),
    ("t5", None, "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"),
    ("llava", None, "vision_tower.embeddings.position_ids"),
    ("llava", None, "language_model.model.layers.0.self_attn.rotary_emb.inv_freq"),
    ("qwen2_5_vl", None, "visual.rotary_pos_emb.inv_freq"),
    (OMNI, "thinker", "thinker.visual.rotary_pos_emb.inv_freq"),
    (OMNI, "thinker", "thinker.model.layers.0.self_attn.rotary_emb.inv_freq"),
    (OMNI, "talker", "talker.model.rotary_emb.inv_freq"),
    (OMNI, "code2wav", "token2wav.code2wav_dit_model.rotary_embed.inv_freq"),
]


def add(folder: str, target: Path, name: str) -> Path:
    """A checkpoint with a tensor more."""
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    assert name not in weights
    save_file(weights | {name: torch.full((3,), 7)}, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.parametrize(("name", "part", "stored"), OLD_NAMES)
def test_names_that_published_checkpoints_have_are_ignored(
    name: str, part: str | None, stored: str, seeded: Callable[[str], str], tmp_path: Path
):
    folder = add(seeded(name), tmp_path / "checkpoint", stored)
    assert_same(load(folder, part), load(seeded(name), part))


@pytest.mark.parametrize(("name", "part"), MODELS)
@pytest.mark.parametrize("stored", ["model.layers.0.mlp.up_proj.lora_A", "inv_freq"])
def test_other_names_are_still_refused(
    name: str, part: str | None, stored: str, seeded: Callable[[str], str], tmp_path: Path
):
    prefix = {None: "", "thinker": "thinker.", "code2wav": "token2wav."}[part]
    folder = add(seeded(name), tmp_path / "checkpoint", prefix + stored)
    with pytest.raises(ValueError, match=rf"has no place for: {stored}$"):
        load(folder, part)


def test_the_published_layout_has_the_buffer_that_the_vocoder_once_stored(
    seeded: Callable[[str], str], tmp_path: Path
):
    folder = publish(seeded(OMNI), tmp_path / "published")
    stored = open_checkpoint(folder, part="code2wav").weight_files
    assert "code2wav_dit_model.rotary_embed.inv_freq" in stored
    assert_same(load(folder, "code2wav"), load(seeded(OMNI), "code2wav"))


CPU = torch.device("cpu")
META = torch.device("meta")


def test_buffers_are_those_of_transformers_and_weights_have_their_places():
    config = AutoConfig.for_model("qwen2_5_omni").token2wav_config.bigvgan_config
    config.upsample_initial_channel = 64
    expected = Qwen2_5OmniToken2WavBigVGANModel(config)
    for device in (META, CPU):
        settings = ModelSettings(torch.float32, device, 4, 64)
        found = build_empty(Qwen2_5OmniToken2WavBigVGANModel, config, settings)
        places = {name: (each.shape, each.dtype) for name, each in expected.state_dict().items()}
        assert places == {
            name: (each.shape, each.dtype) for name, each in found.state_dict().items()
        }
        assert {each.device for each in found.parameters()} == {device}
    buffers = dict(expected.named_buffers())
    assert buffers
    for name, buffer in found.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def test_what_was_placed_without_memory_can_be_placed_with_some():
    config = AutoConfig.for_model("qwen2_5_omni").token2wav_config.bigvgan_config
    config.upsample_initial_channel = 64
    made = make_unplaced(Qwen2_5OmniToken2WavBigVGANModel, config)
    for device in (META, CPU):
        found = place(made, ModelSettings(torch.float32, device, 4, 64))
        assert found is made and not found.training
        assert {each.device for each in found.state_dict().values()} == {device}
    expected = Qwen2_5OmniToken2WavBigVGANModel(config)
    for (name, buffer), other in zip(found.named_buffers(), expected.buffers(), strict=True):
        assert torch.equal(buffer, other), name


def test_what_is_made_afterwards_is_filled_as_ever():
    settings = ModelSettings(torch.float32, META, 4, 64)
    config = AutoConfig.for_model("qwen2_5_omni").token2wav_config.bigvgan_config
    build_empty(Qwen2_5OmniToken2WavBigVGANModel, config, settings)
    layer = nn.Linear(8, 8)
    assert layer.weight.std() > 0 and torch.isfinite(layer.weight).all()

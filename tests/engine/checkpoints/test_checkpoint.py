"""Reading checkpoints: what is there, and what is said when it is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig

from engine.checkpoints.checkpoint import Checkpoint
from omni.seeded.language_models import build_causal_lm

NORM = "model.norm.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build_causal_lm(tmp_path / "single", with_tokenizer=False)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return build_causal_lm(tmp_path / "sharded", with_tokenizer=False, max_shard_size="100KB")


def stored(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def places(folder: Path) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in stored(folder).items()}


def test_single_file_and_shards_hold_the_same(folder: Path, sharded: Path):
    expected = stored(folder)
    for path in (folder, sharded):
        weights = dict(Checkpoint.open(path).weights())
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_only_the_wanted_names_are_read(sharded: Path):
    checkpoint = Checkpoint.open(sharded)
    shard = sharded / checkpoint.weight_files[NORM]
    for other in sharded.glob("*.safetensors"):
        if other != shard:
            other.write_bytes(b"not to be opened")
    assert [name for name, _ in checkpoint.weights([NORM])] == [NORM]


def test_load_into_converts_the_type(folder: Path):
    targets = {name: tensor.bfloat16() for name, tensor in places(folder).items()}
    Checkpoint.open(folder).load_into(targets)
    assert all(torch.equal(targets[name], t.bfloat16()) for name, t in stored(folder).items())


def test_a_config_is_made_anew_when_its_file_or_its_class_has_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    class Other(PreTrainedConfig):
        model_type = "qwen2"

    file = folder / "config.json"
    told = json.loads(file.read_text())
    first, second = Checkpoint.open(folder).config, Checkpoint.open(folder).config
    first.hidden_size += 1
    assert second.hidden_size == told["hidden_size"], "each has its own"
    file.write_text(json.dumps(told | {"hidden_size": 2 * told["hidden_size"]}))
    assert Checkpoint.open(folder).config.hidden_size == 2 * told["hidden_size"]
    file.write_text(json.dumps(told))
    monkeypatch.setitem(CONFIG_MAPPING._extra_content, "qwen2", Other)
    assert type(Checkpoint.open(folder).config) is Other


def test_generation_config_is_optional(folder: Path):
    generation_config = Checkpoint.open(folder).generation_config
    assert generation_config is not None
    assert generation_config.eos_token_id == Checkpoint.open(folder).config.eos_token_id
    (folder / "generation_config.json").unlink()
    assert Checkpoint.open(folder).generation_config is None


def test_missing_weights_are_listed(folder: Path):
    weights = stored(folder)
    removed = [name for name in weights if "layers.1" in name]
    save_file({k: v for k, v in weights.items() if k not in removed}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks the weights .*and \d more") as raised:
        Checkpoint.open(folder).load_into(dict.fromkeys(weights, torch.empty(0)))
    assert removed[0] in str(raised.value)


def test_unexpected_weights_are_listed_unless_ignored(folder: Path):
    targets = places(folder)
    extra = {"model.layers.0.self_attn.q_proj.lora_A": torch.ones(4)}
    save_file(stored(folder) | extra, folder / "model.safetensors")
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(ValueError, match=r"no place for: \S+q_proj\.lora_A$"):
        checkpoint.load_into(targets)
    checkpoint.load_into(targets, ignored={"model.layers.0.self_attn.q_proj.lora_A"})
    assert torch.equal(targets[NORM], stored(folder)[NORM])


def test_wrong_shape_names_tensor_and_both_shapes(folder: Path):
    targets = places(folder) | {NORM: torch.zeros(65)}
    with pytest.raises(ValueError, match=rf"{NORM} .* has shape \(64,\).* asks for \(65,\)"):
        Checkpoint.open(folder).load_into(targets)


def test_pickled_weights_are_refused(folder: Path):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pickled \(pytorch_model.bin\), convert"):
        list(Checkpoint.open(folder).weights())


def test_damaged_file_is_named(folder: Path):
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match=r"model.safetensors is no readable safetensors file"):
        list(Checkpoint.open(folder).weights())


def test_missing_shard_is_named(sharded: Path):
    shard = sorted(sharded.glob("*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(
        ValueError, match=f"index.json names the shard '{shard.name}': .* is not there"
    ):
        list(Checkpoint.open(sharded).weights())


@pytest.mark.parametrize("content", ["{}", "[]", "{", '{"weight_map": 3}'])
def test_malformed_index_is_named(sharded: Path, content: str):
    (sharded / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"index.json (is no|must hold a JSON object)"):
        list(Checkpoint.open(sharded).weights())


@pytest.mark.parametrize("model", ["/no/such/folder", "./nowhere", "a/b/c"])
def test_missing_folder_is_named(model: str):
    with pytest.raises(ValueError, match=f"model folder '{model}' does not exist"):
        Checkpoint.open(model)


def test_hub_model_that_cannot_be_fetched_is_named():
    with pytest.raises(ValueError, match=r"'nobody/nothing' is no folder.*Hugging Face hub"):
        Checkpoint.open("nobody/nothing")


def test_file_instead_of_folder_is_refused(folder: Path):
    with pytest.raises(ValueError, match="is a file; a checkpoint is a folder"):
        Checkpoint.open(folder / "config.json")


def test_folder_without_config_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"it has no config.json"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("content", ["{", "{}", '{"model_type": "gpt9"}'])
def test_config_that_is_not_understood_is_named(folder: Path, content: str):
    (folder / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"single/config.json (cannot be used|is no valid JSON)"):
        Checkpoint.open(folder)


def test_config_without_architecture_is_refused(folder: Path):
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="states no architectures"):
        _ = Checkpoint.open(folder).architecture

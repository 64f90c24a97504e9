"""GPTQ, AWQ and compressed-tensors: the values are a brute force's, damage is told by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine import EngineConfig, LLMEngine, SamplingParams, TokensPrompt
from engine.checkpoints.checkpoint import Checkpoint
from engine.models.base import ModelSettings
from engine.models.model_loader import load_model, open_checkpoint
from omni.seeded.language_models import build_causal_lm
from tests.support.greedy_reference import GreedyReference, assert_greedy, assert_near
from tests.support.packed_checkpoints import PACKED, write_packed

SETTINGS = ModelSettings(torch.float32, torch.device("cpu"), 4, 64, pack_weights=False)
PROMPT = list(range(30, 60))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "one layer"
    return build_causal_lm(folder, "llama", num_layers=1, num_kv_heads=4)


@pytest.mark.parametrize("name", PACKED)
def test_a_packed_checkpoint_has_the_values_of_a_brute_force(
    name: str, source: Path, tmp_path: Path
):
    plain = tmp_path / "plain"
    packed = write_packed(source, tmp_path / "packed", PACKED[name], plain)
    values = load_file(plain / "model.safetensors")
    read = dict(Checkpoint.open(packed).weights())
    assert read.keys() == values.keys()
    for each in values:
        torch.testing.assert_close(read[each], values[each], rtol=0, atol=1e-6)
    answer = GreedyReference(str(plain)).from_ids(PROMPT, 6)
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    for backend, tolerance in (("torch", 1e-4), ("auto", 5e-3)):
        config = EngineConfig(model=str(packed), num_blocks=16, attention_backend=backend)
        with closing(LLMEngine(config)) as engine:
            (output,) = engine.generate([TokensPrompt(PROMPT)], greedy)
            assert any("stored as" in line for line in engine.memory_plan.lines())
        assert_greedy(answer, output.outputs[0].token_ids)
        assert_near(output.outputs[0].tensors["hidden_states"], answer.hidden_states, tolerance)


UP = "model.layers.0.mlp.up_proj."
Change = Callable[[dict[str, Tensor]], object]
DAMAGE: dict[str, tuple[str, Change, str]] = {
    "no scales": ("GPTQ", lambda t: t.pop(f"{UP}scales"), "lacks its scales"),
    "no zeros": ("AWQ", lambda t: t.pop(f"{UP}qzeros"), "lacks its zeros"),
    "no shape": ("W4A16", lambda t: t.pop(f"{UP}weight_shape"), "lacks its shape"),
    "scales of others": ("GPTQ", lambda t: cut(t, "scales"), "up_proj.scales"),
    "zeros of others": ("AWQ", lambda t: cut(t, "qzeros"), "up_proj.qzeros"),
    "codes of others": ("W8A16", lambda t: cut(t, "weight_packed"), "up_proj.weight_packed"),
    "codes that are numbers": (
        "GPTQ",
        lambda t: t.update({f"{UP}qweight": t[f"{UP}qweight"].float()}),
        "of I32",
    ),
    "groups that are not there": (
        "GPTQ with sorted inputs",
        lambda t: t[f"{UP}g_idx"].fill_(10**9),
        "groups that are not there",
    ),
    "another shape": (
        "W4A16",
        lambda t: t[f"{UP}weight_shape"].fill_(2**40),
        "says that its shape is",
    ),
    "no codes": ("GPTQ", lambda t: t.pop(f"{UP}qweight"), "up_proj"),
}


def cut(tensors: dict[str, Tensor], part: str) -> None:
    tensors[f"{UP}{part}"] = tensors[f"{UP}{part}"][:-1].clone()


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_parts_are_told_by_name(damage: str, source: Path, tmp_path: Path):
    name, change, told = DAMAGE[damage]
    folder = write_packed(source, tmp_path / "packed", PACKED[name], tmp_path / "plain")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=told) as error:
        load_model(open_checkpoint(folder), SETTINGS)
    assert str(folder) in str(error.value)


CONFIGS: list[tuple[Any, str]] = [
    ("gptq", "quant_method must be one of"),
    ({"quant_method": "bitsandbytes"}, "got 'bitsandbytes'"),
    ({"quant_method": ["gptq"]}, "quant_method must be one of"),
    ({"quant_method": "gptq", "bits": 3}, "got 3"),
    ({"quant_method": "gptq", "bits": 4.0}, "got 4.0"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 10**9}, "group_size must be"),
    ({"quant_method": "gptq", "bits": 4, "group_size": "all"}, "group_size must be"),
    ({"quant_method": "awq", "bits": 8}, "AWQ: 4"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version must be 'gemm'"),
    ({"quant_method": "compressed-tensors"}, "config_groups must hold one group"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "no weights are stored so"),
]


@pytest.mark.parametrize(("config", "told"), CONFIGS)
def test_a_format_that_is_not_supported_is_told(
    config: Any, told: str, source: Path, tmp_path: Path
):
    folder = tmp_path / "packed"
    write_packed(source, folder, PACKED["GPTQ"], tmp_path / "plain")
    if "stored so" in told:
        folder = tmp_path / "plain"
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"quantization_config": config}))
    with pytest.raises(ValueError, match=told) as error:
        load_model(open_checkpoint(folder), SETTINGS)
    assert "config.json" in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        {"input_activations": {"num_bits": 8}},
        {"weights": {"num_bits": 4, "type": "float"}},
        {"weights": {"num_bits": 4, "dynamic": True}},
        {"weights": None},
    ],
)
def test_other_compressed_tensors_are_told(change: Any, source: Path, tmp_path: Path):
    folder = write_packed(source, tmp_path / "packed", PACKED["W4A16"], tmp_path / "plain")
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"]["config_groups"]["group_0"] |= change
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="config_groups"):
        open_checkpoint(folder)

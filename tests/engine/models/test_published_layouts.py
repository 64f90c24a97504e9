"""Published layouts without their weights: each name and shape has its place, and no other.

A config's figures are those of the hub. Names and shapes are those that transformers' own model of
that config has in files, by its conversion mapping. Both models are built without memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from engine.checkpoints.checkpoint import Checkpoint
from engine.models.base import ModelSettings
from engine.models.model_loader import _places, find_family
from engine.models.registry import FAMILIES

META = torch.device("meta")

DECODERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Qwen/Qwen3-30B-A3B": (
        "qwen3_moe",
        {
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "max_position_embeddings": 40_960,
        },
    ),
    "mistralai/Mixtral-8x7B-v0.1": (
        "mixtral",
        {
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 32_768,
        },
    ),
    "ai21labs/Jamba-v0.1": (
        "jamba",
        {
            "vocab_size": 65_536,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 256,
        },
    ),
}


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def published(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the files that transformers would write of a model."""
    return shapes(revert_weight_conversion(model, model.state_dict()))


def indexed(folder: Path, names: Mapping[str, Any]) -> Path:
    """A folder whose index names weights that are not there."""
    (folder / "model-00001-of-00001.safetensors").touch()
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def placed(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Names and shapes that our model of a checkpoint has places for."""
    settings = ModelSettings(
        torch.bfloat16, META, 16, 4096, decoder_config_of=FAMILIES.decoder_config_of
    )
    build = find_family(checkpoint).build
    assert build is not None
    return shapes(_places(checkpoint, build(checkpoint, settings)).targets)


@pytest.mark.parametrize("hub_id", DECODERS)
def test_every_weight_of_a_published_decoder_has_its_place(hub_id: str, tmp_path: Path) -> None:
    model_type, figures = DECODERS[hub_id]
    config: PreTrainedConfig = AutoConfig.for_model(model_type, **figures)
    with META:
        theirs = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(theirs).__name__]
    stored = published(theirs)
    assert placed(Checkpoint(indexed(tmp_path, stored), config, None)) == stored

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
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCode2Wav,
    Qwen3OmniMoeForConditionalGeneration,
)

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


# Qwen/Qwen3-Omni-30B-A3B-Instruct
EXPERTS: Mapping[str, Any] = {"num_experts": 128, "num_experts_per_tok": 8, "head_dim": 128}
QWEN3_OMNI: Mapping[str, Any] = {
    "thinker_config": {
        "text_config": {
            **EXPERTS,
            "vocab_size": 152_064,
            "hidden_size": 2048,
            "intermediate_size": 768,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "max_position_embeddings": 65_536,
        },
        "vision_config": {"out_hidden_size": 2048},
        "audio_config": {"output_dim": 2048},
        "vision_start_token_id": 151_652,
        "audio_start_token_id": 151_669,
        "audio_end_token_id": 151_670,
        "audio_token_id": 151_675,
        "position_id_per_seconds": 13,
    },
    "talker_config": {
        "text_config": {
            **EXPERTS,
            "num_experts_per_tok": 6,
            "shared_expert_intermediate_size": 768,
        },
        "code_predictor_config": {"num_code_groups": 16},
        "num_code_groups": 16,
        "spatial_merge_size": 2,
        "accept_hidden_layer": 24,
        "speaker_id": {"chelsie": 2301, "ethan": 2302, "aiden": 2303},
    },
    "code2wav_config": {},
}


@pytest.fixture(scope="module")
def whole() -> tuple[PreTrainedConfig, dict[str, tuple[int, ...]]]:
    """Qwen3-Omni's config, and what its files hold."""
    config = Qwen3OmniMoeConfig(**QWEN3_OMNI)
    with META:
        model = Qwen3OmniMoeForConditionalGeneration(config)
    return config, published(model)


@pytest.mark.parametrize("part", ["thinker", "talker", "code2wav"])
def test_every_weight_of_the_published_omni_has_its_place(
    part: str, whole: tuple[Any, dict[str, tuple[int, ...]]], tmp_path: Path
) -> None:
    config, stored = whole
    config.save_pretrained(indexed(tmp_path, stored))
    found = next(each for each in FAMILIES.parts_of(config.to_dict()) if each.name == part)
    checkpoint = Checkpoint(tmp_path, getattr(config, found.config_name), None, found)
    mine = {
        name.removeprefix(found.prefix): shape
        for name, shape in stored.items()
        if name.startswith(found.prefix)
    }
    if part == "code2wav":
        with META:
            network = Qwen3OmniMoeCode2Wav(checkpoint.config)
        assert shapes(network.state_dict()) == mine
    else:
        assert placed(checkpoint) == mine
    assert {name.split(".")[0] for name in stored} == {"thinker", "talker", "code2wav"}

"""Every stored weight is loaded or ignored: computed buffers, old names, published layouts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.csm.configuration_csm import CsmConfig
from transformers.models.csm.modeling_csm import CsmForConditionalGeneration
from transformers.models.mimi.modeling_mimi import MimiModel
from transformers.models.pocket_tts.configuration_pocket_tts import PocketTTSConfig
from transformers.models.pocket_tts.modeling_pocket_tts import PocketTTSForConditionalGeneration
from transformers.models.pocket_tts_audio_tokenizer.modeling_pocket_tts_audio_tokenizer import (
    PocketTTSAudioTokenizerModel,
)
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniForConditionalGeneration,
    Qwen2_5OmniToken2WavBigVGANModel,
)
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCode2Wav,
    Qwen3OmniMoeForConditionalGeneration,
)

from engine.checkpoints.checkpoint import Checkpoint
from engine.checkpoints.config_file import hidden_progress_bars, quiet_config_log
from engine.models.base import ModelSettings
from engine.models.csm.codec import names_of_half
from engine.models.encoder_module import build_empty
from engine.models.model_loader import (
    _targets,
    find_family,
    is_supported,
    load_generator,
    load_model,
    open_checkpoint,
)
from engine.models.pocket_tts.codec import load_half
from engine.models.qwen2_5_omni.code2wav import _Networks
from engine.models.registry import FAMILIES
from tests.support.published_layout import publish

OMNI = "qwen2_5_omni"
NAMES = [
    *("qwen2", "qwen3", "llama", "mistral", "ministral", "gemma2", "gemma3", "jamba", "bamba"),
    *("bart", "t5", "whisper", "mllama", "llava", "qwen2_5_vl"),
]
MODELS = [*((name, None) for name in NAMES), *((OMNI, p) for p in ("thinker", "code2wav"))]
SETTINGS = ModelSettings(torch.float32, torch.device("cpu"), 4, 64)


def load(folder: str | Path, part: str | None) -> Mapping[str, Tensor]:
    """Return all tensors of a model: its weights and computed buffers."""
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
    """Build a checkpoint that stores all computed buffers, filled with 7; also their number."""

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
    """Copy a checkpoint and add a tensor."""
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


@pytest.mark.parametrize(("number", "name", "part"), [(n, *each) for n, each in enumerate(MODELS)])
def test_other_names_are_still_refused(
    number: int, name: str, part: str | None, seeded: Callable[[str], str], tmp_path: Path
):
    stored = ("model.layers.0.mlp.up_proj.lora_A", "inv_freq")[number % 2]
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


def test_modules_built_later_are_initialized_as_usual():
    settings = ModelSettings(torch.float32, META, 4, 64)
    config = AutoConfig.for_model("qwen2_5_omni").token2wav_config.bigvgan_config
    build_empty(Qwen2_5OmniToken2WavBigVGANModel, config, settings)
    layer = nn.Linear(8, 8)
    assert layer.weight.std() > 0 and torch.isfinite(layer.weight).all()


FIGURES = (
    *("num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads"),
)


def figures(*values: int, **more: Any) -> dict[str, Any]:
    """Return values of a published config: the common ones, and more."""
    return dict(zip(FIGURES, values, strict=True)) | more


FEW = 16
"""Experts in place of 128 to 512: all are stored alike."""

DECODERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "Qwen/Qwen3-30B-A3B": (
        "qwen3_moe",
        figures(
            48, 151_936, 2048, 6144, 32, 4, num_experts_per_tok=8, num_experts=FEW, head_dim=128
        )
        | {"moe_intermediate_size": 768, "max_position_embeddings": 40_960},
    ),
    "meta-llama/Llama-3.1-8B-Instruct": (
        "llama",
        figures(32, 128_256, 4096, 14_336, 32, 8) | {"max_position_embeddings": 131_072},
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": (
        "mistral",
        figures(32, 32_768, 4096, 14_336, 32, 8) | {"sliding_window": None},
    ),
    "mistralai/Ministral-8B-Instruct-2410": (
        "ministral",
        figures(36, 131_072, 4096, 12_288, 32, 8, head_dim=128, sliding_window=32_768),
    ),
    "Qwen/Qwen2.5-7B-Instruct": ("qwen2", figures(28, 152_064, 3584, 18_944, 28, 4)),
    "Qwen/Qwen3-8B": ("qwen3", figures(36, 151_936, 4096, 12_288, 32, 8, head_dim=128)),
    "google/gemma-2-9b-it": ("gemma2", figures(42, 256_000, 3584, 14_336, 16, 8, head_dim=256)),
    "google/gemma-3-1b-it": (
        "gemma3_text",
        figures(26, 262_144, 1152, 6912, 4, 1, head_dim=256, sliding_window=512),
    ),
    # 32 layers, three of them with attention.
    "ibm-ai-platform/Bamba-9B-v1": (
        "bamba",
        {"vocab_size": 128_256, "attn_layer_indices": [9, 18, 27], "mamba_d_state": 128},
    ),
    "mistralai/Mixtral-8x7B-v0.1": (
        "mixtral",
        figures(32, 32_000, 4096, 14_336, 32, 8, num_experts_per_tok=2, num_local_experts=8),
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (
        "qwen3_next",
        figures(48, 151_936, 2048, 5120, 16, 2, head_dim=256, num_experts=FEW)
        | {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
        | {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "num_experts_per_tok": 10}
        | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
        | {"max_position_embeddings": 262_144},
    ),
    # The text model alone, with transformers' defaults.
    "Qwen/Qwen3.5-9B": ("qwen3_5_text", {}),
    "Qwen/Qwen3.5-35B-A3B": ("qwen3_5_moe_text", {"num_experts": FEW}),
    "ai21labs/Jamba-v0.1": (
        "jamba",
        figures(32, 65_536, 4096, 14_336, 32, 8, num_experts_per_tok=2, num_experts=16)
        | {"attn_layer_period": 8, "attn_layer_offset": 4}
        | {"expert_layer_period": 2, "expert_layer_offset": 1}
        | {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 256},
    ),
}


CALLED = {
    **{"gemma3": "gemma3_vision", "gemma3_text": "gemma3", "qwen3_vl_moe": "qwen3_vl"},
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), "qwen3_5_vision"),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), "qwen3_5"),
}
"""Family names that differ from the type of their config."""


def of(family: str, hub_id: str, *more: Any) -> Any:
    """Return parameters for a layout of a family."""
    family = CALLED.get(family, family)
    return pytest.param(hub_id, *more, marks=pytest.mark.shows("layout", of=family, layout=hub_id))


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def published(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the weights that transformers would save of a model."""
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
    weights = {name: each for name, each in model.state_dict().items() if name not in tied}
    return shapes(revert_weight_conversion(model, weights))


def indexed(folder: Path, names: Mapping[str, Any]) -> Path:
    """Write an index of weights whose file is empty."""
    (folder / "model-00001-of-00001.safetensors").touch()
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def placed(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the weights that our model of a checkpoint loads."""
    settings = ModelSettings(
        torch.bfloat16, META, 16, 4096, decoder_config_of=FAMILIES.decoder_config_of
    )
    build = find_family(checkpoint).build
    assert build is not None
    return shapes(_targets(checkpoint, build(checkpoint, settings)).targets)


MLLAMA = {"vision_config": {"image_size": 560}}
# Values that are not given are transformers' defaults.
TWO_SIDES: Mapping[str, tuple[Any, str, Mapping[str, Any]]] = {
    "facebook/bart-large": (AutoModelForSeq2SeqLM, "bart", {}),
    "google/flan-t5-xxl": (
        AutoModelForSeq2SeqLM,
        "t5",
        {
            "vocab_size": 32_128,
            "d_model": 4096,
            "d_kv": 64,
            "d_ff": 10_240,
            "num_layers": 24,
            "num_heads": 64,
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
        },
    ),
    "openai/whisper-large-v3": (
        AutoModelForSpeechSeq2Seq,
        "whisper",
        {
            "vocab_size": 51_866,
            "d_model": 1280,
            "encoder_layers": 32,
            "decoder_layers": 32,
            "encoder_attention_heads": 20,
            "decoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "decoder_ffn_dim": 5120,
            "num_mel_bins": 128,
        },
    ),
    "meta-llama/Llama-3.2-11B-Vision-Instruct": (AutoModelForMultimodalLM, "mllama", MLLAMA),
}


GEMMA3_VISION = {
    "hidden_size": 1152,
    "image_size": 896,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
    "vision_use_head": False,
}
SEEING: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llava-hf/llava-1.5-7b-hf": (
        "llava",
        {
            "text_config": {"model_type": "llama", "vocab_size": 32_064},
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": 1024,
                "image_size": 336,
                "intermediate_size": 4096,
                "num_attention_heads": 16,
                "num_hidden_layers": 24,
                "patch_size": 14,
            },
        },
    ),
    "Qwen/Qwen2.5-VL-7B-Instruct": (
        "qwen2_5_vl",
        {
            "text_config": figures(28, 152_064, 3584, 18_944, 28, 4)
            | {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e6,
                    "mrope_section": [16, 24, 24],
                }
            },
            "vision_config": {
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "out_hidden_size": 3584,
            },
        },
    ),
    # As published: values that equal transformers' defaults are left out.
    "google/gemma-3-4b-it": (
        "gemma3",
        {
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10_240,
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "vision_config": GEMMA3_VISION,
        },
    ),
    "google/gemma-3-27b-it": (
        "gemma3",
        {
            "text_config": {
                "head_dim": 128,
                "hidden_size": 5376,
                "intermediate_size": 21_504,
                "num_attention_heads": 32,
                "num_hidden_layers": 62,
                "num_key_value_heads": 16,
                "query_pre_attn_scalar": 168,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "vision_config": GEMMA3_VISION,
        },
    ),
    "Qwen/Qwen3-VL-2B-Instruct": (
        "qwen3_vl",
        {
            "text_config": figures(28, 151_936, 2048, 6144, 16, 8, head_dim=128)
            | {"max_position_embeddings": 262_144},
            "vision_config": {
                "depth": 24,
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "deepstack_visual_indexes": [5, 11, 17],
                "out_hidden_size": 2048,
            },
            "tie_word_embeddings": True,
        },
    ),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": (
        "qwen3_vl_moe",
        {
            "text_config": figures(48, 151_936, 2048, 6144, 32, 4, head_dim=128, num_experts=FEW)
            | {"num_experts_per_tok": 8, "moe_intermediate_size": 768}
            | {"max_position_embeddings": 262_144},
            "vision_config": {"out_hidden_size": 2048},
        },
    ),
    # With transformers' defaults.
    "Qwen/Qwen3-ASR-1.7B-hf": (
        "qwen3_asr",
        {
            "text_config": {
                "hidden_size": 2048,
                "intermediate_size": 6144,
                "num_hidden_layers": 28,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "head_dim": 128,
            },
            "audio_config": {"output_dim": 2048},
        },
    ),
    # With transformers' defaults.
    "mistralai/Voxtral-Mini-3B-2507": (
        "voxtral",
        {
            "audio_token_id": 24,
            "tie_word_embeddings": False,
            "text_config": {"model_type": "llama", "num_hidden_layers": 30},
        },
    ),
    # With transformers' defaults.
    "Qwen/Qwen3.5-9B": ("qwen3_5", {"vision_config": {"out_hidden_size": 4096}}),
    "Qwen/Qwen3.5-35B-A3B": (
        "qwen3_5_moe",
        {"text_config": {"num_experts": FEW}, "vision_config": {"out_hidden_size": 2048}},
    ),
}


LAYOUTS = [
    *((hub_id, AutoModelForCausalLM, *each) for hub_id, each in DECODERS.items()),
    *((hub_id, *each) for hub_id, each in TWO_SIDES.items()),
    *((hub_id, AutoModelForMultimodalLM, *each) for hub_id, each in SEEING.items()),
]


@pytest.mark.parametrize(
    ("hub_id", "auto_class", "model_type", "figures"),
    [of(model_type, hub_id, auto, model_type, more) for hub_id, auto, model_type, more in LAYOUTS],
)
def test_every_weight_of_a_published_layout_has_its_place(
    hub_id: str, auto_class: Any, model_type: str, figures: Mapping[str, Any], tmp_path: Path
) -> None:
    config: PreTrainedConfig = AutoConfig.for_model(model_type, **figures)
    with META:
        theirs = auto_class.from_config(deepcopy(config))
    config.architectures = [type(theirs).__name__]
    stored = published(theirs)
    assert placed(Checkpoint(indexed(tmp_path, stored), config, None)) == stored


# Qwen/Qwen3-Omni-30B-A3B-Instruct
EXPERTS: Mapping[str, Any] = {"num_experts": FEW, "num_experts_per_tok": 8, "head_dim": 128}
QWEN3_OMNI: Mapping[str, Any] = {
    "thinker_config": {
        "text_config": figures(48, 152_064, 2048, 768, 32, 4)
        | {**EXPERTS, "moe_intermediate_size": 768, "max_position_embeddings": 65_536},
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


# Of Qwen/Qwen2.5-Omni-7B, whose other values are transformers' defaults.
ROPE = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
}
QWEN2_5_OMNI = {"thinker_config": {"text_config": ROPE}, "talker_config": ROPE}
WHOLES: Mapping[str, tuple[str, Callable[[], tuple[PreTrainedConfig, PreTrainedModel]]]] = {
    "Qwen/Qwen2.5-Omni-7B": (
        "qwen2_5_omni",
        lambda: made(Qwen2_5OmniForConditionalGeneration, Qwen2_5OmniConfig(**QWEN2_5_OMNI)),
    ),
    "Qwen/Qwen3-Omni-30B-A3B-Instruct": (
        "qwen3_omni",
        lambda: made(Qwen3OmniMoeForConditionalGeneration, Qwen3OmniMoeConfig(**QWEN3_OMNI)),
    ),
}
VOCODERS: Mapping[str, Callable[[Any], nn.Module]] = {
    "Qwen/Qwen2.5-Omni-7B": _Networks,
    "Qwen/Qwen3-Omni-30B-A3B-Instruct": Qwen3OmniMoeCode2Wav,
}


def made(model: Any, config: PreTrainedConfig) -> tuple[PreTrainedConfig, PreTrainedModel]:
    with META:
        return config, model(config)


@pytest.fixture(scope="module")
def whole() -> Callable[[str], tuple[PreTrainedConfig, dict[str, tuple[int, ...]]]]:
    """Build a config of several models, and names and shapes of its stored weights."""

    @cache
    def make(hub_id: str) -> tuple[PreTrainedConfig, dict[str, tuple[int, ...]]]:
        config, model = WHOLES[hub_id][1]()
        return config, published(model)

    return make


@pytest.mark.parametrize("part", ["thinker", "talker", "code2wav"])
@pytest.mark.parametrize("hub_id", [of(WHOLES[hub_id][0], hub_id) for hub_id in WHOLES])
def test_every_weight_of_a_published_omni_has_its_place(
    hub_id: str,
    part: str,
    whole: Callable[[str], tuple[Any, dict[str, tuple[int, ...]]]],
    tmp_path: Path,
) -> None:
    config, stored = whole(hub_id)
    config.save_pretrained(indexed(tmp_path, stored))
    parts = FAMILIES.parts_of(config.to_dict())
    found = next(each for each in parts if each.name == part)
    checkpoint = Checkpoint(tmp_path, getattr(config, found.config_name), None, found)
    mine = {
        name.removeprefix(found.prefix): shape
        for name, shape in stored.items()
        if name.startswith(found.prefix)
    }
    if part == "code2wav":
        with META:
            network = VOCODERS[hub_id](checkpoint.config)
        assert shapes(network.state_dict()) == mine
    else:
        assert placed(checkpoint) == mine
    assert {f"{name.split('.')[0]}." for name in stored} == {each.prefix for each in parts}


# With transformers' defaults.
@pytest.mark.parametrize("hub_id", [of("csm", "sesame/csm-1b")])
def test_every_weight_of_a_published_csm_has_its_place(hub_id: str, tmp_path: Path) -> None:
    config, model = made(CsmForConditionalGeneration, CsmConfig())
    stored = published(model)
    config.save_pretrained(indexed(tmp_path, stored))
    part = FAMILIES.rows["CsmForConditionalGeneration"].part
    backbone = placed(Checkpoint(tmp_path, config, None, part))
    with META:
        codec = MimiModel(deepcopy(config.codec_config))
    whole = {f"codec_model.{name}": shape for name, shape in published(codec).items()}
    sounding = set(names_of_half("decoder", whole, "codec_model."))
    assert backbone | {name: whole[name] for name in sounding} == stored
    assert not sounding & backbone.keys()


# With transformers' defaults, without the weights that only training needs.
@pytest.mark.parametrize("hub_id", [of("pocket_tts", "eustlb/pocket-tts")])
def test_every_weight_of_a_published_pocket_tts_has_its_place(hub_id: str, tmp_path: Path) -> None:
    config, model = made(PocketTTSForConditionalGeneration, PocketTTSConfig())
    config.architectures = [type(model).__name__]
    stored = published(model)
    config.save_pretrained(indexed(tmp_path, stored))
    training = {name for name in stored if name.startswith(("loss_weighting.", "latent_stats"))}
    mine = placed(Checkpoint(tmp_path, config, None))
    assert mine == {name: shape for name, shape in stored.items() if name not in training}


# With transformers' defaults.
def test_every_weight_of_the_codec_of_a_published_pocket_tts_has_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, model = made(
        PocketTTSAudioTokenizerModel, AutoConfig.for_model("pocket_tts_audio_tokenizer")
    )
    stored = published(model)
    checkpoint = Checkpoint(indexed(tmp_path, stored), config, None)

    def places(_: Any, __: Any, build: Any, places_of: Any) -> dict[str, tuple[int, ...]]:
        return shapes(places_of(build(META)).targets)

    monkeypatch.setattr("engine.models.encoder_module.load_checked", places)
    encoder: Any = load_half("encoder", checkpoint, META)
    decoder: Any = load_half("decoder", checkpoint, META)
    assert encoder | decoder == stored
    assert encoder != stored != decoder

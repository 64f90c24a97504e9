"""Seeded checkpoints in the layout of those published on the hub, written by older versions.

The differences from what transformers writes today::

    config.json            rope_theta and rope_scaling for rope_parameters; torch_dtype; no
                           layer_types; other class names; Qwen2.5-VL: its text config at the top
    generation_config.json says nothing (Qwen2.5-Omni)
    chat_template.json     for chat_template.jinja: the processor's, and none of the tokenizer's
    model-0000i-of-00002   shards under an index; with buffers that are computed today
                           LLaVA: its tower in a module of its own
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_ARCHITECTURES = {
    "qwen2_5_omni": "Qwen2_5OmniModel",
    "qwen2_5_omni_thinker": "Qwen2OmniNaViTThinkerForConditionalGeneration",
    "qwen2_5_omni_talker": "Qwen2OmniTalkerForConditionalGeneration",
}
# Values that older code stored though it computes them; they are ignored.
_COMPUTED = {
    "llava": ("vision_tower.vision_model.embeddings.position_ids",),
    "qwen2_5_vl": ("visual.rotary_pos_emb.inv_freq",),
    "qwen2_5_omni": (
        "thinker.visual.rotary_pos_emb.inv_freq",
        "token2wav.code2wav_dit_model.rotary_embed.inv_freq",
    ),
}
_COMMIT = "0" * 39 + "1"


def publish(folder: str | Path, target: Path) -> Path:
    """Copy a seeded checkpoint into a new folder, in the published layout."""
    shutil.copytree(folder, target)
    config = _old_config(json.loads((target / "config.json").read_text()))
    if config["model_type"] == "qwen2_5_vl":
        config = _flat(config)
        config["rope_scaling"] = {"type": "mrope"} | _sections(config["rope_scaling"])
    if config["model_type"] == "qwen2_5_omni":
        eos = config["thinker_config"]["text_config"].pop("eos_token_id")
        config["thinker_config"]["eos_token_id"] = eos
        reported = {"_from_model_config": True, "transformers_version": "4.50.0.dev0"}
        (target / "generation_config.json").write_text(json.dumps(reported))
    (target / "config.json").write_text(json.dumps(config, indent=2))
    template = target / "chat_template.jinja"
    if template.is_file():
        stated = {"chat_template": template.read_text("utf-8")}
        (target / "chat_template.json").write_text(json.dumps(stated))
        template.unlink()
    _shard(target, _COMPUTED.get(config["model_type"], ()))
    return target


def publish_on_hub(folder: str | Path, cache: Path, model: str) -> None:
    """Put a seeded checkpoint where a download of ``model`` would put it."""
    repository = cache / f"models--{model.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(_COMMIT)
    publish(folder, repository / "snapshots" / _COMMIT)


def _old_config(config: dict[str, Any]) -> dict[str, Any]:
    old: dict[str, Any] = {}
    for key, value in config.items():
        if key == "rope_parameters":
            old |= _old_rope(value)
        elif key == "dtype":
            old["torch_dtype"] = value
        elif key != "layer_types":
            old[key] = _old_config(value) if isinstance(value, dict) else value
    if old.get("model_type") in _ARCHITECTURES:
        old["architectures"] = [_ARCHITECTURES[old["model_type"]]]
    return old


def _old_rope(rope: dict[str, Any]) -> dict[str, Any]:
    if rope["rope_type"] == "axial":  # of vision towers, which had no setting for it
        return {}
    old: dict[str, Any] = {"rope_theta": rope["rope_theta"]}
    if "mrope_section" in rope:
        old["rope_scaling"] = {"type": "default", "rope_type": "default"} | _sections(rope)
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope["partial_rotary_factor"]
    return old


def _sections(rope: dict[str, Any]) -> dict[str, Any]:
    return {"mrope_section": rope["mrope_section"]}


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    vision = config["vision_config"]
    vision["in_chans"] = vision.pop("in_channels")
    vision["spatial_patch_size"] = vision["patch_size"]
    text = config.pop("text_config")
    return text | config


def _old_name(name: str) -> str:
    return name.replace("vision_tower.", "vision_tower.vision_model.")


def _shard(folder: Path, computed: tuple[str, ...]) -> None:
    weights = load_file(folder / "model.safetensors")
    weights = {_old_name(name): tensor for name, tensor in weights.items()}
    weights |= {name: torch.full((4,), 7.0) for name in computed}
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    half = len(names) // 2
    shards = {
        "model-00001-of-00002.safetensors": names[:half],
        "model-00002-of-00002.safetensors": names[half:],
    }
    for file, held in shards.items():
        save_file({name: weights[name] for name in held}, folder / file, {"format": "pt"})
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in weights.values())},
        "weight_map": {name: file for file, held in shards.items() for name in held},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

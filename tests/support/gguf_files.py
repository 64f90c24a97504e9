"""Writes GGUF files of checkpoints like llama.cpp's converter, with the ``gguf`` package."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    TokenType,
    dequantize,
    get_tensor_name_map,
    quantize,
)
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

# By transformers' model types; tensor names come from the package's own table.
GGUF_ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "qwen3_moe": "qwen3moe",
}
_EXPERTS = "mlp.experts."
_RNG = np.random.default_rng(0)


def random_blocks(kind: GGMLQuantizationType, shape: tuple[int, int]) -> NDArray[np.uint8]:
    """Return bytes of a matrix with any quanta and finite scales, of a type with half scales."""
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = _RNG.integers(0, 256, (shape[0] * shape[1] // block_size, block_bytes), np.uint8)
    places = {"Q6_K": [208], "Q8_0": [0], "Q4_0": [0]}.get(kind.name, [0, 2])
    for place in places:
        scales = _RNG.uniform(0.001, 0.02, (len(blocks), 1)).astype("<f2")
        blocks[:, place : place + 2] = scales.view(np.uint8)
    return blocks.reshape(shape[0], -1)


def tiny_gguf(
    folder: Path,
    *tensors: tuple[str, Any, GGMLQuantizationType],
    more: Callable[[GGUFWriter], object] = lambda writer: None,
) -> Path:
    """Write a file with a config, an embedding, and the given tensors."""
    writer = GGUFWriter(folder / "tiny.gguf", "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_token_list(["a", "b", "c", "d", "e", "f", "g", "h"])
    writer.add_token_scores([0.0] * 8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((8, 64), np.float32))
    for name, values, kind in tensors:
        writer.add_tensor(name, values, raw_dtype=kind)
    more(writer)
    _write(writer)
    return folder / "tiny.gguf"


def write_gguf(
    source: str | Path,
    file: Path,
    type_of: Callable[[str], GGMLQuantizationType],
    *,
    dequantized: Path | None = None,
    more: Callable[[GGUFWriter], object] = lambda writer: None,
) -> Path:
    """Write the checkpoint of a plain decoder.

    Args:
        type_of: type of each matrix, by transformers' name of it.
        dequantized: a folder that gets the checkpoint again, with the values that its blocks
            stand for.
        more: adds further content to the file.
    """
    folder = Path(source)
    config = json.loads((folder / "config.json").read_text())
    architecture = GGUF_ARCHITECTURES[config["model_type"]]
    writer = GGUFWriter(file, architecture)
    _add_config(writer, config)
    if (folder / "tokenizer.json").is_file():
        _add_tokenizer(writer, folder)
    arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(arch, config["num_hidden_layers"])
    plain = {}
    for name, parts in _stacked(load_file(folder / "model.safetensors")).items():
        stem, _, suffix = name.rpartition(".")
        stored = f"{names.get_name(stem)}.{suffix}"
        values = _converted(torch.stack(parts).squeeze(0).float().numpy(), name, config)
        kind = type_of(name) if values.ndim > 1 else GGMLQuantizationType.F32
        blocks = quantize(values, kind)
        writer.add_tensor(stored, blocks, raw_dtype=kind)
        original = torch.from_numpy(_original(dequantize(blocks, kind), name, config)).clone()
        for index, part in enumerate(original if len(parts) > 1 else (original,)):
            plain[name.replace(_EXPERTS, f"{_EXPERTS}{index}.")] = part.clone()
    more(writer)
    _write(writer)
    if dequantized is not None:
        shutil.copytree(folder, dequantized)
        save_file(plain, dequantized / "model.safetensors", metadata={"format": "pt"})
    return file


def _stacked(tensors: dict[str, torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """Tensors by name, those of all experts together."""
    stacked: dict[str, list[torch.Tensor]] = {}
    for name in sorted(tensors, key=lambda name: (len(name), name)):
        stacked.setdefault(re.sub(rf"({_EXPERTS})\d+\.", r"\1", name), []).append(tensors[name])
    return stacked


def _add_config(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "moe_intermediate_size" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "gemma" in config["model_type"] or config["model_type"].startswith("qwen3"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    elif config["model_type"] == "llama":
        writer.add_rope_dimension_count(config["head_dim"])
    ropes = config["rope_parameters"]
    full = ropes.get("full_attention", ropes)
    writer.add_rope_freq_base(full["rope_theta"])
    if full.get("rope_type") in ("linear", "yarn"):
        writer.add_string(f"{writer.arch}.rope.scaling.type", full["rope_type"])
        writer.add_rope_scaling_factor(full["factor"])
        if "original_max_position_embeddings" in full:
            writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    if config.get("sliding_window") and "gemma" in config["model_type"]:
        writer.add_sliding_window(config["sliding_window"])
    if config["model_type"] == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _add_tokenizer(writer: GGUFWriter, folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    vocab = {index: token for token, index in content["model"]["vocab"].items()}
    special = {each["id"]: each["content"] for each in content["added_tokens"]}
    tokens = [(vocab | special)[index] for index in range(len(vocab | special))]
    kinds = [TokenType.CONTROL if i in special else TokenType.NORMAL for i in range(len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    for name, add in {
        "bos_token": writer.add_bos_token_id,
        "eos_token": writer.add_eos_token_id,
        "pad_token": writer.add_pad_token_id,
    }.items():
        add(tokens.index(settings[name]))
    writer.add_add_bos_token(content["post_processor"]["type"] == "TemplateProcessing")
    writer.add_chat_template((folder / "chat_template.jinja").read_text())


def _converted(values: NDArray[Any], name: str, config: dict[str, Any]) -> NDArray[Any]:
    """Interleave the halves of a rotated head's rows; store norms as their scale factors."""
    if config["model_type"] == "llama" and (heads := _heads(name, config)):
        halves = values.reshape(heads, 2, -1, *values.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
    return values + 1 if _is_offset(name, config) else values


def _original(values: NDArray[Any], name: str, config: dict[str, Any]) -> NDArray[Any]:
    if config["model_type"] == "llama" and (heads := _heads(name, config)):
        pairs = values.reshape(heads, -1, 2, *values.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))
    return values - 1 if _is_offset(name, config) else values


def _heads(name: str, config: dict[str, Any]) -> int:
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    return next((int(config[key]) for part, key in heads.items() if part in name), 0)


def _is_offset(name: str, config: dict[str, Any]) -> bool:
    return "gemma" in config["model_type"] and name.endswith("norm.weight")


def _write(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

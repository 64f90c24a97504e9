"""Damaged and hostile GGUF files end in an error that names them, before memory is taken."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.files.gguf_header import read_gguf_header
from engine.models.base import ModelSettings
from engine.models.model_loader import load_model, open_checkpoint
from engine.text.tokenizer import load_tokenizer
from tests.support.gguf_files import tiny_gguf, write_gguf

SETTINGS = ModelSettings(torch.float32, torch.device("cpu"), 4, 64, pack_weights=False)
UP, F32 = "blk.0.ffn_up.weight", GGMLQuantizationType.F32
# Behind a key: its type, then the value. Behind a tensor's name: dimensions, type and offset.
VALUE, TYPE, ITEMS, DIMENSION, KIND, OFFSET = 4, 0, 8, 4, 20, 24


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    matrix, row = np.ones((64, 64), np.float32), np.ones(64, np.float32)
    matrices = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    named: list[tuple[str, Any, Any]] = [(f"blk.0.{name}.weight", matrix, F32) for name in matrices]
    named += [(f"blk.0.{name}.weight", row, F32) for name in ("attn_norm", "ffn_norm")]
    named.append(("output_norm.weight", row, F32))
    file = tiny_gguf(tmp_path_factory.mktemp("whole"), *named)
    attempt(file)
    return file.read_bytes()


def patched(content: bytes, name: str, skip: int, form: str, value: Any) -> bytes:
    place = content.index(name.encode()) + len(name) + skip
    return content[:place] + struct.pack(form, value) + content[place + struct.calcsize(form) :]


def attempt(file: Path) -> None:
    load_model(open_checkpoint(file), SETTINGS)


HARMS: dict[str, tuple[tuple[str, int, str, Any], str]] = {
    "no such magic": (("", 0, "4s", b"GGML"), "must begin with"),
    "version": (("GGUF", 0, "<I", 9), "version must be 2 or 3"),
    "other byte order": (("GGUF", 0, ">I", 3), "big-endian"),
    "tensor count": (("GGUF", 4, "<Q", 2**60), "number of tensors must be at most"),
    "many tensors": (("GGUF", 4, "<Q", 60_000), "must have 1 to 4 dimensions"),
    "entry count": (("GGUF", 12, "<Q", 2**60), "number of metadata entries must be at most"),
    "huge string": (("general.architecture", VALUE, "<Q", 2**62), "length of general.architecture"),
    "long string": (("general.architecture", VALUE, "<Q", 2**21), "cut off"),
    "unknown value": (("llama.block_count", TYPE, "<I", 77), "type 77, which is not known"),
    "huge array": (("tokenizer.ggml.scores", ITEMS, "<Q", 2**50), "tokenizer.ggml.scores must be"),
    "long array": (("tokenizer.ggml.scores", ITEMS, "<Q", 2**21), "cut off"),
    "array of arrays": (("tokenizer.ggml.scores", VALUE, "<I", 9), "array of the type 9"),
    "no name": (("general.architecture", VALUE + 8, "5s", b"l\xffama"), "utf-8"),
    "other architecture": (("general.architecture", VALUE + 8, "5s", b"evil!"), "'evil!'"),
    "many layers": (("llama.block_count", VALUE, "<I", 2**31), "num_hidden_layers"),
    "no layers": (("llama.block_count", VALUE, "<I", 0), "num_hidden_layers"),
    "wide": (("llama.feed_forward_length", VALUE, "<I", 2**31 - 1), "has shape (64, 64)"),
    "huge dimension": (("token_embd.weight", DIMENSION, "<Q", 2**62), "token_embd.weight"),
    "other dimension": (("token_embd.weight", DIMENSION, "<Q", 32), "model.embed_tokens.weight"),
    "many dimensions": (("token_embd.weight", 0, "<I", 2**31), "1 to 4 dimensions"),
    "no dimension": ((UP, DIMENSION, "<Q", 0), "has shape"),
    "unknown type": ((UP, KIND, "<I", 999), "type 999, which is not known"),
    "type without rows": ((UP, KIND, "<I", 14), "blocks of 256 values"),
    "integers": ((UP, KIND, "<I", 24), "of the type I8"),
    "offset outside": ((UP, OFFSET, "<Q", 2**40), "but the file has"),
    "offset between": ((UP, OFFSET, "<Q", 33), "multiple of 32"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_hostile_file_is_refused_by_name_before_memory_is_taken(
    harm: str, whole: bytes, tmp_path: Path
):
    change, told = HARMS[harm]
    file = tmp_path / "hostile.gguf"
    file.write_bytes(patched(whole, *change))
    with pytest.raises(ValueError, match=str(file)):  # what is imported is imported
        attempt(file)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError) as error:
            attempt(file)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(file) in str(error.value)
    assert told in str(error.value)
    assert peak < 2**24, f"{peak} bytes were taken"


@given(st.data())
def test_a_file_that_is_cut_off_is_refused(
    whole: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
):
    file = tmp_path_factory.getbasetemp() / "cut.gguf"
    file.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(ValueError, match="cut.gguf"):
        read_gguf_header(file)


@settings(max_examples=50)
@given(st.data())
def test_a_file_with_spoilt_bytes_is_refused_by_name_or_read(
    whole: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
):
    content = bytearray(whole)
    end = whole.index(b"output_norm.weight") + 40
    for place in data.draw(st.lists(st.integers(0, end), min_size=1, max_size=3)):
        content[place] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.getbasetemp() / "spoilt.gguf"
    file.write_bytes(content)
    try:
        open_checkpoint(file)
    except ValueError as error:
        assert "spoilt.gguf" in str(error)


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "model", "merges"])
def test_a_tokenizer_that_cannot_be_is_refused_by_name(
    key: str, seeded: Callable[[str], str], tmp_path: Path
):
    values = {"model": (8, "4s", b"evil"), "merges": (24, "2s", b"zz")}
    file = write_gguf(seeded("llama"), tmp_path / "m.gguf", lambda name: F32)
    change = values.get(key, (0, "<I", 2**31))
    file.write_bytes(
        patched(file.read_bytes(), f"tokenizer.ggml.{key}", 4 + change[0], *change[1:])
    )
    with pytest.raises(ValueError, match=str(file)):
        open_checkpoint(file)
        load_tokenizer(file)


def test_a_file_of_another_kind_and_a_part_of_several_are_told(tmp_path: Path):
    file = tmp_path / "m.txt"
    file.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"a folder with a config.json, or a .gguf file"):
        open_checkpoint(file)
    part = tiny_gguf(tmp_path, more=lambda writer: writer.add_uint16("split.count", 3))
    with pytest.raises(ValueError, match="one of 3 parts; join them"):
        open_checkpoint(part)

"""GGUF, GPTQ, AWQ and compressed-tensors files: their values, and errors for damaged ones."""

from __future__ import annotations

import json
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer
from transformers.integrations.gguf.dequant import dequantize

from engine import ChatPrompt, EngineConfig, LLMEngine, SamplingParams, TokensPrompt
from engine.checkpoints.checkpoint import Checkpoint
from engine.files.gguf_header import read_gguf_header
from engine.models.base import ModelSettings
from engine.models.model_loader import load_generator, load_model, open_checkpoint
from engine.text.tokenizer import load_tokenizer
from omni.seeded.language_models import build_causal_lm
from omni.seeded.omni import build_qwen2_5_omni
from tests.support.examples import examples
from tests.support.gguf_files import random_blocks, tiny_gguf, write_gguf
from tests.support.greedy_reference import GreedyReference, assert_greedy, assert_near
from tests.support.packed_checkpoints import PACKED, write_packed

SETTINGS = ModelSettings(torch.float32, torch.device("cpu"), 4, 64)
PROMPT = list(range(30, 75))
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def assert_same_answer(model: Path, plain: Path) -> None:
    """Check that tokens and hidden states are those of transformers with the plain weights."""
    answer = GreedyReference(str(plain)).from_ids(PROMPT, 8)
    # The torch backend dequantizes on load; kernels multiply codes and round their input.
    for backend, tolerance in (("torch", 1e-4), ("auto", 5e-3)):
        config = EngineConfig(model=str(model), num_blocks=32, attention_backend=backend)
        with closing(LLMEngine(config)) as engine:
            (output,) = engine.generate([TokensPrompt(PROMPT)], GREEDY)
            assert engine.tokenizer is not None
            assert any("stored as" in line for line in engine.memory_plan.lines())
        assert_greedy(answer, output.outputs[0].token_ids)
        assert_near(output.outputs[0].tensors["hidden_states"], answer.hidden_states, tolerance)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder with a ``packed`` checkpoint and a ``plain`` one of the same values."""
    folder = tmp_path_factory.mktemp("source") / "one layer"
    source = build_causal_lm(folder, "llama", num_hidden_layers=1, num_key_value_heads=4)

    @cache
    def write(name: str) -> Path:
        folder = tmp_path_factory.mktemp("written")
        write_packed(source, folder / "packed", PACKED[name], folder / "plain")
        return folder

    return write


@pytest.fixture
def packed(written: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy that a test may damage."""
    return lambda name: shutil.copytree(written(name) / "packed", tmp_path / "packed")


@pytest.mark.parametrize("name", PACKED)
def test_a_packed_checkpoint_has_the_values_of_the_plain_one(
    name: str, written: Callable[[str], Path]
):
    plain, packed = written(name) / "plain", written(name) / "packed"
    values = load_file(plain / "model.safetensors")
    read = dict(Checkpoint.open(packed).weights())
    assert read.keys() == values.keys()
    for each in values:
        torch.testing.assert_close(read[each], values[each], rtol=0, atol=1e-6)
    assert_same_answer(packed, plain)


@pytest.mark.usefixtures("unpacked")
def test_plain_parts_load_with_a_quantized_thinker(tmp_path: Path):
    """Published quantized omni checkpoints have a talker and a vocoder in plain weights."""
    source = build_qwen2_5_omni(tmp_path / "source")
    folder, plain = tmp_path / "packed", tmp_path / "plain"
    write_packed(source, folder, PACKED["GPTQ"], plain, prefix="thinker.model.layers.")
    thinker = open_checkpoint(folder, part="thinker")
    assert thinker.stored is not None
    for name, weight in open_checkpoint(plain, part="thinker").weights():
        torch.testing.assert_close(dict(thinker.weights([name]))[name], weight, rtol=0, atol=1e-6)
    load_model(thinker, SETTINGS)
    talker = open_checkpoint(folder, part="talker")
    assert talker.stored is None
    expected = load_model(open_checkpoint(source, part="talker"), SETTINGS).state_dict()
    for name, weight in load_model(talker, SETTINGS).state_dict().items():
        assert torch.equal(weight, expected[name]), name
    load_generator(open_checkpoint(folder, part="code2wav"), SETTINGS.device)


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
def test_damaged_tensors_are_named(damage: str, packed: Callable[[str], Path]):
    name, change, message = DAMAGE[damage]
    folder = packed(name)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message) as error:
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


@pytest.mark.parametrize(("config", "message"), CONFIGS)
def test_an_unsupported_format_is_an_error(
    config: Any, message: str, packed: Callable[[str], Path], written: Callable[[str], Path]
):
    folder = packed("GPTQ")
    if "stored so" in message:
        shutil.copytree(written("GPTQ") / "plain", folder, dirs_exist_ok=True)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"quantization_config": config}))
    with pytest.raises(ValueError, match=message) as error:
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
def test_unsupported_compressed_tensors_are_an_error(change: Any, packed: Callable[[str], Path]):
    folder = packed("W4A16")
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"]["config_groups"]["group_0"] |= change
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="config_groups"):
        open_checkpoint(folder)


F32 = GGMLQuantizationType.F32
F16, BF16 = GGMLQuantizationType.F16, GGMLQuantizationType.BF16
Q4_0, Q4_1, Q8_0 = (GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q8_0"))
MIXED = [Q8_0, Q4_1, Q4_0, F16, BF16, GGMLQuantizationType.Q5_0]
SLIDING, FULL = "sliding_attention", "full_attention"
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama untied with biases": ("llama", {"tie_word_embeddings": False, "attention_bias": True}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3, "hidden_size": 128, "num_attention_heads": 2}),
    "qwen2": ("qwen2", {}),
    "qwen2 yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3 moe": ("qwen3_moe", {"tied": False}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 6, "layer_types": [SLIDING] * 5 + [FULL]}),
}


def mixed() -> Callable[[str], GGMLQuantizationType]:
    kinds = cycle(MIXED)
    return lambda name: next(kinds)


def add_llama3_factors(writer: GGUFWriter) -> None:
    """Add the factors that llama.cpp's converter computes for a head of 64."""
    base, half = LLAMA3["rope_theta"], 32
    factors = []
    for frequency in 1.0 / base ** (np.arange(half) / half):
        length = 2 * np.pi / frequency
        low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
        old = LLAMA3["original_max_position_embeddings"]
        smooth = (old / length - low) / (high - low)
        factor = 1 / ((1 - smooth) / LLAMA3["factor"] + smooth)
        factors.append(1.0 if length < old / high else 8.0 if length > old / low else factor)
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_of_gguf_files_are_those_of_the_dequantized_weights(family: str, tmp_path: Path):
    architecture, settings = FAMILIES[family]
    source = build_causal_lm(tmp_path / "source", architecture, **settings)
    more = add_llama3_factors if family == "llama 3" else lambda writer: None
    plain = tmp_path / "plain"
    file = write_gguf(source, tmp_path / "m.gguf", mixed(), dequantized=plain, more=more)
    assert_same_answer(file, plain)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K"])
def test_blocks_are_dequantized_as_in_transformers(name: str, tmp_path: Path):
    kind, shape = GGMLQuantizationType[name], (6, 512)
    blocks = random_blocks(kind, shape)
    checkpoint = Checkpoint.open(tiny_gguf(tmp_path, ("blk.0.ffn_up.weight", blocks, kind)))
    ((_, read),) = checkpoint.weights(["model.layers.0.mlp.up_proj.weight"])
    expected = dequantize(torch.from_numpy(blocks), kind.value)
    torch.testing.assert_close(read, expected.reshape(shape), rtol=1e-6, atol=1e-6)


def test_the_tokenizer_is_that_of_transformers_and_of_the_checkpoint(
    seeded: Callable[[str], str], tmp_path: Path
):
    file = write_gguf(seeded("llama"), tmp_path / "m.gguf", lambda name: F16)
    ours, source = load_tokenizer(file), AutoTokenizer.from_pretrained(seeded("llama"))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    assert ours is not None
    assert type(ours) is type(theirs)
    assert ours.chat_template == source.chat_template
    for text in ("Once upon a time", "<|user|>\nIt's  12 o'clock, naïve 😀<|eos|>", ""):
        assert ours(text).input_ids == theirs(text).input_ids == source(text).input_ids


def test_a_chat_runs_from_a_folder_with_one_file(seeded: Callable[[str], str], tmp_path: Path):
    folder = tmp_path / "published"
    folder.mkdir()
    plain = tmp_path / "plain"
    write_gguf(seeded("qwen2"), folder / "m.Q8_0.gguf", lambda name: Q8_0, dequantized=plain)
    prompt = ChatPrompt([{"role": "user", "content": "Once upon a time"}])
    texts = []
    for model in (folder, plain):
        with closing(LLMEngine(EngineConfig(model=str(model), num_blocks=32))) as engine:
            (output,) = engine.generate([prompt], GREEDY)
        texts.append((output.prompt_token_ids, output.outputs[0].text))
    assert texts[0] == texts[1]
    write_gguf(seeded("qwen2"), folder / "other.gguf", lambda name: F16)
    with pytest.raises(ValueError, match=r"several GGUF files \(m.Q8_0.gguf, other.gguf\)"):
        Checkpoint.open(folder)


def test_the_header_is_read_as_by_the_gguf_package(seeded: Callable[[str], str], tmp_path: Path):
    file = write_gguf(seeded("gemma2"), tmp_path / "m.gguf", mixed())
    header, reader = read_gguf_header(file), GGUFReader(file)
    assert header.tensors.keys() == {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        ours = header.tensors[tensor.name]
        assert (ours.start, ours.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert ours.type_name == tensor.tensor_type.name
    for key, value in header.metadata.items():
        theirs = reader.fields[key].contents()
        assert value == (len(theirs) if isinstance(theirs, list) and value != theirs else theirs)


UP_OF_BLOCK = "blk.0.ffn_up.weight"

# Offsets after a key: its type, then the value; after a tensor's name: dimensions, type, offset.
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
    start = content.index(name.encode()) + len(name) + skip
    return content[:start] + struct.pack(form, value) + content[start + struct.calcsize(form) :]


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
    "no dimension": ((UP_OF_BLOCK, DIMENSION, "<Q", 0), "has shape"),
    "unknown type": ((UP_OF_BLOCK, KIND, "<I", 999), "type 999, which is not known"),
    "type without rows": ((UP_OF_BLOCK, KIND, "<I", 14), "blocks of 256 values"),
    "integers": ((UP_OF_BLOCK, KIND, "<I", 24), "of the type I8"),
    "offset outside": ((UP_OF_BLOCK, OFFSET, "<Q", 2**40), "but the file has"),
    "offset between": ((UP_OF_BLOCK, OFFSET, "<Q", 33), "multiple of 32"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_hostile_file_is_refused_by_name_before_memory_is_allocated(
    harm: str, whole: bytes, tmp_path: Path
):
    change, message = HARMS[harm]
    file = tmp_path / "hostile.gguf"
    file.write_bytes(patched(whole, *change))
    with pytest.raises(ValueError, match=str(file)):  # does the imports, which allocate
        attempt(file)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError) as error:
            attempt(file)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(file) in str(error.value)
    assert message in str(error.value)
    assert peak < 2**24, f"{peak} bytes were allocated"


@given(st.data())
def test_a_truncated_file_is_refused(
    whole: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
):
    file = tmp_path_factory.getbasetemp() / "cut.gguf"
    file.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(ValueError, match="cut.gguf"):
        read_gguf_header(file)


@settings(max_examples=examples(50))
@given(st.data())
def test_a_file_with_damaged_bytes_is_read_or_refused_by_name(
    whole: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
):
    content = bytearray(whole)
    end = whole.index(b"output_norm.weight") + 40
    for position in data.draw(st.lists(st.integers(0, end), min_size=1, max_size=3)):
        content[position] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.getbasetemp() / "damaged.gguf"
    file.write_bytes(content)
    try:
        open_checkpoint(file)
    except ValueError as error:
        assert "damaged.gguf" in str(error)


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "model", "merges"])
def test_an_invalid_tokenizer_is_refused_by_name(
    key: str, seeded: Callable[[str], str], tmp_path: Path
):
    values = {"model": (8, "4s", b"evil"), "merges": (24, "2s", b"zz")}
    file = write_gguf(seeded("llama"), tmp_path / "m.gguf", lambda name: F32)
    skip, form, value = values.get(key, (0, "<I", 2**31))
    content = patched(file.read_bytes(), f"tokenizer.ggml.{key}", 4 + skip, form, value)
    file.write_bytes(content)
    with pytest.raises(ValueError, match=str(file)):
        open_checkpoint(file)
        load_tokenizer(file)


def test_a_file_of_another_kind_and_a_split_file_are_refused(tmp_path: Path):
    file = tmp_path / "m.txt"
    file.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"a folder with a config.json, or a .gguf file"):
        open_checkpoint(file)
    part = tiny_gguf(tmp_path, more=lambda writer: writer.add_uint16("split.count", 3))
    with pytest.raises(ValueError, match="one of 3 parts; join them"):
        open_checkpoint(part)

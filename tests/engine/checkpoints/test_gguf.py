"""GGUF files say what transformers says of the same weights, whatever blocks they are in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from transformers import AutoTokenizer
from transformers.integrations.gguf.dequant import dequantize

from engine import ChatPrompt, EngineConfig, LLMEngine, SamplingParams, TokensPrompt
from engine.checkpoints.checkpoint import Checkpoint
from engine.files.gguf_header import read_gguf_header
from engine.text.tokenizer import load_tokenizer
from omni.seeded.language_models import build_causal_lm
from tests.support.gguf_files import random_blocks, tiny_gguf, write_gguf
from tests.support.greedy_reference import GreedyReference, assert_greedy, assert_near

F32, F16, BF16 = (GGMLQuantizationType[name] for name in ("F32", "F16", "BF16"))
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
    "llama untied with biases": ("llama", {"tied": False, "attention_bias": True}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3, "hidden_size": 128, "num_heads": 2}),
    "qwen2": ("qwen2", {}),
    "qwen2 yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", {"num_layers": 6, "layer_types": [SLIDING] * 5 + [FULL]}),
}
PROMPT = list(range(30, 75))
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def mixed() -> Callable[[str], GGMLQuantizationType]:
    kinds = cycle(MIXED)
    return lambda name: next(kinds)


def add_llama3_factors(writer: GGUFWriter) -> None:
    """As llama.cpp's converter computes them, for a head of 64."""
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
def test_greedy_tokens_are_those_of_the_dequantized_weights(family: str, tmp_path: Path):
    architecture, settings = FAMILIES[family]
    source = build_causal_lm(tmp_path / "source", architecture, **settings)
    more = add_llama3_factors if family == "llama 3" else lambda writer: None
    plain = tmp_path / "plain"
    file = write_gguf(source, tmp_path / "m.gguf", mixed(), dequantized=plain, more=more)
    answer = GreedyReference(str(plain)).from_ids(PROMPT, 8)
    # By torch all is dequantized on load; kernels multiply codes, and round what they multiply.
    for backend, tolerance in (("torch", 1e-4), ("auto", 5e-3)):
        config = EngineConfig(model=str(file), num_blocks=32, attention_backend=backend)
        with closing(LLMEngine(config)) as engine:
            (output,) = engine.generate([TokensPrompt(PROMPT)], GREEDY)
            assert engine.tokenizer is not None
        assert_greedy(answer, output.outputs[0].token_ids)
        assert_near(output.outputs[0].tensors["hidden_states"], answer.hidden_states, tolerance)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K"])
def test_blocks_have_the_values_that_transformers_gives_them(name: str, tmp_path: Path):
    kind, shape = GGMLQuantizationType[name], (6, 512)
    blocks = random_blocks(kind, shape)
    checkpoint = Checkpoint.open(tiny_gguf(tmp_path, ("blk.0.ffn_up.weight", blocks, kind)))
    ((_, read),) = checkpoint.weights(["model.layers.0.mlp.up_proj.weight"])
    expected = dequantize(torch.from_numpy(blocks), kind.value)
    torch.testing.assert_close(read, expected.reshape(shape), rtol=1e-6, atol=1e-6)


def test_the_tokenizer_is_transformers_and_says_what_the_checkpoints_says(
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


def test_the_header_is_read_as_the_gguf_package_reads_it(
    seeded: Callable[[str], str], tmp_path: Path
):
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

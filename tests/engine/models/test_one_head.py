"""One key head, or one head in all: dimensions of size 1 change strides, and kernels read those."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from engine import ChatPrompt, EngineConfig, LLMEngine, Prompt, RequestOutput, SamplingParams
from omni.seeded.encoder_decoders import build_bart, build_mllama, build_t5, build_whisper
from omni.seeded.language_models import build_causal_lm
from omni.seeded.multimodal import build_llava, build_qwen2_5_vl
from tests.support.encoder_decoder_requests import cases
from tests.support.native_kernels import needs_kernels

DECODERS = ("qwen2", "qwen3", "llama", "mistral", "ministral", "gemma2", "gemma3_text")
HYBRIDS = ("jamba", "bamba")
TEXTS = ["the quick brown fox", "hm", "first collect the tools, then read the instructions " * 3]
SEEN = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Where?"}]}

BUILDERS: dict[str, Callable[[Path], Path]] = {
    **{
        name: partial(build_causal_lm, architecture=name, num_kv_heads=1, num_layers=3)
        for name in DECODERS
    },
    **{
        name: partial(build_causal_lm, architecture=name, num_kv_heads=1, num_layers=4, tied=False)
        for name in HYBRIDS
    },
    "qwen2 with one head": partial(build_causal_lm, num_heads=1, num_kv_heads=1),
    "gemma3 with one head": partial(
        build_causal_lm, architecture="gemma3_text", num_heads=1, num_kv_heads=1, num_layers=3
    ),
    "bart": partial(build_bart, num_heads=1),
    "t5": partial(build_t5, num_heads=1),
    "whisper": partial(build_whisper, decoder_attention_heads=1, encoder_attention_heads=1),
    "mllama": partial(build_mllama, num_key_value_heads=1),
    "mllama with one head": partial(
        build_mllama, num_key_value_heads=1, num_attention_heads=1, hidden_size=16
    ),
    "llava": partial(build_llava, num_key_value_heads=1),
    "qwen2_5_vl": partial(build_qwen2_5_vl, num_key_value_heads=1),
}


def prompts(name: str, folder: Path) -> Sequence[Prompt]:
    family = name.split()[0]
    if family in ("bart", "t5", "whisper", "mllama"):
        return [case.prompt for case in cases(family, str(folder))]
    if family in ("llava", "qwen2_5_vl"):
        return [ChatPrompt((SEEN,), {"image": [Image.new("RGB", (60, 40), "teal")]})]
    return TEXTS


def run(folder: Path, given: Sequence[Prompt], backend: Any) -> list[RequestOutput]:
    engine = LLMEngine(
        EngineConfig(
            model=str(folder),
            device="cpu",
            num_blocks=128,
            block_size=8,
            attention_backend=backend,
            max_model_len=120,
        ),
        output_names=("hidden_states",),
    )
    try:
        return list(engine.generate(given, SamplingParams(max_tokens=6, ignore_eos=True)))
    finally:
        engine.close()


@needs_kernels
@pytest.mark.parametrize("name", BUILDERS)
def test_one_head_runs_by_the_kernels_as_by_torch(name: str, tmp_path: Path):
    folder = BUILDERS[name](tmp_path / "checkpoint")
    given = prompts(name, folder)
    for ours, expected in zip(
        run(folder, given, "native"), run(folder, given, "torch"), strict=True
    ):
        assert ours.error is None and expected.error is None
        assert ours.outputs[0].token_ids == expected.outputs[0].token_ids
        for key, rows in expected.outputs[0].tensors.items():
            torch.testing.assert_close(ours.outputs[0].tensors[key], rows, atol=2e-4, rtol=2e-4)

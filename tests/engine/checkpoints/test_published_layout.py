"""Checkpoints as the hub has them give what those that transformers writes today give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from engine import ChatPrompt, EngineConfig, LLMEngine, RequestOutput, SamplingParams
from engine.models.model_loader import open_checkpoint
from engine.text.tokenizer import eos_token_ids, load_tokenizer
from tests.support.published_layout import publish

MODELS = [("llava", None), ("qwen2_5_vl", None), ("qwen2_5_omni", "thinker")]
MESSAGE = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Where?"}]}


def answer(folder: str | Path, part: str | None) -> RequestOutput:
    chat = ChatPrompt((MESSAGE,), {"image": [Image.new("RGB", (60, 40), "teal")]})
    config = EngineConfig(model=str(folder), part=part, num_blocks=64, max_model_len=256)
    engine = LLMEngine(config)
    try:
        (output,) = engine.generate([chat], SamplingParams(max_tokens=16, ignore_eos=True))
    finally:
        engine.close()
    return output


@pytest.mark.parametrize(("name", "part"), MODELS)
def test_the_published_layout_changes_no_token(
    name: str, part: str | None, seeded: Callable[[str], str], tmp_path: Path
):
    folder = seeded(name)
    here, there = answer(folder, part), answer(publish(folder, tmp_path / "model"), part)
    assert here.prompt_token_ids == there.prompt_token_ids, "the chat template is the processor's"
    assert here.outputs[0].token_ids == there.outputs[0].token_ids


@pytest.mark.parametrize(("name", "part"), MODELS)
def test_the_published_layout_ends_replies_by_the_same_tokens(
    name: str, part: str | None, seeded: Callable[[str], str], tmp_path: Path
):
    folder = seeded(name)
    found = []
    for each in (folder, publish(folder, tmp_path / "model")):
        checkpoint = open_checkpoint(each, part=part)
        tokenizer = load_tokenizer(each)
        found.append(eos_token_ids(checkpoint.config, checkpoint.generation_config, tokenizer))
    assert found[0] == found[1] != frozenset()

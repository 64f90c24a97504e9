"""Loading tokenizers, and the ids that end a sequence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlavaConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from engine.text.tokenizer import eos_token_ids, load_tokenizer
from tests.support.tokenizers import byte_level


@pytest.mark.parametrize("name", ["qwen2", "llama", "bert"])
def test_a_loaded_tokenizer_is_the_one_of_transformers(name: str, seeded: Callable[[str], str]):
    folder = seeded(name)
    tokenizer, expected = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert tokenizer is not None
    text = "The harbour wakes — 12 €."
    assert tokenizer(text)["input_ids"] == expected(text)["input_ids"]


def test_a_folder_without_tokenizer_files_has_none(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(tmp_path) is None


def test_a_missing_folder_is_an_error_that_names_it(tmp_path: Path):
    with pytest.raises(ValueError, match="nowhere is no folder"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_damaged_tokenizer_is_an_error_that_names_the_folder(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{ damaged")
    with pytest.raises(ValueError, match=rf"{tmp_path.name} cannot be loaded"):
        load_tokenizer(tmp_path)


def generation_config(eos: int | list[int] | None) -> GenerationConfig:
    return GenerationConfig(eos_token_id=eos)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (Qwen2Config(eos_token_id=7), generation_config([8, 9]), {8, 9}),
        (Qwen2Config(eos_token_id=7), generation_config(None), {7}),
        (Qwen2Config(eos_token_id=7), None, {7}),
        (Qwen2Config(eos_token_id=[7, 6]), None, {7, 6}),
        (Qwen2Config(eos_token_id=0), None, {0}),
        (LlavaConfig(text_config=Qwen2Config(eos_token_id=5)), None, {5}),
    ],
)
def test_the_first_source_that_names_eos_is_believed(
    config: PreTrainedConfig, generation: GenerationConfig | None, expected: set[int]
):
    assert eos_token_ids(config, generation, byte_level()) == expected


def test_the_tokenizer_names_eos_when_no_config_does():
    config = Qwen2Config(eos_token_id=None)
    assert eos_token_ids(config, None, byte_level()) == {byte_level().eos_token_id}
    assert eos_token_ids(config, None, None) == frozenset()
    assert eos_token_ids(None, None, None) == frozenset()

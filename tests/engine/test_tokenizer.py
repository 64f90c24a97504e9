"""Loading tokenizers, the ids that end a sequence, and chat templates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlavaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from engine.tokenizer import eos_token_ids, load_tokenizer, render_chat
from tests.support.tokenizers import byte_level

MESSAGES = [{"role": "user", "content": "Hello, dog."}]


@pytest.fixture
def chat_tokenizer(qwen2_checkpoint: str) -> PreTrainedTokenizerFast:
    tokenizer = load_tokenizer(qwen2_checkpoint)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


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


def test_chat_asks_for_the_assistants_message(chat_tokenizer: PreTrainedTokenizerFast):
    text = render_chat(chat_tokenizer, MESSAGES)
    assert "Hello, dog." in text
    assert text == chat_tokenizer.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True
    )
    assert text != chat_tokenizer.apply_chat_template(MESSAGES, tokenize=False)


def test_chat_without_a_template_is_a_clear_error():
    with pytest.raises(ValueError, match="no chat template"):
        render_chat(byte_level(), MESSAGES)


def test_what_the_template_refuses_is_a_clear_error(
    chat_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
):
    template = "{{ raise_exception('roles must alternate') }}"
    monkeypatch.setattr(chat_tokenizer, "chat_template", template)
    with pytest.raises(ValueError, match=r"refuses the messages.*roles must alternate"):
        render_chat(chat_tokenizer, MESSAGES)


def test_malformed_messages_are_named_by_their_place(chat_tokenizer: PreTrainedTokenizerFast):
    with pytest.raises(ValueError, match="at least one message"):
        render_chat(chat_tokenizer, [])
    with pytest.raises(ValueError, match="message 1 lacks content"):
        render_chat(chat_tokenizer, [*MESSAGES, {"role": "user"}])


@pytest.mark.parametrize(
    ("message", "mistake"),
    [
        ("hello", "message 1 must be a mapping of role and content, got 'hello'"),
        ({"role": "user", "content": 3}, "message 1: content must be text or a list of parts"),
        ({"role": "user", "content": ["x"]}, "message 1, part 0 must be a mapping whose type"),
        ({"role": "user", "content": [{"text": "x"}]}, "message 1, part 0 must be a mapping whose"),
        (
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
            "type is one of text, image, audio, video, got {'type': 'input_audio'",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "part 0 is of type text, so its text"),
        (
            {"role": "user", "content": [{"type": "audio", "audio": "question.wav"}]},
            r"part 0 carries 'audio'; .* multi_modal_data\['audio'\]",
        ),
    ],
)
def test_what_a_template_might_leave_out_silently_is_refused(
    chat_tokenizer: PreTrainedTokenizerFast, message: Any, mistake: str
):
    with pytest.raises(ValueError, match=mistake):
        render_chat(chat_tokenizer, [*MESSAGES, message])

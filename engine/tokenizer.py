"""The checkpoint's tokenizer, its chat template, and the ids that end a sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

__all__ = ["eos_token_ids", "load_tokenizer", "render_chat"]

# Any of these means that the checkpoint brings a tokenizer.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)

_PART_TYPES = ("text", "image", "audio", "video")


def load_tokenizer(
    model_path: str | Path, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a checkpoint folder; None when it brings none.

    Args:
        model_path: the folder.
        trust_remote_code: whether the tokenizer may come with its own Python code.

    Raises:
        ValueError: the folder is not there, or its tokenizer cannot be loaded.
    """
    folder = Path(model_path)
    if not folder.is_dir():
        raise ValueError(f"cannot load a tokenizer: {folder} is no folder")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    # The formats' parsers raise whatever they like, bare Exception included.
    except Exception as error:
        raise ValueError(f"the tokenizer in {folder} cannot be loaded: {error}") from error
    return tokenizer


def eos_token_ids(
    config: PreTrainedConfig | None,
    generation_config: GenerationConfig | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> frozenset[int]:
    """The ids that end a sequence; empty when nothing names one.

    The first source that names any is believed, as in transformers' ``generate``: the generation
    config (an instruction-tuned checkpoint lists the end of a turn there), the model config, a
    multi-modal config's text part, the tokenizer.
    """
    text_config = None if config is None else config.get_text_config()
    for source in (generation_config, config, text_config, tokenizer):
        named = getattr(source, "eos_token_id", None)
        if isinstance(named, int):
            return frozenset({named})
        if named:
            return frozenset(int(token_id) for token_id in named)
    return frozenset()


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]) -> str:
    """Turn chat messages into a prompt that asks for the assistant's next message.

    Args:
        tokenizer: of the checkpoint.
        messages: each with ``role`` and ``content``, oldest first.

    Returns:
        The text, special tokens included: tokenize it without adding any.

    Raises:
        ValueError: no messages, a malformed one, no chat template, or the template refuses the
            messages (an unknown role, roles that do not alternate).
    """
    if not messages:
        raise ValueError("a chat prompt needs at least one message")
    for index, message in enumerate(messages):
        _check_message(f"chat message {index}", message)
    if not tokenizer.chat_template:
        raise ValueError(
            "the checkpoint's tokenizer has no chat template, so chat messages cannot be turned "
            "into text; give the prompt as text"
        )
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
    except TemplateError as error:
        raise ValueError(f"the chat template refuses the messages: {error}") from error
    return str(text)


def _check_message(name: str, message: object) -> None:
    """Refuse what a chat template may leave out without a word, so that nobody would hear it."""
    if not isinstance(message, Mapping):
        raise ValueError(f"{name} must be a mapping of role and content, got {message!r}")
    missing = [key for key in ("role", "content") if key not in message]
    if missing:
        raise ValueError(f"{name} lacks {' and '.join(missing)}; it has {sorted(message)}")
    content = message["content"]
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, Sequence):
        raise ValueError(f"{name}: content must be text or a list of parts, got {content!r}")
    for number, part in enumerate(content):
        _check_part(f"{name}, part {number}", part)


def _check_part(name: str, part: object) -> None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind not in _PART_TYPES:
        raise ValueError(
            f"{name} must be a mapping whose type is one of {', '.join(_PART_TYPES)}, got {part!r}"
        )
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise ValueError(f"{name} is of type text, so its text must be a str")
        return
    carried = sorted(set(part) - {"type"})
    if carried:
        raise ValueError(
            f"{name} carries {', '.join(map(repr, carried))}; the part only says where the {kind} "
            f"belongs: give what it shows in the prompt's multi_modal_data[{kind!r}]"
        )

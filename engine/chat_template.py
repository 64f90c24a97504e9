"""Chat messages to text, by the template that a checkpoint brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

__all__ = ["processor_chat_template", "render_chat"]

# Where processors keep templates that their tokenizers do not know of.
_PROCESSOR_FILES = ("chat_template.json", "processor_config.json")
_PART_TYPES = ("text", "image", "audio", "video")
_PROBE = "What does it read?"


def processor_chat_template(folder: Path) -> Any:
    """The template of a checkpoint's processor, as a tokenizer holds one; None if it has none.

    Published checkpoints that see and hear keep the one that knows images and sound there, and
    give their tokenizer none or one for text alone.

    Raises:
        ValueError: a file that should hold it cannot be read.
    """
    if not any((folder / name).is_file() for name in _PROCESSOR_FILES):
        return None
    from transformers import ProcessorMixin  # takes a second to import, and most do without

    try:
        settings, _ = ProcessorMixin.get_processor_dict(folder, local_files_only=True)
    except Exception as error:  # parsers raise whatever they like
        raise ValueError(
            f"the processor's chat template in {folder} cannot be loaded: {error!r}"
        ) from error
    return settings.get("chat_template")


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]) -> str:
    """Turn chat messages into a prompt that asks for the assistant's next message.

    Some templates read a message's content as text, some as a list of parts, some as either; what
    a template cannot read it may leave out without a word. So it is given what it reads: text as
    the one part of a list, or parts of text joined by line breaks.

    Args:
        tokenizer: of the checkpoint.
        messages: each with ``role`` and ``content``, oldest first.

    Returns:
        The text, special tokens included: tokenize it without adding any.

    Raises:
        ValueError: no messages, a malformed one, no chat template, or the template refuses the
            messages (an unknown role, roles that do not alternate, an image where it reads text).
    """
    if not messages:
        raise ValueError("a chat prompt needs at least one message")
    for index, message in enumerate(messages):
        _check_message(f"chat message {index}", message)
    if not tokenizer.chat_template:
        raise ValueError(
            "the checkpoint has no chat template, so chat messages cannot be turned into text; "
            "give the prompt as text"
        )
    reads_text = _reads(tokenizer, _PROBE)
    reads_parts = _reads(tokenizer, [_text_part(_PROBE)])
    if reads_text != reads_parts:
        messages = [
            {**message, "content": _content(index, message["content"], reads_parts)}
            for index, message in enumerate(messages)
        ]
    try:
        return _render(tokenizer, messages)
    except Exception as error:  # a template is a program, of anybody's
        raise ValueError(f"the chat template refuses the messages: {error}") from error


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]) -> str:
    return str(
        tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
    )


def _reads(tokenizer: PreTrainedTokenizerBase, content: str | list[dict[str, str]]) -> bool:
    """Whether the template puts out what such a content says, and not how Python prints it."""
    try:
        text = _render(tokenizer, [{"role": "user", "content": content}])
    except Exception:  # it may refuse this content, or any lone message; either is told later
        return False
    return _PROBE in text and repr(_PROBE) not in text


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _content(
    index: int, content: str | Sequence[Mapping[str, Any]] | None, as_parts: bool
) -> str | Sequence[Mapping[str, Any]] | None:
    if content is None or isinstance(content, str) is not as_parts:
        return content
    if isinstance(content, str):
        return [_text_part(content)]
    shown = sorted({part["type"] for part in content} - {"text"})
    if shown:
        raise ValueError(
            f"chat message {index} shows {' and '.join(shown)}, but the checkpoint's chat template "
            "reads text alone"
        )
    return "\n".join(part["text"] for part in content)


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

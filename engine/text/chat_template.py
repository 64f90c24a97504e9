"""Chat messages to text, by the template that a checkpoint brings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Any, Literal, TypeAlias

from transformers import PreTrainedTokenizerBase

from engine.files.json_file import read_json_object
from engine.text.job_processes import JobProcesses

__all__ = [
    "TemplateLimitError",
    "TemplateLimits",
    "TemplateProcesses",
    "TemplateRefusalError",
    "processor_chat_template",
    "render_chat",
]

Message: TypeAlias = Mapping[str, Any]
Form: TypeAlias = Literal["text", "parts"]

# Where processors keep templates that their tokenizers do not know of, the first that has one.
_PROCESSOR_FILES = ("processor_config.json", "chat_template.json")
_PART_TYPES = ("text", "image", "audio", "video")
_MOST_TRIES = 16
# A message's reasoning by its names, the one that templates read first, as transformers has them.
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """What the rendering of one prompt may take."""

    max_chars: int = 2**22
    seconds: float = 5.0
    num_bytes: int = 2**29


class TemplateLimitError(ValueError):
    """A template took more than it may; another try would as well."""


class TemplateRefusalError(Exception):
    """A template raised.

    Args:
        is_deliberate: whether it refused the messages, rather than stumbled.
    """

    def __init__(self, message: str, is_deliberate: bool) -> None:
        super().__init__(message)
        self.is_deliberate = is_deliberate


class TemplateProcesses(JobProcesses):
    """Renders chat templates."""

    def render(
        self, template: str, values: Mapping[str, Any], limits: TemplateLimits
    ) -> tuple[str, float]:
        """Render a template.

        Args:
            values: what it sees. What JSON does not know is replaced by the name of its type.

        Returns:
            The text, and the seconds of CPU time that it took.

        Raises:
            TemplateLimitError: it took more than it may; says of what.
            TemplateRefusalError: the template raised.
            ValueError: the values cannot be written as JSON.
        """
        job = _line(
            {
                "template": template,
                "values": values,
                "chars": limits.max_chars,
                "seconds": limits.seconds,
                "bytes": limits.num_bytes,
            }
        )
        answer = self.ask(job, limits.seconds)
        if isinstance(answer, str):
            raise _ended(answer, limits)
        if "error" in answer:
            raise TemplateRefusalError(answer["error"], answer["refused"])
        if "beyond" in answer:
            raise _beyond(answer["beyond"], limits)
        return answer["text"], answer["seconds"]


def _line(job: Mapping[str, Any]) -> bytes:
    try:
        # What a message carries beside words, templates only ask for.
        text = json.dumps(job, default=lambda each: f"<{type(each).__name__}>")
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the chat messages are no plain data: {error}") from error
    return text.encode() + b"\n"


def _beyond(limit: str, limits: TemplateLimits) -> TemplateLimitError:
    if limit == "characters":
        return TemplateLimitError(
            f"what the checkpoint's chat template makes of the messages has more than "
            f"{limits.max_chars} characters; shorten them, or raise engine.limits.max_prompt_chars"
        )
    return TemplateLimitError(
        f"the checkpoint's chat template took more than {limits.num_bytes} bytes of memory; if it "
        "is to be trusted, raise engine.limits.template_bytes"
    )


def _ended(status: str, limits: TemplateLimits) -> TemplateLimitError:
    if status == "seconds":
        return TemplateLimitError(
            f"the checkpoint's chat template took more than {limits.seconds:.3g} s of CPU time; if "
            "it is to be trusted, raise engine.limits.template_seconds"
        )
    return TemplateLimitError(
        f"the process of the checkpoint's chat template ended with status {status}; "
        "the template may not work, or need more memory: see engine.limits.template_bytes"
    )


_PROCESSES = TemplateProcesses()
_LIMITS = TemplateLimits()


class _Shown(ValueError):
    """An image or the like stands where a template is to be given text."""


def processor_chat_template(folder: Path) -> Any:
    """The template of a checkpoint's processor, as a tokenizer holds one; None if it has none.

    Published checkpoints that see and hear keep the one that knows images and sound there, and give
    their tokenizer none or one for text alone. Tokenizers read a ``chat_template.jinja``.

    Raises:
        ValueError: a file that may hold it cannot be read.
    """
    for file in (folder / name for name in _PROCESSOR_FILES):
        if not file.is_file():
            continue
        try:
            template = read_json_object(file).get("chat_template")
        except ValueError as error:
            raise ValueError(f"the chat template in {file} cannot be loaded: {error}") from error
        if template:
            return template
    return None


class _Rendering:
    """The tries of one prompt, which share what it may take."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, limits: TemplateLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._spent_s = 0.0

    def render(self, messages: Sequence[Message]) -> str:
        """See :meth:`TemplateProcesses.render`."""
        kind = type(self._tokenizer)
        if kind.apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
            # A class that writes chats itself: transformers', or remote code that is trusted.
            return self._by_tokenizer(messages)
        left = replace(self._limits, seconds=max(self._limits.seconds - self._spent_s, 1e-3))
        values = {
            **self._tokenizer.special_tokens_map,
            "messages": [_as_shown(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        template: Any = self._tokenizer.get_chat_template()
        if not isinstance(template, str):
            got = type(template).__name__
            raise ValueError(f"the checkpoint's chat template must be text, got {got}")
        text, seconds = _PROCESSES.render(template, values, left)
        self._spent_s += seconds
        return text

    def _by_tokenizer(self, messages: Sequence[Message]) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tokenize=False,
                    add_generation_prompt=True,
                )
            )
        except Exception as error:  # as of a template
            raise TemplateRefusalError(str(error), is_deliberate=False) from error


def _as_shown(message: Message) -> dict[str, Any]:
    """A message as transformers shows it to templates: without what is None."""
    shown = {key: value for key, value in message.items() if value is not None}
    reasoning = next((shown[key] for key in _REASONING_KEYS if key in shown), None)
    if reasoning is None:
        return shown
    return {"thinking": reasoning, **shown, "reasoning_content": reasoning}


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    limits: TemplateLimits = _LIMITS,
) -> str:
    """Turn chat messages into a prompt that asks for the assistant's next message.

    Templates read a message's content as text, or as a list of parts, or as either, and not
    always alike for every role; what they cannot read they may leave out without a word, or print
    as Python prints a list. So the messages are tried with marks in the place of their words:
    first as they are, then, role by role, as text (parts of text joined by line breaks) or as one
    part. The first way in which all marks come out is taken.

    The template comes with the checkpoint and is a program. It runs in a process of its own, which
    is ended when it takes too much.

    Args:
        messages: each with ``role`` and ``content``, oldest first.

    Returns:
        The text, special tokens included: tokenize it without adding any.

    Raises:
        ValueError: no messages, a malformed one, no chat template, or the template refuses the
            messages (roles that do not alternate, an image where it reads text), leaves out what
            one of them says (of an unknown role), or takes more than it may.
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
    rendering, problems = _Rendering(tokenizer, limits), []
    for forms in _tries(messages):
        try:
            converted = [_convert(index, each, forms) for index, each in enumerate(messages)]
            _check_read(rendering, converted)
            return rendering.render(converted)
        except TemplateLimitError:
            raise
        except (TemplateRefusalError, ValueError) as error:
            problems.append(error)
    raise _most_telling(problems)


def _most_telling(problems: Sequence[Exception]) -> ValueError:
    """What to tell of the ways that failed; the first was that with the messages as they are."""
    first = problems[0]
    shown = next((each for each in problems if isinstance(each, _Shown)), None)
    is_deliberate = isinstance(first, TemplateRefusalError) and first.is_deliberate
    if shown is not None and not is_deliberate:
        return shown
    if isinstance(first, ValueError):
        return first
    return ValueError(f"the chat template refuses the messages: {first}")


def _tries(messages: Sequence[Message]) -> Iterator[Mapping[str, Form]]:
    """What form to give the content of each role, in the order in which to try: first, none."""
    yield {}
    given: dict[str, Form] = {}
    for message in messages:
        given.setdefault(message["role"], "text" if _is_text(message["content"]) else "parts")
    ways: list[tuple[Form, Form]] = [
        ("text", "parts") if form == "text" else ("parts", "text") for form in given.values()
    ]
    # No template has many roles, and messages with many shall not cost many tries.
    for forms in islice(product(*ways[:4]), _MOST_TRIES):
        yield dict(zip(given, forms, strict=False))


def _is_text(content: object) -> bool:
    return isinstance(content, str)


def _convert(index: int, message: Message, forms: Mapping[str, Form]) -> Message:
    content, form = message["content"], forms.get(message["role"])
    if content is None or form is None or _is_text(content) is (form == "text"):
        return message
    if form == "parts":
        return {**message, "content": [{"type": "text", "text": content}]}
    shown = sorted({part["type"] for part in content} - {"text"})
    if shown:
        raise _Shown(
            f"chat message {index} shows {' and '.join(shown)}, but the checkpoint's chat template "
            f"reads text alone from the role {message['role']!r}"
        )
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _check_read(rendering: _Rendering, messages: Sequence[Message]) -> None:
    """``ValueError`` if the template leaves words out, or what :class:`_Rendering` raises."""
    marks: dict[str, Message] = {}

    def mark(words: str, message: Message) -> str:
        if not words.strip():
            return words
        # With an apostrophe, which shows that words were quoted or escaped.
        marks[f"mark {len(marks)} isn't a word"] = message
        return next(reversed(marks))

    text = rendering.render([_marked(message, mark) for message in messages]).casefold()
    for each, message in marks.items():
        if each not in text or repr(each) in text:
            raise ValueError(
                f"the checkpoint's chat template leaves out what a message of the role "
                f"{message['role']!r} says, given as "
                f"{'text' if _is_text(message['content']) else 'a list of parts'}"
            )


def _marked(message: Message, mark: Callable[[str, Message], str]) -> Message:
    content = message["content"]
    if content is None:
        return message
    if isinstance(content, str):
        return {**message, "content": mark(content, message)}
    parts = [
        {**part, "text": mark(part["text"], message)} if part["type"] == "text" else part
        for part in content
    ]
    return {**message, "content": parts}


def _check_message(name: str, message: object) -> None:
    """Refuse what a chat template may leave out silently, so that the model never reads it."""
    if not isinstance(message, Mapping):
        raise ValueError(f"{name} must be a mapping of role and content, got {message!r}")
    missing = [key for key in ("role", "content") if key not in message]
    if missing:
        given = sorted(map(str, message))
        raise ValueError(f"{name} lacks {' and '.join(missing)}; it has {given}")
    role, content = message["role"], message["content"]
    if not isinstance(role, str):
        raise ValueError(f"{name}: role must be a str, got {role!r}")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
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
    carried = sorted(map(str, set(part) - {"type"}))
    if carried:
        raise ValueError(
            f"{name} carries {', '.join(map(repr, carried))}; the part only says where the {kind} "
            f"belongs: give what it shows in the prompt's multi_modal_data[{kind!r}]"
        )

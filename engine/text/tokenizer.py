"""The checkpoint's tokenizer, its chat template, and the ids that end a sequence.

A tokenizer provides the regular expressions that split texts. Their engine backtracks: a pattern
such as ``a*a*a*b`` can take minutes for a text of a few hundred characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from engine.files.gguf_header import find_gguf, read_gguf_header
from engine.files.json_file import read_json_object
from engine.interface.ownership import turn_of
from engine.text.job_processes import JobProcesses

Message: TypeAlias = Mapping[str, Any]
Form: TypeAlias = Literal["text", "parts"]

# Files of processors with templates that their tokenizers lack; the first with a template is used.
_PROCESSOR_FILES = ("processor_config.json", "chat_template.json")
_TEMPLATE_VALUES = {"messages", "tools", "documents"}
_PART_TYPES = ("text", "image", "audio", "video")
_MAX_TRIES = 16
# Keys of a message's reasoning, in the order in which transformers' templates read them.
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Resource limits of rendering one prompt."""

    max_chars: int = 2**22
    seconds: float = 5.0
    num_bytes: int = 2**29


class TemplateLimitError(ValueError):
    """A template exceeded a limit; retrying would not help."""


class TemplateRefusalError(Exception):
    """An error raised by a template.

    Args:
        is_deliberate: True if it refused the messages, False if it failed by accident.
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
            values: its variables. Values that JSON does not support become the name of their type.

        Returns:
            The text, and the seconds of CPU time used.

        Raises:
            TemplateLimitError: it exceeded a limit, which the message names.
            TemplateRefusalError: the template raised.
            ValueError: the values cannot be written as JSON.
        """
        job = _encode(
            {
                "template": template,
                "values": values,
                "chars": limits.max_chars,
                "seconds": limits.seconds,
                "bytes": limits.num_bytes,
            }
        )
        answer = self.ask(job, limits.seconds)
        if isinstance(answer, dict) and "text" in answer:
            return answer["text"], answer["seconds"]
        if isinstance(answer, dict) and "error" in answer:
            raise TemplateRefusalError(answer["error"], answer["refused"])
        beyond = answer["beyond"] if isinstance(answer, dict) else answer
        reason = _LIMIT_REASONS.get(beyond, _LIMIT_REASONS["status"])
        raise TemplateLimitError(f"the checkpoint's chat template {reason.format(limits, beyond)}")


_LIMIT_REASONS = {
    "characters": "makes more than {0.max_chars} characters of the messages; shorten them, or "
    "raise engine.limits.max_prompt_chars",
    "memory": "took more than {0.num_bytes} bytes of memory; if it is to be trusted, raise "
    "engine.limits.template_bytes",
    "seconds": "took more than {0.seconds:.3g} s of CPU time; if it is to be trusted, raise "
    "engine.limits.template_seconds",
    "status": "ended its process with status {1}; it may not work, or need more memory: see "
    "engine.limits.template_bytes",
}


def _encode(job: Mapping[str, Any]) -> bytes:
    try:
        # Templates only test the presence of a message's content other than text.
        text = json.dumps(job, default=lambda each: f"<{type(each).__name__}>")
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the chat messages are no plain data: {error}") from error
    return text.encode() + b"\n"


_PROCESSES = TemplateProcesses()
_LIMITS = TemplateLimits()


class _FinalError(ValueError):
    """An error of messages or tools that no other form of their content avoids."""


def processor_chat_template(folder: Path) -> Any:
    """Return the template of a checkpoint's processor, as a tokenizer holds one, or None.

    Published multimodal checkpoints keep the template for images and audio there; their tokenizer
    has none or one for text only. Tokenizers read a ``chat_template.jinja`` themselves.

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


@dataclass(slots=True)
class _Rendering:
    """The rendering attempts of one prompt, which share its limits.

    With ``continues`` the prompt ends within the last message.
    """

    tokenizer: PreTrainedTokenizerBase
    tools: list[Any] | None
    values: Mapping[str, Any]
    limits: TemplateLimits
    continues: bool
    spent_s: float = 0.0

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return the prompt; raises the same errors as :meth:`render`."""
        if not self.continues:
            return self.render(messages)
        text, tag, end = self.render([*messages[:-1], _tag_end(messages[-1])]).rpartition(_END_TAG)
        if not tag:
            raise ValueError(
                "the checkpoint's chat template leaves out the end of the last message"
            )
        return text if end.startswith(" ") else text.rstrip()  # as the template trims messages

    def render(self, messages: Sequence[Message]) -> str:
        """See :meth:`TemplateProcesses.render`."""
        base = PreTrainedTokenizerBase
        if type(self.tokenizer).apply_chat_template is not base.apply_chat_template:
            # A class that formats chats itself: transformers' own, or trusted remote code.
            return self._render_by_tokenizer(messages)
        left = replace(self.limits, seconds=max(self.limits.seconds - self.spent_s, 1e-3))
        values = {
            **self.tokenizer.special_tokens_map,
            **self.values,
            "messages": [_for_template(message) for message in messages],
            "tools": self.tools,
            "documents": None,
        }
        template: Any = self.tokenizer.get_chat_template(tools=self.tools)
        if not isinstance(template, str):
            got = type(template).__name__
            raise ValueError(f"the checkpoint's chat template must be text, got {got}")
        text, seconds = _PROCESSES.render(template, values, left)
        self.spent_s += seconds
        return text

    def _render_by_tokenizer(self, messages: Sequence[Message]) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=self.tools,
                    tokenize=False,
                    **self.values,
                )
            )
        except Exception as error:  # any, as with templates
            raise TemplateRefusalError(str(error), is_deliberate=False) from error


_END_TAG = "end of the message to continue"


def _tag_end(message: Message) -> Message:
    """Append a tag to a message's text, to find where the text ends in a rendered chat."""
    content, tag = message["content"], f"{_END_TAG} "
    if isinstance(content, str):
        return {**message, "content": content + tag}
    if not content or content[-1]["type"] != "text":
        raise _FinalError("continue_final_message needs text at the end of the last message")
    last = {**content[-1], "text": content[-1]["text"] + tag}
    return {**message, "content": [*content[:-1], last]}


def _for_template(message: Message) -> dict[str, Any]:
    """Return a message as transformers passes it to templates: without values of None."""
    shown = {key: value for key, value in message.items() if value is not None}
    reasoning = next((shown[key] for key in _REASONING_KEYS if key in shown), None)
    if reasoning is None:
        return shown
    return {"thinking": reasoning, **shown, "reasoning_content": reasoning}


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Message] = (),
    values: Mapping[str, Any] = MappingProxyType({}),
    *,
    limits: TemplateLimits = _LIMITS,
) -> str:
    """Render chat messages into a prompt for the assistant's next message.

    Templates read a message's content as text, as a list of parts, or as either, and may differ by
    role. They may silently drop content that they cannot read, or print it like a Python list. So
    the messages are first rendered with marks instead of their text: unchanged, then, role by
    role, as text (text parts joined by line breaks) or as one part. The first form in which all
    marks appear is used.

    The template comes with the checkpoint and is a program. It runs in a separate process, which
    is killed when it exceeds a limit.

    Args:
        messages: each with ``role`` and ``content``, oldest first.
        tools: see :class:`~engine.interface.prompts.ChatPrompt`.
        values: see ``chat_template_kwargs`` there.

    Returns:
        The text, with special tokens: tokenize it without adding any.

    Raises:
        ValueError: no messages, a malformed message or tool, no chat template, or the template
            refuses the messages (roles that do not alternate, an image where it reads text),
            omits the text of one of them (of an unknown role) or the tools, or exceeds a limit.
    """
    if not messages:
        raise ValueError("a chat prompt needs at least one message")
    for index, message in enumerate(messages):
        _check_message(f"chat message {index}", message)
    for index, tool in enumerate(tools):
        _check_tool(f"tool {index}", tool)
    if not tokenizer.chat_template:
        raise ValueError(
            "the checkpoint has no chat template, so chat messages cannot be turned into text; "
            "give the prompt as text"
        )
    rendering = _rendering(tokenizer, tools, values, limits)
    problems: list[Exception] = []
    for forms in _forms_to_try(messages):
        try:
            converted = [_convert(index, each, forms) for index, each in enumerate(messages)]
            _check_read(rendering, converted)
            return rendering.prompt(converted)
        except TemplateLimitError:
            raise
        except (TemplateRefusalError, ValueError) as error:
            problems.append(error)
    raise _choose_error(problems)


def _rendering(
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Message],
    values: Mapping[str, Any],
    limits: TemplateLimits,
) -> _Rendering:
    if taken := _TEMPLATE_VALUES & values.keys():
        raise ValueError(f"chat_template_kwargs has {sorted(taken)[0]!r}, which is given elsewhere")
    values = dict(values)
    continues = bool(values.pop("continue_final_message", False))
    if values.setdefault("add_generation_prompt", not continues) and continues:
        raise ValueError("continue_final_message needs add_generation_prompt to be false")
    return _Rendering(tokenizer, [dict(tool) for tool in tools] or None, values, limits, continues)


def _choose_error(problems: Sequence[Exception]) -> ValueError:
    """Choose the error to raise from those of all forms; the first is of the unchanged messages."""
    first = problems[0]
    final = next((each for each in problems if isinstance(each, _FinalError)), None)
    is_deliberate = isinstance(first, TemplateRefusalError) and first.is_deliberate
    if final is not None and not is_deliberate:
        return final
    if isinstance(first, ValueError):
        return first
    return ValueError(f"the chat template refuses the messages: {first}")


def _forms_to_try(messages: Sequence[Message]) -> Iterator[Mapping[str, Form]]:
    """Yield content forms by role, in the order to try them; the first changes nothing."""
    yield {}
    given: dict[str, Form] = {}
    for message in messages:
        is_text = isinstance(message["content"], str)
        given.setdefault(message["role"], "text" if is_text else "parts")
    ways: list[tuple[Form, Form]] = [
        ("text", "parts") if form == "text" else ("parts", "text") for form in given.values()
    ]
    # No template has many roles; messages with many roles must not cost many attempts.
    for forms in islice(product(*ways[:4]), _MAX_TRIES):
        yield dict(zip(given, forms, strict=False))


def _convert(index: int, message: Message, forms: Mapping[str, Form]) -> Message:
    content, form = message["content"], forms.get(message["role"])
    if content is None or form is None or isinstance(content, str) is (form == "text"):
        return message
    if form == "parts":
        return {**message, "content": [{"type": "text", "text": content}]}
    shown = sorted({part["type"] for part in content} - {"text"})
    if shown:
        raise _FinalError(
            f"chat message {index} shows {' and '.join(shown)}, but the checkpoint's chat template "
            f"reads text alone from the role {message['role']!r}"
        )
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _check_read(rendering: _Rendering, messages: Sequence[Message]) -> None:
    """Raise ``ValueError`` if the template omits text or tools, or what rendering raises."""
    marks: dict[str, Message] = {}

    def mark(words: str, message: Message) -> str:
        if not words.strip():
            return words
        # The apostrophe reveals quoting and escaping.
        marks[f"mark {len(marks)} isn't a word"] = message
        return next(reversed(marks))

    text = rendering.render([_mark(message, mark) for message in messages]).casefold()
    for each, message in marks.items():
        if each not in text or repr(each) in text:
            raise ValueError(
                f"the checkpoint's chat template leaves out what a message of the role "
                f"{message['role']!r} says, given as "
                f"{'text' if isinstance(message['content'], str) else 'a list of parts'}"
            )
    calls = (call for message in messages for call in message.get("tool_calls") or ())
    for call in (*(rendering.tools or ()), *calls):
        name = _function_name(call)
        if name is not None and name.casefold() not in text:
            raise _FinalError(
                f"the checkpoint's chat template knows no tools: it leaves out {name!r}"
            )


def _mark(message: Message, mark: Callable[[str, Message], str]) -> Message:
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
    """Refuse content that a chat template may silently omit, hiding it from the model."""
    if not isinstance(message, Mapping):
        raise ValueError(f"{name} must be a mapping of role and content, got {message!r}")
    missing = [key for key in ("role", "content") if key not in message]
    if missing:
        given = sorted(map(str, message))
        raise ValueError(f"{name} lacks {' and '.join(missing)}; it has {given}")
    role, content = message["role"], message["content"]
    if not isinstance(role, str):
        raise ValueError(f"{name}: role must be a str, got {role!r}")
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, Sequence):
        raise ValueError(f"{name}: tool_calls must be a list, got {calls!r}")
    for number, call in enumerate(calls):
        _check_tool(f"{name}, tool call {number}", call)
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return
    if not isinstance(content, Sequence):
        raise ValueError(f"{name}: content must be text or a list of parts, got {content!r}")
    for number, part in enumerate(content):
        _check_part(f"{name}, part {number}", part)


def _check_tool(name: str, tool: object) -> None:
    if _function_name(tool) is None:
        raise ValueError(f"{name} must be a mapping whose function has a name, got {tool!r:.200}")


def _function_name(tool: object) -> str | None:
    """Return the name in a tool or call: OpenAI's shape or, as for some templates, the function."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


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


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# Each is linear as well before the last alternative, which matches the same spaces.
_LAST = r"|\s+"
_SPACES = (r"\s*[\r\n]+", r"\s+(?!\S)")

_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?"
    rf"{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|"
    rf"{'|'.join(_SPACES)}{_LAST}"
)
# A character or a character class, with its quantifier.
_LITERAL = r"[^\\\[\](){}*+?|.^$]|\\[^\W\d_pPkgKRXQE]|\\\W|\."
_CLASS = r"\\[pP]\{\^?\w+\}|\[(?:[^\[\]\\]|\\.)+\]"
_PIECE = re.compile(
    rf"(?:{_LITERAL}|{_CLASS})(?P<quantifier>[*+?]|\{{\d{{1,3}}(?:,\d{{0,3}})?\}})?", re.DOTALL
)


def doubtful_patterns(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the patterns not known to run in time linear in the text, in order."""
    return tuple(
        pattern
        for part in ("normalizer", "pre_tokenizer")
        for pattern in _patterns(tokenizer, part)
        if pattern != _O200K and not _is_linear(pattern)
    )


def _is_linear(pattern: str) -> bool:
    """Return True if the pattern visibly reads no part of a text more than a few times.

    Each alternative is a run of one kind: before it single characters, at most one of them
    optional, and after it only pieces that cannot fail, so that a shorter run is never tried.
    """
    position = 0
    while True:
        end = _end_of_alternative(pattern, position)
        if end is None:
            return False
        if end == len(pattern):
            return True
        position = end + 1


def _end_of_alternative(pattern: str, position: int) -> int | None:
    """Return the end of a linear alternative (before ``|`` or at the end); None if not linear."""
    for known in (_CONTRACTIONS, *(_SPACES if pattern.endswith(_LAST) else ())):
        end = position + len(known)
        if pattern.startswith(known, position) and pattern[end : end + 1] in ("", "|"):
            return end
    start, has_run, may_miss = position, False, False
    while position < len(pattern) and pattern[position] != "|":
        piece = _PIECE.match(pattern, position)
        if piece is None:
            return None
        quantifier = piece["quantifier"]
        cannot_fail = quantifier in ("*", "?")
        if (has_run and not cannot_fail) or (quantifier == "?" and may_miss and not has_run):
            return None
        may_miss |= quantifier == "?"
        has_run |= quantifier not in (None, "?")
        position = piece.end()
    return position if position > start else None


def _patterns(tokenizer: PreTrainedTokenizerBase, part: str) -> Iterator[str]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    found = getattr(backend, part, None)
    # The library returns its parts as JSON through pickle's protocol; nothing is unpickled here.
    state = getattr(found, "__getstate__", lambda: None)()
    if isinstance(state, bytes):
        yield from _regexes(json.loads(state))


def _regexes(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "Regex" and isinstance(inner, str):
                yield inner
            else:
                yield from _regexes(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _regexes(inner)


# Any of these files means that the checkpoint has a tokenizer.
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
# Bounds of the derived limit on a prompt's characters: see RequestLimits.
_MIN_CHARS, _MAX_CHARS = 2**16, 2**22


def load_tokenizer(
    model_path: str | Path,
    *,
    trust_remote_code: bool = False,
    config: PreTrainedConfig | None = None,
) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a checkpoint folder or GGUF file; None if it has none.

    Its chat template is that of the checkpoint's processor, if that has one.

    Args:
        trust_remote_code: True if the tokenizer's own Python code may run.
        config: the loaded ``config.json`` of the folder; None to load it again.

    Raises:
        ValueError: the folder does not exist, or its tokenizer cannot be loaded.
    """
    folder = Path(model_path)
    gguf = find_gguf(folder)
    if gguf is not None and "tokenizer.ggml.tokens" not in read_gguf_header(gguf).metadata:
        return None
    if gguf is None and not folder.is_dir():
        raise ValueError(f"cannot load a tokenizer: {folder} is no folder")
    if gguf is None and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        tokenizer: PreTrainedTokenizerBase
        if gguf is not None:
            # AutoTokenizer uses the same class, after reading the file twice more.
            tokenizer = PreTrainedTokenizerFast.from_pretrained(
                gguf.parent, gguf_file=gguf.name, local_files_only=True
            )
        else:
            tokenizer = AutoTokenizer.from_pretrained(
                folder, config=config, trust_remote_code=trust_remote_code, local_files_only=True
            )
        # The first call sets truncation and padding. Later calls only read, so several threads may
        # make them at once.
        tokenizer("a")
    # The formats' parsers raise any exception, even a bare Exception.
    except BaseException as error:
        raise_panic(error)
        if not isinstance(error, Exception):
            raise
        raise ValueError(f"the tokenizer in {folder} cannot be loaded: {error}") from error
    # Published tokenizers have none.
    if (pattern := next(_patterns(tokenizer, "decoder"), None)) is not None:
        raise ValueError(
            f"the tokenizer in {folder} makes text of tokens by the pattern {pattern[:80]!r}, "
            "which need not end, and is not supported"
        )
    if not (trust_remote_code or encodes_as_the_library(tokenizer)):
        _refuse_patterns(folder, tokenizer)
    template = processor_chat_template(folder) if gguf is None else None
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def encodes_as_the_library(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if its class encodes a text exactly as the ``tokenizers`` library does."""
    return type(tokenizer)._encode_plus is PreTrainedTokenizerFast._encode_plus


def _refuse_patterns(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse doubtful patterns of a tokenizer that runs in this process, where nothing stops it."""
    if patterns := doubtful_patterns(tokenizer):
        raise ValueError(
            f"the tokenizer in {folder} cuts text by the pattern {patterns[0][:80]!r}, which need "
            f"not end, and its class {type(tokenizer).__name__} cannot be run where it could be "
            "stopped; name PreTrainedTokenizerFast as the tokenizer_class, or, if the checkpoint "
            "is to be trusted, set engine.trust_remote_code"
        )


def max_prompt_chars(
    tokenizer: PreTrainedTokenizerBase | None, num_tokens: int, setting: int | None
) -> int:
    """Return the maximum characters of a prompt, as counting its tokens means reading them all.

    Args:
        setting: the user's setting; None derives it from the longest token.
    """
    if setting is not None:
        return setting
    if tokenizer is None:
        return _MAX_CHARS
    longest = max(map(len, tokenizer.get_vocab()), default=1)
    return min(max(_MIN_CHARS, num_tokens * longest), _MAX_CHARS)


def raise_panic(error: BaseException) -> None:
    """Raise a ``ValueError`` for a panic of the ``tokenizers`` library; ignore other errors.

    Its panics, such as that of a pattern that backtracks too often, are not an ``Exception`` in
    Python and would end a thread that serves other requests.
    """
    if type(error).__module__ == "pyo3_runtime":
        raise ValueError(f"the checkpoint's tokenizer cannot take this: {error}") from error


def eos_token_ids(
    config: PreTrainedConfig | None,
    generation_config: GenerationConfig | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> frozenset[int]:
    """Return the ids that end a sequence; empty if no source names one.

    The first source that names any is used, as in transformers' ``generate``: the generation
    config (an instruction-tuned checkpoint lists the end of a turn there), the model config, the
    text part of a multi-modal config, the tokenizer.
    """
    text_config = None if config is None else config.get_text_config()
    for source in (generation_config, config, text_config, tokenizer):
        named = getattr(source, "eos_token_id", None)
        if isinstance(named, int):
            return frozenset({named})
        if named:
            return frozenset(int(token_id) for token_id in named)
    return frozenset()


def token_ids(
    tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool, seconds: float
) -> list[int]:
    """Tokenize a text.

    A tokenizer with patterns that are not known to be harmless runs in a separate process, which
    can be stopped.

    Args:
        add_special_tokens: True to add the tokens with which the tokenizer begins and ends a text.
        seconds: CPU time limit of such a process.

    Raises:
        ValueError: the tokenizer failed, or exceeded the time.
    """
    processes = _processes_for(tokenizer)
    if processes is not None:
        return processes.token_ids(text, add_special_tokens, seconds)
    # Tokenizers of the tokenizers library, once loaded by load_tokenizer, may be called by many
    # threads at once; others one at a time.
    is_fast = getattr(tokenizer, "is_fast", False)
    try:
        with nullcontext() if is_fast else turn_of(tokenizer):
            # Not verbose: it would warn of long texts, which the caller truncates or refuses.
            ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)[
                "input_ids"
            ]
    except BaseException as error:
        raise_panic(error)
        raise
    return ids


class _TokenizerProcesses(JobProcesses):
    """Processes that run one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, patterns: tuple[str, ...]) -> None:
        first = {
            "tokenizer": tokenizer.backend_tokenizer.to_str(),
            "splits_special_tokens": tokenizer.split_special_tokens,
        }
        super().__init__(json.dumps(first).encode() + b"\n")
        self._pattern = patterns[0][:80]

    def token_ids(self, text: str, adds_special: bool, seconds: float) -> list[int]:
        """See :func:`token_ids`."""
        job = {"text": text, "adds_special": adds_special, "seconds": seconds}
        answer = self.ask(json.dumps(job).encode() + b"\n", seconds)
        if isinstance(answer, dict) and "ids" in answer:
            return answer["ids"]
        if isinstance(answer, dict):
            raise ValueError(f"the checkpoint's tokenizer cannot take this: {answer['error']}")
        if answer == "seconds":
            raise ValueError(
                f"the checkpoint's tokenizer took more than {seconds:.3g} s of CPU time for "
                f"{len(text)} characters, which it cuts by patterns such as {self._pattern!r}; if "
                "it is to be trusted, raise engine.limits.tokenizer_seconds"
            )
        raise ValueError(
            f"the process of the checkpoint's tokenizer ended with status {answer} over "
            f"{len(text)} characters"
        )


_TOKENIZER_PROCESSES: WeakKeyDictionary[PreTrainedTokenizerBase, _TokenizerProcesses | None] = (
    WeakKeyDictionary()
)


def _processes_for(tokenizer: PreTrainedTokenizerBase) -> _TokenizerProcesses | None:
    """Return the tokenizer's processes; None if it is harmless.

    A tokenizer whose class does more than the library is harmless or trusted: it was loaded.
    """
    if tokenizer not in _TOKENIZER_PROCESSES:
        may_be_sent = encodes_as_the_library(tokenizer)
        patterns = doubtful_patterns(tokenizer) if may_be_sent else ()
        made = _TokenizerProcesses(tokenizer, patterns) if patterns else None
        # Another thread may have been first; its processes are then used.
        _TOKENIZER_PROCESSES.setdefault(tokenizer, made)
    return _TOKENIZER_PROCESSES[tokenizer]

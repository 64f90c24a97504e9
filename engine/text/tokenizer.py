"""The checkpoint's tokenizer, its chat template, and the ids that end a sequence.

Texts are cut by regular expressions that a tokenizer brings. Their engine goes back and tries
again: what a pattern such as ``a*a*a*b`` takes for a text of a few hundred characters are minutes.
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

# Where processors keep templates that their tokenizers do not know of, the first that has one.
_PROCESSOR_FILES = ("processor_config.json", "chat_template.json")
_TEMPLATE_VALUES = {"messages", "tools", "documents", "add_generation_prompt"}
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
        if isinstance(answer, dict) and "text" in answer:
            return answer["text"], answer["seconds"]
        if isinstance(answer, dict) and "error" in answer:
            raise TemplateRefusalError(answer["error"], answer["refused"])
        beyond = answer["beyond"] if isinstance(answer, dict) else answer
        reason = _BEYOND.get(beyond, _BEYOND["status"])
        raise TemplateLimitError(f"the checkpoint's chat template {reason.format(limits, beyond)}")


_BEYOND = {
    "characters": "makes more than {0.max_chars} characters of the messages; shorten them, or "
    "raise engine.limits.max_prompt_chars",
    "memory": "took more than {0.num_bytes} bytes of memory; if it is to be trusted, raise "
    "engine.limits.template_bytes",
    "seconds": "took more than {0.seconds:.3g} s of CPU time; if it is to be trusted, raise "
    "engine.limits.template_seconds",
    "status": "ended its process with status {1}; it may not work, or need more memory: see "
    "engine.limits.template_bytes",
}


def _line(job: Mapping[str, Any]) -> bytes:
    try:
        # What a message carries beside words, templates only ask for.
        text = json.dumps(job, default=lambda each: f"<{type(each).__name__}>")
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the chat messages are no plain data: {error}") from error
    return text.encode() + b"\n"


_PROCESSES = TemplateProcesses()
_LIMITS = TemplateLimits()


class _Telling(ValueError):
    """An image stands where a template reads text, or it knows no tools: no other way helps."""


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

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[Message],
        values: Mapping[str, Any],
        limits: TemplateLimits,
    ) -> None:
        self._tokenizer = tokenizer
        self.tools: list[Any] | None = [dict(tool) for tool in tools] or None
        self._values = values
        self._limits = limits
        self._spent_s = 0.0

    def render(self, messages: Sequence[Message]) -> str:
        """See :meth:`TemplateProcesses.render`."""
        base = PreTrainedTokenizerBase
        if type(self._tokenizer).apply_chat_template is not base.apply_chat_template:
            # A class that writes chats itself: transformers', or remote code that is trusted.
            return self._by_tokenizer(messages)
        left = replace(self._limits, seconds=max(self._limits.seconds - self._spent_s, 1e-3))
        values = {
            **self._tokenizer.special_tokens_map,
            **self._values,
            "messages": [_as_shown(message) for message in messages],
            "tools": self.tools,
            "documents": None,
            "add_generation_prompt": True,
        }
        template: Any = self._tokenizer.get_chat_template(tools=self.tools)
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
                    tools=self.tools,
                    tokenize=False,
                    add_generation_prompt=True,
                    **self._values,
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
    tools: Sequence[Message] = (),
    values: Mapping[str, Any] = MappingProxyType({}),
    *,
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
        tools: see :class:`~engine.interface.prompts.ChatPrompt`.
        values: further ones for the template.

    Returns:
        The text, special tokens included: tokenize it without adding any.

    Raises:
        ValueError: no messages, a malformed one or a malformed tool, no chat template, or the
            template refuses the messages (roles that do not alternate, an image where it reads
            text), leaves out what one of them says (of an unknown role) or the tools, or takes
            more than it may.
    """
    if not messages:
        raise ValueError("a chat prompt needs at least one message")
    for index, message in enumerate(messages):
        _check_message(f"chat message {index}", message)
    for index, tool in enumerate(tools):
        _check_tool(f"tool {index}", tool)
    if taken := _TEMPLATE_VALUES & values.keys():
        raise ValueError(f"chat_template_kwargs has {sorted(taken)[0]!r}, which is given elsewhere")
    if not tokenizer.chat_template:
        raise ValueError(
            "the checkpoint has no chat template, so chat messages cannot be turned into text; "
            "give the prompt as text"
        )
    rendering, problems = _Rendering(tokenizer, tools, values, limits), []
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
    telling = next((each for each in problems if isinstance(each, _Telling)), None)
    is_deliberate = isinstance(first, TemplateRefusalError) and first.is_deliberate
    if telling is not None and not is_deliberate:
        return telling
    if isinstance(first, ValueError):
        return first
    return ValueError(f"the chat template refuses the messages: {first}")


def _tries(messages: Sequence[Message]) -> Iterator[Mapping[str, Form]]:
    """What form to give the content of each role, in the order in which to try: first, none."""
    yield {}
    given: dict[str, Form] = {}
    for message in messages:
        is_text = isinstance(message["content"], str)
        given.setdefault(message["role"], "text" if is_text else "parts")
    ways: list[tuple[Form, Form]] = [
        ("text", "parts") if form == "text" else ("parts", "text") for form in given.values()
    ]
    # No template has many roles, and messages with many shall not cost many tries.
    for forms in islice(product(*ways[:4]), _MOST_TRIES):
        yield dict(zip(given, forms, strict=False))


def _convert(index: int, message: Message, forms: Mapping[str, Form]) -> Message:
    content, form = message["content"], forms.get(message["role"])
    if content is None or form is None or isinstance(content, str) is (form == "text"):
        return message
    if form == "parts":
        return {**message, "content": [{"type": "text", "text": content}]}
    shown = sorted({part["type"] for part in content} - {"text"})
    if shown:
        raise _Telling(
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
                f"{'text' if isinstance(message['content'], str) else 'a list of parts'}"
            )
    calls = (call for message in messages for call in message.get("tool_calls") or ())
    for call in (*(rendering.tools or ()), *calls):
        name = _function_name(call)
        if name is not None and name.casefold() not in text:
            raise _Telling(f"the checkpoint's chat template knows no tools: it leaves out {name!r}")


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
    """Of a tool or a call, in OpenAI's shape or, as some templates take it, the function alone."""
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
# In front of the last alternative, which takes the same spaces, each is linear as well.
_LAST = r"|\s+"
_SPACES = (r"\s*[\r\n]+", r"\s+(?!\S)")

_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?"
    rf"{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|"
    rf"{'|'.join(_SPACES)}{_LAST}"
)
# A character or a class of them, and how often.
_LITERAL = r"[^\\\[\](){}*+?|.^$]|\\[^\W\d_pPkgKRXQE]|\\\W|\."
_CLASS = r"\\[pP]\{\^?\w+\}|\[(?:[^\[\]\\]|\\.)+\]"
_PIECE = re.compile(
    rf"(?:{_LITERAL}|{_CLASS})(?P<often>[*+?]|\{{\d{{1,3}}(?:,\d{{0,3}})?\}})?", re.DOTALL
)


def doubtful_patterns(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Patterns that are not known to take time that is linear in the text, in their order."""
    return tuple(
        pattern
        for part in ("normalizer", "pre_tokenizer")
        for pattern in _patterns(tokenizer, part)
        if pattern != _O200K and not _is_linear(pattern)
    )


def patterns_of_decoder(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Patterns by which it makes text of tokens; published ones have none."""
    return tuple(_patterns(tokenizer, "decoder"))


def _is_linear(pattern: str) -> bool:
    """Whether no part of a text is looked at more than a few times, as far as that is easily seen.

    Each alternative is a run of one kind: before it stand characters that are there or not, of
    which one may be missing, and behind it what cannot fail, so that it is never tried shorter.
    """
    place = 0
    while True:
        end = _end_of_alternative(pattern, place)
        if end is None:
            return False
        if end == len(pattern):
            return True
        place = end + 1


def _end_of_alternative(pattern: str, place: int) -> int | None:
    """Where a linear alternative ends, with the pattern or before ``|``; None if it is none."""
    for known in (_CONTRACTIONS, *(_SPACES if pattern.endswith(_LAST) else ())):
        end = place + len(known)
        if pattern.startswith(known, place) and pattern[end : end + 1] in ("", "|"):
            return end
    start, has_run, may_miss = place, False, False
    while place < len(pattern) and pattern[place] != "|":
        piece = _PIECE.match(pattern, place)
        if piece is None:
            return None
        often = piece["often"]
        cannot_fail = often in ("*", "?")
        if (has_run and not cannot_fail) or (often == "?" and may_miss and not has_run):
            return None
        may_miss |= often == "?"
        has_run |= often not in (None, "?")
        place = piece.end()
    return place if place > start else None


def _patterns(tokenizer: PreTrainedTokenizerBase, part: str) -> Iterator[str]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    found = getattr(backend, part, None)
    # The library states its parts as JSON by pickle's protocol; nothing is unpickled here.
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
# What any prompt may have, and what none may without being asked for: see RequestLimits.
_FEWEST_CHARS, _MOST_CHARS = 2**16, 2**22


def load_tokenizer(
    model_path: str | Path,
    *,
    trust_remote_code: bool = False,
    config: PreTrainedConfig | None = None,
) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a checkpoint folder or GGUF file; None when it brings none.

    Its chat template is that of the checkpoint's processor, where this has one.

    Args:
        trust_remote_code: whether the tokenizer may come with its own Python code.
        config: what was made of the folder's ``config.json``; None to have it made again.

    Raises:
        ValueError: the folder is not there, or its tokenizer cannot be loaded.
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
            # What AutoTokenizer takes as well, after it has read the file twice more.
            tokenizer = PreTrainedTokenizerFast.from_pretrained(
                gguf.parent, gguf_file=gguf.name, local_files_only=True
            )
        else:
            tokenizer = AutoTokenizer.from_pretrained(
                folder, config=config, trust_remote_code=trust_remote_code, local_files_only=True
            )
        # The first call settles how it cuts and pads. Later ones only read, and several
        # threads may make them at once.
        tokenizer("a")
    # The formats' parsers raise whatever they like, bare Exception included.
    except BaseException as error:
        raise_panic(error)
        if not isinstance(error, Exception):
            raise
        raise ValueError(f"the tokenizer in {folder} cannot be loaded: {error}") from error
    if patterns := patterns_of_decoder(tokenizer):
        raise ValueError(
            f"the tokenizer in {folder} makes text of tokens by the pattern {patterns[0][:80]!r}, "
            "which need not end, and is not supported"
        )
    if not (trust_remote_code or encodes_as_the_library(tokenizer)):
        _refuse_patterns(folder, tokenizer)
    template = processor_chat_template(folder) if gguf is None else None
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def encodes_as_the_library(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether its class adds nothing to what the ``tokenizers`` library makes of a text."""
    return type(tokenizer)._encode_plus is PreTrainedTokenizerFast._encode_plus


def _refuse_patterns(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that is run in this process, where nothing can stop its patterns."""
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
    """How many characters a prompt may have; a tokenizer would read them all to count its tokens.

    Args:
        setting: what the user set; None derives it from the longest tokens that there are.
    """
    if setting is not None:
        return setting
    if tokenizer is None:
        return _MOST_CHARS
    longest = max(map(len, tokenizer.get_vocab()), default=1)
    return min(max(_FEWEST_CHARS, num_tokens * longest), _MOST_CHARS)


def raise_panic(error: BaseException) -> None:
    """Raise a ``ValueError`` for a panic of the ``tokenizers`` library; others pass.

    Its panics, such as that of a pattern that tries too often, are no ``Exception`` in Python, and
    would end a thread that serves others.
    """
    if type(error).__module__ == "pyo3_runtime":
        raise ValueError(f"the checkpoint's tokenizer cannot take this: {error}") from error


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


def token_ids(
    tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool, seconds: float
) -> list[int]:
    """Tokenize a text.

    Where the tokenizer cuts it by patterns that are not known to be harmless, that happens in a
    process of its own, which can be stopped.

    Args:
        add_special_tokens: whether to add those that the tokenizer begins and ends a text with.
        seconds: of CPU time that such a process may take.

    Raises:
        ValueError: the tokenizer cannot take it, or took longer.
    """
    processes = _processes_of(tokenizer)
    if processes is not None:
        return processes.token_ids(text, add_special_tokens, seconds)
    # Those of the tokenizers library are called by any number of threads at once, once they are
    # loaded by load_tokenizer; others one by one.
    is_fast = getattr(tokenizer, "is_fast", False)
    try:
        with nullcontext() if is_fast else turn_of(tokenizer):
            # Not verbose: it would warn of what is too long, which the caller cuts or refuses.
            ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)[
                "input_ids"
            ]
    except BaseException as error:
        raise_panic(error)
        raise
    return ids


class _TokenizerProcesses(JobProcesses):
    """Tokenizes by one tokenizer."""

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


def _processes_of(tokenizer: PreTrainedTokenizerBase) -> _TokenizerProcesses | None:
    """None for a tokenizer that is harmless.

    One whose class does more than the library is, or is trusted, as it was loaded.
    """
    if tokenizer not in _TOKENIZER_PROCESSES:
        may_be_sent = encodes_as_the_library(tokenizer)
        patterns = doubtful_patterns(tokenizer) if may_be_sent else ()
        made = _TokenizerProcesses(tokenizer, patterns) if patterns else None
        # Another thread may have been first; its processes are then the ones.
        _TOKENIZER_PROCESSES.setdefault(tokenizer, made)
    return _TOKENIZER_PROCESSES[tokenizer]

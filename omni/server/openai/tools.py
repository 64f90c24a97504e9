"""Tools of chat requests, and the parser of tool calls in generated text.

A model writes calls in the format of its chat template::

    hermes       <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>   anywhere, several
    llama3_json  {"name": "add", "parameters": {"a": 1}}                         alone, ; between
    mistral      [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]            alone
                 add{"a": 1}                                                     alone
    pythonic     [add(a=1), add(a=2)]                                            alone

``auto`` detects all of them: their beginnings differ, and text that could also be an answer is a
call only if it names one of the request's tools. If a call is required, a grammar constrains the
text to a list as in ``mistral``.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import regex
from msgspec import UNSET, Struct, UnsetType
from pydantic import AfterValidator, Discriminator, Field, Tag

from engine.interface.structured_output import (
    JSON_STYLE,
    StructuredOutput,
    without_unknown_formats,
)
from omni.pipelines.pipeline_config import ToolFormat
from omni.server.serving.api_error import ApiError
from omni.server.serving.request_body import ApiModel

_MAX_TOOLS = 128
_MAX_PYTHON_CHARS = 65_536
_MAX_BEGINNING = 1024
"""Number of characters by which a text is known to be no call, if it is none."""


class FunctionParts(ApiModel):
    """A function: its name, description and the JSON Schema of its arguments."""

    without_effect: ClassVar = frozenset(("strict",))

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None


class FunctionTool(ApiModel):
    """A tool, which is a client-side function."""

    type: Literal["function"]
    function: FunctionParts


class FunctionName(ApiModel):
    """A function by its name."""

    name: str


class NamedTool(ApiModel):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedToolNames(ApiModel):
    """The tools that the model may call, or must call one of."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1)


class AllowedTools(ApiModel):
    """A choice among the tools; the others are not shown to the model."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolNames


def _kind_of_choice(value: Any) -> str | None:
    if isinstance(value, str):
        return "mode"
    kind = getattr(value, "type", None) or (isinstance(value, dict) and value.get("type"))
    return kind if kind in ("function", "allowed_tools") else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[NamedTool, Tag("function")]
    | Annotated[AllowedTools, Tag("allowed_tools")],
    Discriminator(
        _kind_of_choice,
        custom_error_type="no_choice",
        custom_error_message="Input should be none, auto, required, or an object of the type "
        "function or allowed_tools",
    ),
]
"""The tools that the model may or must call."""


def _check_json_object(value: str) -> str:
    if not isinstance(_parse_json(value or "{}"), dict):
        raise ValueError(f"should be a JSON object in a string, got {value!r:.80}")
    return value


JsonObject = Annotated[str, AfterValidator(_check_json_object)]
"""A JSON object in a string, such as the arguments of a call."""


class CalledFunction(ApiModel):
    """The function of an earlier call."""

    name: str
    arguments: JsonObject


class RequestedCall(ApiModel):
    """A tool call of an earlier answer."""

    without_effect: ClassVar = frozenset(("index",))

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """Return the call with its arguments as a mapping, as transformers' templates expect."""
        arguments = json.loads(self.function.arguments or "{}")
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class FunctionCall(Struct, kw_only=True):
    """A function's name, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(Struct, kw_only=True):
    """A tool call of an answer; ``index`` is its position in a stream."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"
    index: int | UnsetType = UNSET


def check_tools(tools: Sequence[FunctionTool], choice: ToolChoice | None) -> None:
    """Refuse too many tools, duplicate names, and the choice of a missing tool."""
    if len(tools) > _MAX_TOOLS:
        raise ApiError.bad_field("tools", f"at most {_MAX_TOOLS} are taken, got {len(tools)}")
    names = [tool.function.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ApiError.bad_field(f"tools[{index}].function.name", f"{name!r} is there twice")
    chosen = {"tool_choice.function.name": choice} if isinstance(choice, NamedTool) else {}
    if isinstance(choice, AllowedTools):
        place = "tool_choice.allowed_tools.tools"
        allowed = choice.allowed_tools.tools
        chosen = {f"{place}[{index}].function.name": each for index, each in enumerate(allowed)}
    for place, tool in chosen.items():
        if tool.function.name not in names:
            known = ", ".join(names) or "none"
            name = tool.function.name
            raise ApiError.bad_field(place, f"{name!r} is none of the tools; they are {known}")
    if choice == "required" and not tools:
        raise ApiError.bad_field("tool_choice", "needs tools to choose from")


def add_call(messages: list[dict[str, Any]], call: dict[str, Any]) -> None:
    """Append a call to chat messages; consecutive calls share one message."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    messages[-1].setdefault("tool_calls", []).append(call)


def call_grammar(tools: Sequence[FunctionTool], *, several: bool) -> str:
    """Return an llguidance Lark grammar of a JSON list of one call, or ``several``, by schema."""
    calls = [f"call_{index}" for index in range(len(tools))]
    lines = [
        'start: "[" call (", " call)* "]"' if several else 'start: "[" call "]"',
        f"call: {' | '.join(calls)}",
    ]
    for call, tool in zip(calls, tools, strict=True):
        function = tool.function
        begin = f'{{"name": {json.dumps(function.name)}, "arguments": '
        schema = {"type": "object", **(function.parameters or {"additionalProperties": False})}
        if (kind := schema["type"]) != "object":
            message = f"the parameters of {function.name!r}: must be of type object, got {kind!r}"
            raise ApiError.bad_field("tools", message)
        try:
            StructuredOutput(json_schema=json.dumps(schema))
        except ValueError as error:
            reason = str(error).partition("json_schema: ")[2]
            raise ApiError.bad_field(
                "tools", f"the parameters of {function.name!r}: {reason}"
            ) from error
        styled = json.dumps({"x-guidance": JSON_STYLE} | without_unknown_formats(schema))
        lines += [f'{call}: {json.dumps(begin)} {call}_args "}}"', f"{call}_args: %json {styled}"]
    return "\n".join(lines)


class ToolCallParser:
    """Splits the streamed text of a completion into plain text and calls.

    Text is emitted once it cannot belong to a call, and calls once they are complete. Text that
    turns out not to be a call is emitted as plain text; so is all text if there are no tools.

    Args:
        is_required: true if :func:`call_grammar` constrains the text.
        max_calls: maximum number of calls to emit; None for no limit.
    """

    def __init__(
        self, names: Sequence[str], form: ToolFormat, *, is_required: bool, max_calls: int | None
    ) -> None:
        self._names = frozenset(names)
        self._form: ToolFormat = "mistral" if is_required else form
        self._is_required = is_required
        any_name = "|".join(map(regex.escape, names))
        key = rf"""\{{\s*"(name"\s*:\s*"({any_name})"|arguments"|parameters"|type"|id")"""
        python, named = rf"\[\s*({any_name})\(", rf"({any_name})(\[ARGS\])?\{{"
        beginnings: dict[ToolFormat, Sequence[str]] = {
            "hermes": ("(?!)",),  # nothing: calls have tags
            "llama3_json": (key, r"<\|python_tag\|>"),
            "mistral": (r"\[TOOL_CALLS\]", rf"\[\s*{key}", named),
            "pythonic": (python,),
        }
        beginnings["auto"] = [each for begins in beginnings.values() for each in begins] + [python]
        self._beginning = regex.compile(f"({'|'.join(beginnings[self._form])}).*", regex.DOTALL)
        self._max_calls = max_calls
        self._held = ""
        self._has_begun = self._follows_call = False
        self.num_calls = 0

    @property
    def is_spoken(self) -> bool:
        """True unless the text has a call, whole or (if required) cut by the token limit."""
        return not (self.num_calls or self._is_required)

    def feed(self, text: str, *, is_last: bool) -> tuple[str, list[ToolCall]]:
        """Consume more text, and return the plain text and calls that are complete now."""
        if not self._names:
            return text, []
        self._held += text
        if not self._has_begun:
            if not is_last and self._may_begin_call(self._held.lstrip()):
                return "", []
            self._has_begun = True
            calls = self._parse_only_calls(self._held.strip()) if is_last else []
            if calls:
                self._held = ""
                return "", self._number(calls)
        return self._parse_tagged(is_last)

    def _may_begin_call(self, text: str) -> bool:
        """Return True if this incomplete text may be the beginning of a text of calls only."""
        if self._is_required or not text:
            return True
        return self._beginning.fullmatch(text[:_MAX_BEGINNING], partial=True) is not None

    def _parse_only_calls(self, text: str) -> list[FunctionCall]:
        """Return the calls of a text that consists only of calls; empty otherwise."""
        calls = None
        if self._form != "hermes" and self._form != "pythonic":
            calls = _json_calls(text, self._names, may_be_cut=self._is_required)
        if not calls and self._form in ("auto", "pythonic"):
            calls = _python_calls(text, self._names)
        return calls or []

    def _parse_tagged(self, is_last: bool) -> tuple[str, list[ToolCall]]:
        """Return plain text and tagged calls; spaces around a call are dropped."""
        words, calls = "", list[FunctionCall]()
        while self._form in ("auto", "hermes"):
            if self._follows_call:
                self._held = self._held.lstrip()
                self._follows_call = not self._held
            before, tag, rest = self._held.partition(_OPEN)
            whole = _INSIDE.match(rest) if _CLOSE in rest else None
            if not tag or not (whole or is_last):
                break
            inside, end, after = rest.partition(_CLOSE)
            if whole is not None:
                inside, after = whole[1], rest[whole.end() :]
            call = _call_of(_parse_json(inside), None)
            if call is None:
                words += before + tag + inside + end
            else:
                words += before.rstrip()
                calls.append(call)
            self._held, self._follows_call = after, call is not None
        kept = 0 if is_last else _count_undecided(self._held)
        free = len(self._held) - kept
        words, self._held = words + self._held[:free], self._held[free:]
        return words, self._number(calls)

    def _number(self, calls: Sequence[FunctionCall]) -> list[ToolCall]:
        if self._max_calls is not None:
            calls = calls[: max(0, self._max_calls - self.num_calls)]
        # Nine letters and digits, as Mistral's templates require.
        numbered = [
            ToolCall(id=secrets.token_hex(5)[:9], function=call, index=self.num_calls + index)
            for index, call in enumerate(calls)
        ]
        self.num_calls += len(numbered)
        return numbered


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
# The end of a call may also be text in a JSON string.
_INSIDE = re.compile(rf'((?:[^"]|"(?:[^"\\]|\\.)*")*?){_CLOSE}', re.DOTALL)
_MARKERS = re.compile(r"[\s;,]*(?:<\|python_tag\|>|\[TOOL_CALLS\])?\s*")
_NAMED = re.compile(r"\s*([A-Za-z0-9_.-]+)(?:\[ARGS\])?(?=\{)")


def _count_undecided(text: str) -> int:
    """Return the number of characters at the end of a text that may belong to a call."""
    start = text.find(_OPEN)
    if start < 0:
        begun = (n for n in range(len(_OPEN) - 1, 0, -1) if text.endswith(_OPEN[:n]))
        start = len(text) - next(begun, 0)
    return len(text) - len(text[:start].rstrip())


def _json_calls(text: str, names: frozenset[str], *, may_be_cut: bool) -> list[FunctionCall] | None:
    """Parse calls that are JSON objects or a list of them; None if there is anything else.

    If the list may be cut off, return its complete calls.
    """
    text = _MARKERS.sub("", text, count=1)
    if may_be_cut:
        text = text.removeprefix("[").removesuffix("]")
    values: list[Any] = []
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    position = 0
    try:
        while position < len(text):
            named = _NAMED.match(text, position)
            start = named.end() if named is not None else position
            value, position = decoder.raw_decode(text, start)
            values.append(value if named is None else {"name": named[1], "arguments": value})
            between = _MARKERS.match(text, position)
            position = between.end() if between is not None else position
    except (ValueError, RecursionError):
        if not may_be_cut:
            return None
    if len(values) == 1 and isinstance(values[0], list):
        values = values[0]
    calls = [_call_of(value, names) for value in values]
    whole = [call for call in calls if call is not None]
    return whole if len(whole) == len(calls) else None


def _python_calls(text: str, names: frozenset[str]) -> list[FunctionCall] | None:
    """Parse calls that are a Python list; None for anything else."""
    if not text.startswith("[") or len(text) > _MAX_PYTHON_CHARS:
        return None
    try:
        (node,) = ast.parse(text).body
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.List):
            return None
        calls = []
        for each in node.value.elts:
            if not isinstance(each, ast.Call) or each.args or ast.unparse(each.func) not in names:
                return None
            arguments = {str(each.arg): ast.literal_eval(each.value) for each in each.keywords}
            calls.append(_call(ast.unparse(each.func), arguments))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return calls


def _call_of(value: Any, names: frozenset[str] | None) -> FunctionCall | None:
    """Convert a JSON value to a call; None if it is not a call, or not of these names."""
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _parse_json(arguments)
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        return None
    return _call(name, arguments) if names is None or name in names else None


def _call(name: str, arguments: Mapping[str, Any]) -> FunctionCall:
    return FunctionCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None

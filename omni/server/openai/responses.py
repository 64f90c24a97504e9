"""``/v1/responses``: chats in the format of OpenAI's Responses API.

A request is converted to a chat request, and the chat's text and calls to output items::

    input                   chat                the model        output
    previous_response_id ─► messages ──────────► generates ─────► message, function_call, ...
    instructions

Responses are stored in bounded memory, so that a later request can continue from one by its id.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationError, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.interface.outputs import OutputDelta
from engine.interface.placed_error import PlacedError
from engine.interface.settings import explain_validation_error
from omni.requests.request_line import text_or
from omni.server.openai.answers import Usage, usage_of
from omni.server.openai.chat import Chat
from omni.server.openai.chat_request import (
    NOT_SUPPORTED,
    ChatRequest,
    SampledRequest,
    StructuredOutputs,
    refusal_as_text,
)
from omni.server.openai.chat_request import (
    ContentPart as ChatPart,
)
from omni.server.openai.tools import (
    FunctionName,
    FunctionParts,
    JsonObject,
    ToolCall,
    add_call,
)
from omni.server.serving.api_error import ApiError
from omni.server.serving.request_body import ApiModel, Unsupported


class ContentPart(ApiModel):
    """A text or image part of a message."""

    without_effect: ClassVar = frozenset(
        ("detail", "annotations", "logprobs", "prompt_cache_breakpoint")
    )
    not_supported: ClassVar = {"file_id": Unsupported("the server stores no files; send a URL")}

    type: Literal["input_text", "output_text", "text", "input_image"]
    text: str | None = None
    image_url: str | None = None

    @model_validator(mode="after")
    def _check_named_field(self) -> ContentPart:
        name = "image_url" if self.type == "input_image" else "text"
        if getattr(self, name) is None:
            raise PlacedError((name,), "missing; it must be given")
        return self

    def to_chat(self) -> dict[str, Any]:
        """Convert to a chat message's content part."""
        if self.image_url is not None:
            return {"type": "image_url", "image_url": {"url": self.image_url}}
        return {"type": "text", "text": self.text}


_Content = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[
        list[Annotated[ContentPart, BeforeValidator(refusal_as_text)]],
        Field(min_length=1),
        Tag("list"),
    ],
    text_or("list", (list, tuple), "text or a list of parts"),
]


def _to_chat_content(content: str | Sequence[ContentPart]) -> str | list[dict[str, Any]]:
    return content if isinstance(content, str) else [part.to_chat() for part in content]


class _Item(ApiModel):
    """Base class of input items; items of earlier outputs are accepted unchanged."""

    without_effect: ClassVar = frozenset(("id", "status", "phase"))


class MessageItem(_Item):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Content


class CallItem(_Item):
    """A function call requested by an earlier response."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: JsonObject


class CallOutputItem(_Item):
    """The output of a function call."""

    type: Literal["function_call_output"]
    call_id: str
    output: _Content


class ReasoningItem(ApiModel):
    """Reasoning of other models; accepted and ignored."""

    without_effect: ClassVar = frozenset(
        ("id", "status", "summary", "content", "encrypted_content")
    )

    type: Literal["reasoning"]


class ItemReference(ApiModel):
    """An item of the output of a stored response, by its id."""

    type: Literal["item_reference"]
    id: str


_KINDS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")


def _kind_of(value: Any) -> str | None:
    kind = value.get("type", "message") if isinstance(value, dict) else None
    return kind if kind in _KINDS else None


_Input = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(
        _kind_of,
        custom_error_type="no_item",
        custom_error_message=f"Input should be an item of type {', '.join(_KINDS)}",
    ),
]


class FunctionToolParts(FunctionParts):
    """A tool with its function's fields inline."""

    without_effect: ClassVar = frozenset()

    type: Literal["function"]
    strict: bool = False


class NamedFunction(FunctionName):
    """The tool that must be called."""

    type: Literal["function"]


class AllowedFunctions(ApiModel):
    """The tools that the model may call, or must call one of."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunction] = Field(min_length=1)


FunctionChoice: TypeAlias = Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions
"""The tools that the model may or must call."""


def to_chat_tools(
    tools: Sequence[FunctionToolParts] | None, choice: FunctionChoice | None
) -> dict[str, Any]:
    """Convert tools and the tool choice to the fields of a chat request."""
    functions = [tool.model_dump(exclude={"type", "strict"}) for tool in tools or ()]
    named: Any = choice
    if isinstance(choice, NamedFunction):
        named = {"type": "function", "function": {"name": choice.name}}
    elif isinstance(choice, AllowedFunctions):
        allowed = [{"type": "function", "function": {"name": x.name}} for x in choice.tools]
        named = {
            "type": "allowed_tools",
            "allowed_tools": {"mode": choice.mode, "tools": allowed},
        }
    return {
        "tools": [{"type": "function", "function": each} for each in functions],
        "tool_choice": named,
    }


class TextFormat(ApiModel):
    """Constraint on the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")

    @model_validator(mode="after")
    def _check_schema(self) -> TextFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise PlacedError(("schema",), "goes together with the type 'json_schema'")
        return self


class TextOptions(ApiModel):
    """Options of the response's text."""

    without_effect: ClassVar = frozenset(("verbosity",))

    format: TextFormat | None = None


class ReasoningOptions(ApiModel):
    """Hints for the chat template."""

    without_effect: ClassVar = frozenset(("summary", "generate_summary"))

    effort: str | None = None


_LOGPROBS = "message.output_text.logprobs"
_ITEMS = "message|reasoning|computer_call_output|(file_search|web_search|code_interpreter)_call"
_Included = Annotated[str, Field(pattern=rf"^({_ITEMS})\.[a-z_.]+$")]


class ResponsesRequest(SampledRequest):
    """A request for a response.

    Instructions apply to this response only. The input and output of ``previous_response_id`` come
    before its own input. Later requests may continue from this response if ``store`` is true.
    """

    without_effect: ClassVar = frozenset(
        ("user", "service_tier", "safety_identifier", "prompt_cache_key", "request_id",
         "prompt_cache_retention", "prompt_cache_options", "stream_options", "client_metadata",
         "max_tool_calls")
    )  # fmt: skip
    not_supported: ClassVar = NOT_SUPPORTED | {
        "background": Unsupported("a response is generated while its client waits", (False,)),
        "context_management": Unsupported("a prompt that is too long is refused; leave it out"),
        "access_programs": Unsupported("the server has none; leave it out"),
        "conversation": Unsupported("use previous_response_id"),
        "prompt": Unsupported("the server stores no prompts; send instructions and input"),
        "truncation": Unsupported("use 'auto' or 'disabled'", ("disabled", "auto")),
    }

    model: str
    input: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[_Input], Field(min_length=1), Tag("list")],
        text_or("list", (list, tuple), "text or a list of items"),
    ]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    stream: bool = False
    max_output_tokens: int | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    include: list[_Included] = Field(default_factory=list)
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    structured_outputs: StructuredOutputs | None = None
    tools: list[FunctionToolParts] | None = None
    tool_choice: FunctionChoice | None = None
    parallel_tool_calls: bool = True
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None

    @property
    def returns_logprobs(self) -> bool:
        """True if log-probabilities are requested; the server has no other things to include."""
        return _LOGPROBS in self.include or bool(self.top_logprobs)

    def messages(self) -> list[dict[str, Any]]:
        """Convert the input to chat messages."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        messages: list[dict[str, Any]] = []
        for item in self.input:
            match item:
                case MessageItem():
                    messages.append({"role": item.role, "content": _to_chat_content(item.content)})
                case CallItem():
                    function = {"name": item.name, "arguments": item.arguments}
                    add_call(messages, {"id": item.call_id, "function": function})
                case CallOutputItem():
                    content = _to_chat_content(item.output)
                    messages.append(
                        {"role": "tool", "tool_call_id": item.call_id, "content": content}
                    )
                case ReasoningItem() | ItemReference():
                    pass
        return messages

    def chat(self, history: Sequence[dict[str, Any]]) -> ChatRequest:
        """Convert to a chat request that continues earlier messages."""
        system = self.instructions
        first = [{"role": "system", "content": system}] if system else []
        own, asked_for = self.messages(), set[str]()
        for message in (*history, *own):
            asked_for |= {call["id"] for call in message.get("tool_calls", ())}
            if message["role"] == "tool" and message["tool_call_id"] not in asked_for:
                raise ApiError.bad_field("input", f"no call is {message['tool_call_id']!r:.80}")
        form = self.text.format if self.text is not None else None
        schema = form.json_schema if form is not None else None
        asked = self.model_dump(include=_CHAT_FIELDS, by_alias=True) | {
            "messages": [*first, *history, *own],
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": self.returns_logprobs,
            "top_logprobs": self.top_logprobs,
            **to_chat_tools(self.tools, self.tool_choice),
            "response_format": form
            and {
                "type": form.type,
                "json_schema": None if schema is None else {"schema": schema},
            },
            "reasoning_effort": self.reasoning.effort if self.reasoning is not None else None,
        }
        try:
            return ChatRequest.model_validate(asked, strict=True)
        except ValidationError as error:
            reason = explain_validation_error(error, ChatRequest, asked).split("\n")[0]
            raise ApiError.bad_field("input", reason) from error


_CHAT_FIELDS = {"model", "stream", "parallel_tool_calls", "chat_template_kwargs",
                "structured_outputs", *SampledRequest.model_fields}  # fmt: skip
"""Fields that a chat request has under the same names."""


_NEWER_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
}


def newer_name(param: str) -> str:
    """Return the path of a chat request's field under its name in the newer APIs."""
    name, dot, rest = param.partition(".")
    path = f"{_NEWER_NAMES.get(name, name)}{dot}{rest}"
    return path.replace(".function.", ".").replace(".allowed_tools.", ".")


def _resolve_references(request: Request, body: ResponsesRequest) -> ResponsesRequest:
    """Replace references to items of stored responses by the items."""
    if isinstance(body.input, str):
        return body
    items: list[Any] = []
    for index, item in enumerate(body.input):
        if isinstance(item, ItemReference):
            place = f"input[{index}].id"
            request_id = item.id.partition("_")[2].rpartition("_")[0]  # as in _Writer._open_item
            state = request.state
            output: list[Any] = []
            with suppress(ApiError):
                response, _ = state.server.responses.find(state.client, f"resp_{request_id}")
                output = response["output"]
            found = next((each for each in output if each["id"] == item.id), None)
            if found is None:
                message = f"no item {item.id!r:.80} is kept; send the item itself"
                raise ApiError.bad_field(place, message)
            items.append((CallItem if "call_id" in found else MessageItem).model_validate(found))
        else:
            items.append(item)
    return body.model_copy(update={"input": items})


class Responses(Chat):
    """The response to a :class:`ResponsesRequest`."""

    prompt_param = "input"

    def __init__(self, request: Request, body: ResponsesRequest) -> None:
        body = _resolve_references(request, body)
        earlier: list[dict[str, Any]] = []
        if body.previous_response_id is not None:
            _, earlier = request.state.server.responses.find(
                request.state.client, body.previous_response_id, "previous_response_id"
            )
        try:
            super().__init__(request, body.chat(earlier))
        except ApiError as error:
            raise error.renamed(newer_name) from error.__cause__
        if self._n != 1:
            raise ApiError.bad_request("a response is one completion; set n of the stage to 1")
        self._request = body
        self._messages = [*earlier, *body.messages()]
        self._writer = _Writer(self.client.request_id, self._created, self.pipeline.name, body)

    async def whole(self) -> Response:
        """Return the response in one piece."""
        async for _ in self.pieces():
            pass
        return JSONResponse(self._writer.response)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the response as events."""
        writer, (parser,) = self._writer, self._parsers
        is_cut = has_ended = False
        writer.begin()  # sent with the first text, so that an earlier failure gets a status
        async with await self._stream() as stream:
            async for update in stream.updates():
                delta = update.of(self._stage)
                if delta is None:
                    continue
                self._count.add(delta)
                ends = delta.finish_reason is not None and not has_ended
                words, calls = parser.feed(delta.text or "", is_last=ends)
                writer.add(words, calls, self._logprobs_of(delta))
                if piece := writer.take():
                    yield piece
                if ends:
                    has_ended, is_cut = True, delta.finish_reason == "length"
        writer.end(is_cut, usage_of([self._count]))
        self._store()
        yield writer.take()

    def _place_of(self, number: int, index: int, part: ChatPart) -> str:
        """Return the path of an image in the request."""
        own = self._body.messages[-len(self._request.messages()) :]
        before = len(self._body.messages) - len(own)
        if number < before:
            return "previous_response_id"
        with_content = sum(each.content is not None for each in own[: number - before])
        places = [
            f"input[{at}].{'output' if isinstance(item, CallOutputItem) else 'content'}"
            for at, item in enumerate(self._request.input)
            if isinstance(item, MessageItem | CallOutputItem)
        ]
        return f"{places[with_content]}[{index}].image_url"

    def _logprobs_of(self, delta: OutputDelta) -> list[Any]:
        if self._logprobs is None:
            return []
        entries: list[Any] = self._logprobs.chat(delta.logprobs or ())["content"]
        return entries

    def _store(self) -> None:
        if not self._request.store:
            return
        said: list[dict[str, Any]] = []
        for item in self._writer.response["output"]:
            if item["type"] == "message":
                said.append({"role": "assistant", "content": item["content"][0]["text"]})
            else:
                function = {"name": item["name"], "arguments": item["arguments"]}
                add_call(said, {"id": item["call_id"], "function": function})
        self.server.responses.add(self.client, self._writer.response, [*self._messages, *said])


class _Writer:
    """Builds a ``response`` item by item, and the events that report it."""

    def __init__(self, request_id: str, created: int, model: str, body: ResponsesRequest) -> None:
        self._request_id = request_id
        self._number = 0
        self._events = b""
        self._logprobs: list[Any] = []  # of tokens whose text has not been added
        self._output: list[dict[str, Any]] = []
        self._is_text_open = False
        given = body.model_dump(
            mode="json",
            by_alias=True,
            include={"instructions", "max_output_tokens", "temperature", "top_p", "reasoning",
                     "metadata", "parallel_tool_calls", "previous_response_id", "store", "text",
                     "top_logprobs"},
        )  # fmt: skip
        choice = body.tool_choice or "auto"
        self.response: dict[str, Any] = given | {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": created,
            "status": "in_progress",
            "model": model,
            "output": self._output,
            "tools": [tool.model_dump(mode="json") for tool in body.tools or ()],
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "text": {"format": (given["text"] or {}).get("format") or {"type": "text"}},
            "error": None,
            "incomplete_details": None,
            "usage": None,
        }

    def take(self) -> bytes:
        """Return the events since the last call."""
        events, self._events = self._events, b""
        return events

    def begin(self) -> None:
        """Add the events of the start."""
        self._event("response.created", response=self.response)
        self._event("response.in_progress", response=self.response)

    def add(self, words: str, calls: Sequence[ToolCall], logprobs: Sequence[Any]) -> None:
        """Add text and calls, with their events."""
        self._logprobs += logprobs
        if words:
            self._open_text()
            self._output[-1]["content"][0]["text"] += words
            entries = self._take_logprobs()
            self._text_event("response.output_text.delta", delta=words, logprobs=entries)
        for call in calls:
            self._close_text()
            self._add_call(call)

    def end(self, is_cut: bool, usage: Usage) -> None:
        """Complete the response, with its events."""
        if not self._output:
            self._open_text()
        self._close_text("incomplete" if is_cut else "completed")
        self.response["status"] = "incomplete" if is_cut else "completed"
        if is_cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        self.response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        self._event(f"response.{self.response['status']}", response=self.response)

    def _take_logprobs(self) -> list[Any]:
        entries, self._logprobs = self._logprobs, []
        self._output[-1]["content"][0]["logprobs"] += entries
        return entries

    def _open_text(self) -> None:
        if self._is_text_open:
            return
        self._is_text_open = True
        item = self._open_item("msg", type="message", role="assistant", content=[])
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item["content"].append(part)
        self._text_event("response.content_part.added", part=item["content"][0])

    def _close_text(self, status: str = "completed") -> None:
        if not self._is_text_open:
            return
        self._is_text_open = False
        self._take_logprobs()
        (part,) = self._output[-1]["content"]
        done = {"text": part["text"], "logprobs": part["logprobs"]}
        self._text_event("response.output_text.done", **done)
        self._text_event("response.content_part.done", part=part)
        self._close_item(status)

    def _add_call(self, call: ToolCall) -> None:
        name, arguments = call.function.name, call.function.arguments
        item = self._open_item("fc", type="function_call", call_id=call.id, name=name, arguments="")
        item["arguments"] = arguments
        kind = "response.function_call_arguments"
        self._part_event(f"{kind}.delta", delta=arguments)
        self._part_event(f"{kind}.done", name=name, arguments=arguments)
        self._close_item()

    def _open_item(self, prefix: str, **fields: Any) -> dict[str, Any]:
        number = len(self._output)
        item = {"id": f"{prefix}_{self._request_id}_{number}", "status": "in_progress", **fields}
        self._output.append(item)
        self._event("response.output_item.added", output_index=number, item=item)
        return item

    def _close_item(self, status: str = "completed") -> None:
        number, item = len(self._output) - 1, self._output[-1]
        item["status"] = status
        self._event("response.output_item.done", output_index=number, item=item)

    def _text_event(self, kind: str, **fields: Any) -> None:
        self._part_event(kind, content_index=0, **fields)

    def _part_event(self, kind: str, **fields: Any) -> None:
        """Add an event about the last item."""
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> None:
        content = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        self._events += f"event: {kind}\ndata: {json.dumps(content)}\n\n".encode()


async def show_response(request: Request) -> Response:
    """Return a stored response."""
    state = request.state
    if request.query_params.get("stream") == "true":
        raise ApiError.bad_field("stream", "a stored response is returned whole")
    response, _ = state.server.responses.find(state.client, request.path_params["id"])
    return JSONResponse(response)


async def delete_response(request: Request) -> Response:
    """Delete a stored response."""
    state, response_id = request.state, request.path_params["id"]
    state.server.responses.remove(state.client, response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})

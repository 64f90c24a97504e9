"""Chat and completion requests: their fields, prompts and sampling parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AliasChoices,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from engine import Prompt, SamplingParams, TextPrompt, TokensPrompt
from engine.interface.placed_error import PlacedError, suggest
from engine.interface.settings import explain_validation_error, place_of
from omni.pipelines.pipeline_config import ToolFormat
from omni.requests.request_line import text_or
from omni.server.openai.tools import (
    AllowedTools,
    FunctionTool,
    NamedTool,
    RequestedCall,
    ToolCallParser,
    ToolChoice,
    call_grammar,
    check_tools,
)
from omni.server.serving.api_error import ApiError
from omni.server.serving.request_body import ApiModel, Unsupported, check_part

if TYPE_CHECKING:
    from omni.pipelines.pipeline import Pipeline

_Ids = list[Annotated[int, Field(ge=0)]]


def _form_of(value: Any) -> str | None:
    if isinstance(value, str):
        return "text"
    if not isinstance(value, (list, tuple)) or not value:
        return None
    for kind, name in ((str, "texts"), (int, "ids"), ((list, tuple), "lists")):
        if isinstance(value[0], kind):
            return name
    return None


PromptList = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Tag("texts")]
    | Annotated[_Ids, Tag("ids")]
    | Annotated[list[Annotated[_Ids, Field(min_length=1)]], Tag("lists")],
    Discriminator(
        _form_of,
        custom_error_type="no_form",
        custom_error_message="Input should be text, a list of texts, a list of token ids, or a "
        "list of such lists",
    ),
]
"""A text or token ids, or a list of several of either."""


def prompts_of(given: str | list[Any], limit: int, param: str) -> list[Prompt]:
    """Convert a :data:`PromptList` to prompts; refuse more than the limit."""
    if isinstance(given, str):
        return [TextPrompt(given)]
    if isinstance(given[0], int):
        return [TokensPrompt(tuple(given))]
    if len(given) > limit:
        raise ApiError.bad_field(param, f"at most {limit} are taken at once, got {len(given)}")
    return [
        TextPrompt(each) if isinstance(each, str) else TokensPrompt(tuple(each)) for each in given
    ]


class RequestFields(ApiModel):
    """Fields of all requests.

    Attributes:
        priority: lower values run first.
        cache_salt: only requests with the same salt and the same API key share cached blocks.
    """

    priority: int = Field(default=0, ge=-(2**63), lt=2**63)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)

    @property
    def scheduling(self) -> dict[str, Any]:
        """These fields as keyword arguments of :meth:`Client.request`."""
        return {"priority": self.priority, "cache_salt": self.cache_salt}


class StageFields(RequestFields):
    """Fields of all requests to pipelines with sampling stages.

    Attributes:
        stages: sampling fields by stage, ``{stage: {field: value}}``, for any stage. They take
            precedence over the top-level fields, which apply to the answering stage.
    """

    stages: dict[str, dict[str, Any]] = Field(default_factory=dict)


class JsonSchemaFormat(ApiModel):
    """The schema of ``response_format``, enforced on the text whether or not it is ``strict``."""

    without_effect: ClassVar = frozenset(("name", "description", "strict"))

    json_schema: dict[str, Any] = Field(alias="schema")


class ResponseFormat(ApiModel):
    """Constraint on the text, in OpenAI's format."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        check_part(self, ("json_schema",), self.type, f"a response format of type {self.type!r}")
        return self

    def as_structured_output(self) -> dict[str, Any] | None:
        """Return the constraint as a stage's sampling field; None for plain text."""
        if self.json_schema is not None:
            return {"json_schema": self.json_schema.json_schema}
        return {"json_object": True} if self.type == "json_object" else None


class StructuredOutputs(ApiModel):
    """Constraint on the text in vLLM's format; validated as :class:`~engine.StructuredOutput`."""

    without_effect: ClassVar = frozenset(("disable_fallback", "disable_any_whitespace"))
    not_supported: ClassVar = {
        "disable_additional_properties": Unsupported(
            "say so in the schema by additionalProperties: false", (False,)
        ),
        "whitespace_pattern": Unsupported("use a grammar to control the white space"),
    }

    json_schema: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class StreamOptions(ApiModel):
    """Options of a stream.

    With ``include_usage`` the last chunk has the token counts, and with ``continuous_usage_stats``,
    as in vLLM, every chunk also has those of its completion so far.
    """

    without_effect: ClassVar = frozenset(("include_obfuscation",))

    include_usage: bool = False
    continuous_usage_stats: bool = False


_NO_SPECIAL = "texts have no special tokens; return_token_ids returns the ids of all"
_NO_BEAMS = "there is no beam search; n samples several completions"
NOT_SUPPORTED = {
    "skip_special_tokens": Unsupported(_NO_SPECIAL, (True,)),
    "spaces_between_special_tokens": Unsupported(_NO_SPECIAL, (True,)),
    "include_stop_str_in_output": Unsupported(
        "a text ends before its stop string; leave it out", (False,)
    ),
    "use_beam_search": Unsupported(_NO_BEAMS, (False,)),
    "length_penalty": Unsupported(_NO_BEAMS, (1.0,)),
    "best_of": Unsupported(_NO_BEAMS, (1,)),
    "return_tokens_as_token_ids": Unsupported("use return_token_ids", (False,)),
    "bad_words": Unsupported("suppress_token_ids excludes tokens, structured_outputs texts"),
    "allowed_token_ids": Unsupported("use logit_bias, or structured_outputs with a choice"),
    "prompt_logprobs": Unsupported("cached tokens of a prompt have none; leave it out"),
    "mm_processor_kwargs": Unsupported("the checkpoint's processor decides; leave it out"),
    "chat_template": Unsupported("templates are programs; only the checkpoint's own is run"),
    "documents": Unsupported("put the documents into a message"),
}
"""Fields of vLLM that this server supports with their defaults only."""
_IGNORED_HINTS = frozenset(("user", "request_id", "guided_decoding_backend"))


class SampledRequest(StageFields):
    """Sampling fields of all requests that generate text, by their names in ``SamplingParams``.

    They include those that OpenAI does not have; absent ones default to the stage's own values.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_repeats: int | None = None
    suppress_token_ids: list[int] | None = None
    logit_bias: dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = None


class TextRequest(SampledRequest):
    """Fields of chats and completions.

    Attributes:
        response_format: constraint on the text.
        structured_outputs: the same in vLLM's format; ``guided_json``, ``guided_regex``,
            ``guided_choice`` and ``guided_grammar`` are vLLM's older names.
        return_token_ids: true to return the ids of the generated tokens and, unless streamed, of
            the prompt's, under vLLM's names.
    """

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = None
    return_token_ids: bool = False
    structured_output: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PlacedError(("stream_options",), "needs stream to be true")
        return self

    def sampling_fields(
        self, max_tokens: int | None, logprobs: int | None
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the answering stage's fields, and the request's names of those that differ."""
        fields = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        fields |= {"max_tokens": max_tokens, "logprobs": logprobs}
        constraints = self._constraints()
        if len(constraints) > 1:
            first, second, *_ = constraints
            raise ApiError.bad_field(second, f"given beside {first}; give one of them")
        names: dict[str, str] = {}
        for name, form in constraints.items():
            fields["structured_output"], names["structured_output"] = form, name
        return {name: value for name, value in fields.items() if value is not None}, names

    def _constraints(self) -> dict[str, dict[str, Any]]:
        """Return the constraints on the text by the name of the request's field."""
        found = {"structured_output": self.structured_output}
        if self.response_format is not None:
            found["response_format"] = self.response_format.as_structured_output()
        if self.structured_outputs is not None:
            found["structured_outputs"] = self.structured_outputs.model_dump(exclude_none=True)
        for name, key in _GUIDES.items():
            if (guide := getattr(self, name)) is not None:
                found[name] = {key: guide}
        return {name: form for name, form in found.items() if form is not None}


_GUIDES = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_SAMPLING_FIELDS = tuple(
    name for name in TextRequest.model_fields if name in SamplingParams.model_fields
)


def merge_sampling(
    pipeline: Pipeline,
    stage: str,
    fields: Mapping[str, Any],
    others: Mapping[str, Mapping[str, Any]],
    names: Mapping[str, str],
) -> dict[str, SamplingParams]:
    """Override the stages' own parameters with a client's fields.

    Raises:
        ApiError: with status 400, and the invalid field as its ``param``.
    """
    merged = {}
    params_of_stages: dict[str, dict[str, str]] = {}
    for name in {stage: None, **dict.fromkeys(others)}:
        if name not in pipeline.stages:
            message = f"unknown stage{suggest(name, pipeline.stages)}"
            raise ApiError.bad_field(f"stages.{name}", message)
        params = {key: names.get(key, key) for key in fields} if name == stage else {}
        params |= {key: f"stages.{name}.{key}" for key in others.get(name, {})}
        params_of_stages[name] = params
        given = {**(fields if name == stage else {}), **others.get(name, {})}
        own = pipeline.stages[name].sampling
        if own is None and given.keys() - {"truncate_prompt_tokens"}:
            raise ApiError.bad_field(
                next(iter(params.values())), f"the stage {name!r} does not sample"
            )
        if given:
            merged[name] = _merge(own or SamplingParams(max_tokens=0), given, params)
    try:
        return pipeline.merge_sampling(merged)
    except PlacedError as error:
        at, *keys = map(str, error.place)
        # None if the client did not set the field: it is the stage's own, or several are at fault.
        param = params_of_stages.get(at, {}).get(keys[0]) if keys else None
        raise ApiError.bad_request(str(error), param=param) from error


def _merge(
    own: SamplingParams, given: Mapping[str, Any], params: Mapping[str, str]
) -> SamplingParams:
    changed = own.model_dump(mode="json") | dict(given)
    try:
        return SamplingParams.model_validate_json(json.dumps(changed), strict=True)
    except ValidationError as error:
        place = place_of(error.errors(include_url=False)[0], changed)
        message = explain_validation_error(error, SamplingParams, changed).split("\n")[0]
        if not place:  # a conflict between two fields
            raise ApiError.bad_request(message) from error
        key = str(place[0])
        name = params.get(key, key)
        raise ApiError.bad_request(name + message.removeprefix(key), param=name) from error


class FileUrl(ApiModel):
    """An image, audio or video: a data URL, or an HTTP(S) URL of a host that the server allows."""

    url: str = Field(min_length=1)


class ImageUrl(FileUrl):
    """An image; the checkpoint's processor decides on its resolution."""

    without_effect: ClassVar = frozenset(("detail",))


class InputAudio(ApiModel):
    """An audio file in base64. Its actual type is detected, regardless of ``format``."""

    data: str = Field(min_length=1)
    format: Literal["wav", "mp3", "flac", "ogg", "opus", "aac", "m4a", "mp4", "webm"]


def refusal_as_text(part: Any) -> Any:
    """Return the refusal of an earlier answer as a part of text, any other part unchanged."""
    if isinstance(part, dict) and part.get("type") == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    return part


class ContentPart(ApiModel):
    """A part of a message; only the field named by ``type`` is set."""

    without_effect: ClassVar = frozenset(("uuid", "cache_control", "prompt_cache_breakpoint"))

    type: Literal["text", "image_url", "input_audio", "audio_url", "video_url"]
    text: str | None = None
    image_url: ImageUrl | None = None
    input_audio: InputAudio | None = None
    audio_url: FileUrl | None = None
    video_url: FileUrl | None = None

    @property
    def file_url(self) -> str | None:
        """The URL of the file; None for text and inline audio."""
        at = self.image_url or self.audio_url or self.video_url
        return None if at is None else at.url

    @model_validator(mode="after")
    def _check_named_field(self) -> ContentPart:
        names = ("text", "image_url", "input_audio", "audio_url", "video_url")
        check_part(self, names, self.type, f"a part of type {self.type!r}")
        return self


class EarlierAudio(ApiModel):
    """The audio of an earlier answer as returned to the client, or only its id."""

    without_effect: ClassVar = frozenset(("data", "expires_at", "sampling_rate"))

    id: str = Field(min_length=1)
    transcript: str | None = None


class ChatMessage(ApiModel):
    """One message of a conversation; additional keys of answers are accepted if empty.

    Only the text of a spoken answer is used: its content, else the transcript of its ``audio``,
    else the text stored by the server under the audio's id. An earlier answer with tool calls needs
    no content, and a message of the role ``tool`` has the output of a call. The ``refusal`` of an
    earlier answer is its text. ``reasoning_content`` (``reasoning`` in newer clients) is for the
    chat template, which may show or leave it out.
    """

    without_effect: ClassVar = frozenset(("annotations",))
    not_supported: ClassVar = {
        "refusal": Unsupported("it belongs to an assistant's message"),
        "function_call": Unsupported("use tool_calls, its newer form"),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Annotated[
            Annotated[str, Tag("text")]
            | Annotated[
                list[Annotated[ContentPart, BeforeValidator(refusal_as_text)]],
                Field(min_length=1),
                Tag("list"),
            ],
            text_or("list", (list, tuple), "text or a list of parts"),
        ]
        | None
    ) = None
    name: str | None = None
    audio: EarlierAudio | None = None
    tool_calls: list[RequestedCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(
        default=None, validation_alias=AliasChoices("reasoning_content", "reasoning")
    )

    @model_validator(mode="before")
    @classmethod
    def _take_refusal_as_text(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("role") == "assistant" and data.get("refusal"):
            said = {key: value for key, value in data.items() if key != "refusal"}
            return said | {"content": data.get("content") or data["refusal"]}
        return data

    @model_validator(mode="after")
    def _check_role_fields(self) -> ChatMessage:
        for field in ("tool_calls", "audio", "reasoning_content"):
            if getattr(self, field) and self.role != "assistant":
                raise PlacedError((field,), f"belongs to an assistant's message, not {self.role}'s")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise PlacedError(("tool_call_id",), "goes together with the role 'tool'")
        if self.content is None and not self.tool_calls and not self.audio:
            raise PlacedError(("content",), "missing; it must be given")
        return self

    def for_template(self, content: str | list[dict[str, str | None]] | None) -> dict[str, Any]:
        """Return the message with this content in the format of chat templates."""
        # OpenAI's newer name of the same role.
        role = "system" if self.role == "developer" else self.role
        said: dict[str, Any] = {"role": role, "content": content}
        if self.tool_calls:
            said["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return said | self.model_dump(include=_TEMPLATE_FIELDS, exclude_none=True)


_TEMPLATE_FIELDS = {"name", "tool_call_id", "reasoning_content"}


def _voice_name(value: Any) -> Any:
    return value["id"] if isinstance(value, dict) and value.keys() == {"id"} else value


Voice = Annotated[str, BeforeValidator(_voice_name), Field(min_length=1)]
"""A voice by name; clients may also send ``{"id": NAME}``."""


def template_values(body: ApiModel) -> dict[str, Any]:
    """Return the values of a request for the chat template."""
    names = {"reasoning_effort", "add_generation_prompt", "continue_final_message"}
    values = body.model_dump(include=names | {"chat_template_kwargs"}, exclude_none=True)
    own: dict[str, Any] = values.pop("chat_template_kwargs")
    return values | own


class AudioOptions(ApiModel):
    """The audio of an answer: its format, and its voice, by default the pipeline's choice."""

    voice: Voice | None = None
    format: Literal["wav", "mp3", "flac", "opus", "aac", "pcm16"]


class ChatRequest(TextRequest):
    """A chat request.

    Attributes:
        max_completion_tokens: limit of the answer; ``max_tokens`` is its older name.
        top_logprobs: number of tokens to report in addition to the sampled one.
        chat_template_kwargs: additional values for the chat template, as in vLLM; the fields
            ``reasoning_effort``, ``add_generation_prompt`` and ``continue_final_message`` are
            such values, too.
        modalities: modalities of the answer, which always include text.
    """

    # The last four are hints, which a model may ignore.
    without_effect: ClassVar = frozenset(
        ("metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
         "prediction", "verbosity", "prompt_cache_retention", "prompt_cache_options",
         "include_reasoning")
    ) | _IGNORED_HINTS  # fmt: skip
    not_supported: ClassVar = NOT_SUPPORTED | {
        "functions": Unsupported("use tools, its newer form"),
        "function_call": Unsupported("use tool_choice, its newer form", ("none", "auto")),
        "web_search_options": Unsupported("the server has no web search; offer one as a tool"),
        "add_special_tokens": Unsupported("the chat template adds them", (False,)),
        "echo": Unsupported("only completions return their prompt", (False,)),
    }

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    modalities: list[Literal["text", "audio"]] = Field(default=["text"], min_length=1)
    audio: AudioOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> ChatRequest:
        if (
            None not in (self.max_tokens, self.max_completion_tokens)
            and self.max_tokens != self.max_completion_tokens
        ):
            raise PlacedError(
                ("max_tokens",), "means the same as max_completion_tokens; give one of them"
            )
        if self.top_logprobs and not self.logprobs:
            raise PlacedError(("top_logprobs",), "needs logprobs to be true")
        if self.continue_final_message and self.add_generation_prompt:
            raise PlacedError(
                ("continue_final_message",), "needs add_generation_prompt to be false"
            )
        if (self.audio is not None) != ("audio" in self.modalities):
            raise PlacedError(("audio",), 'goes together with "audio" among the modalities')
        if self.stream and self.audio is not None and self.audio.format != "pcm16":
            raise PlacedError(
                ("audio", "format"), f"a stream sounds as pcm16, got {self.audio.format!r}"
            )
        return self

    def stage_fields(self) -> tuple[dict[str, Any], dict[str, str]]:
        """See :meth:`TextRequest.sampling_fields`."""
        check_tools(self.tools or [], self.tool_choice)
        is_new = self.max_completion_tokens is not None
        max_tokens = self.max_completion_tokens if is_new else self.max_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        fields, names = self.sampling_fields(max_tokens, logprobs)
        names["max_tokens"] = "max_completion_tokens" if is_new else "max_tokens"
        names["logprobs"] = "top_logprobs"
        if (required := self.required_tools) is not None:
            if "structured_output" in fields:
                raise ApiError.bad_field(
                    "tool_choice", f"requires a call, and {names['structured_output']} a text"
                )
            several = self.parallel_tool_calls and not isinstance(self.tool_choice, NamedTool)
            fields["structured_output"] = {"grammar": call_grammar(required, several=several)}
            names["structured_output"] = "tools"
        return fields, names

    @property
    def offered_tools(self) -> list[FunctionTool]:
        """The tools shown to the model."""
        if isinstance(self.tool_choice, AllowedTools):
            names = {tool.function.name for tool in self.tool_choice.allowed_tools.tools}
            return [tool for tool in self.tools or () if tool.function.name in names]
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def required_tools(self) -> list[FunctionTool] | None:
        """The tools of which one must be called; None if a call is optional."""
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return [tool for tool in self.offered_tools if tool.function.name == name]
        choice = self.tool_choice
        if isinstance(choice, AllowedTools):
            choice = choice.allowed_tools.mode
        return self.offered_tools if choice == "required" else None

    def tool_parser(self, form: ToolFormat) -> ToolCallParser:
        """Create the parser of one completion's tool calls."""
        names = [tool.function.name for tool in self.offered_tools]
        is_required = self.required_tools is not None
        limit = None if self.parallel_tool_calls else 1
        return ToolCallParser(names, form, is_required=is_required, max_calls=limit)


class CompletionRequest(TextRequest):
    """A request for completions; with ``echo`` each text begins with its prompt.

    ``logprobs`` is the number of tokens to report in addition to the sampled one.
    """

    without_effect: ClassVar = _IGNORED_HINTS
    not_supported: ClassVar = NOT_SUPPORTED | {
        "suffix": Unsupported("a completion only continues its prompt", ("",)),
        "add_special_tokens": Unsupported("give token ids as the prompt instead", (True,)),
    }

    prompt: PromptList
    max_tokens: int | None = None
    logprobs: int | None = Field(default=None, ge=0, le=5)
    echo: bool = False

    @model_validator(mode="after")
    def _check_echo(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise PlacedError(("echo",), "not supported with logprobs: the prompt's are not known")
        return self

    def stage_fields(self) -> tuple[dict[str, Any], dict[str, str]]:
        """See :meth:`TextRequest.sampling_fields`."""
        return self.sampling_fields(self.max_tokens, self.logprobs)

"""``/tokenize`` and ``/detokenize``, compatible with vLLM's server."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.interface.placed_error import PlacedError
from omni.server.openai.chat_request import ChatMessage, template_values
from omni.server.openai.tools import FunctionTool
from omni.server.serving.api_error import ApiError
from omni.server.serving.pipeline_server import PipelineServer
from omni.server.serving.request_body import ApiModel, read_json

_MAX_TOKENS = 2**18
"""Maximum tokens, and characters of a text: more would delay other requests."""


class TokenizeRequest(ApiModel):
    """A text, or chat messages without files.

    ``add_special_tokens`` adds the tokenizer's own, such as BOS; a chat template writes its own.
    """

    model: str
    prompt: str | None = Field(default=None, max_length=_MAX_TOKENS)
    messages: list[ChatMessage] | None = Field(default=None, min_length=1)
    tools: list[FunctionTool] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_one_prompt(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PlacedError(("prompt",), "give a prompt or messages, one of them")
        return self


class DetokenizeRequest(ApiModel):
    """A list of token ids."""

    model: str
    tokens: list[Annotated[int, Field(ge=0)]] = Field(max_length=_MAX_TOKENS)


async def tokenize(request: Request) -> Response:
    """Return the token ids of a prompt."""
    body = await read_json(request, TokenizeRequest)
    tokenizer, length = prompt_reader(request.state.server, body.model)
    ids = await asyncio.to_thread(_encode, body, tokenizer)
    answer = {"count": len(ids), "max_model_len": length, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = tokenizer.convert_ids_to_tokens(ids)
    return JSONResponse(answer)


async def detokenize(request: Request) -> Response:
    """Return the text of token ids."""
    body = await read_json(request, DetokenizeRequest)
    tokenizer, _ = prompt_reader(request.state.server, body.model)
    for index, token_id in enumerate(body.tokens):
        if token_id >= len(tokenizer):
            raise ApiError.bad_field(
                f"tokens[{index}]", f"ids are below {len(tokenizer)}, got {token_id}"
            )
    return JSONResponse({"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens)})


def prompt_reader(server: PipelineServer, model: str) -> tuple[Any, int | None]:
    """Return the tokenizer of the stage that reads prompts, and the maximum prompt length."""
    pipeline = server.find(model)
    for name, stage in pipeline.omni.pipeline.stages.items():
        tokenizer = pipeline.tokenizers[name]
        if stage.inputs is None and tokenizer is not None:
            return tokenizer, pipeline.describe()["max_model_len"]
    raise ApiError.bad_request("this model reads its prompts without a tokenizer", param="model")


def _encode(body: TokenizeRequest, tokenizer: Any) -> list[int]:
    # Imported lazily: the server must respond before transformers is imported.
    from engine.text.tokenizer import render_chat

    text, adds_special = body.prompt, body.add_special_tokens
    if body.messages is not None:
        messages = []
        for message in body.messages:
            content: str | list[dict[str, str | None]] | None
            if isinstance(message.content, list):
                content = [part.model_dump(include={"type", "text"}) for part in message.content]
            else:
                content = message.content
            has_file = isinstance(content, list) and any(part["text"] is None for part in content)
            if has_file or (not content and message.audio is not None):
                raise ApiError.bad_field("messages", "contents must be text here")
            messages.append(message.for_template(content))
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        adds_special = False
        try:
            text = render_chat(tokenizer, messages, tools, template_values(body))
        except ValueError as error:
            raise ApiError.bad_request(str(error), param="messages") from error
    return list(tokenizer(text, add_special_tokens=adds_special)["input_ids"])

"""A realtime session: text and sound in, text and sound out, over one WebSocket.

A session keeps its conversation; each of its responses runs as one request, planned by what the
client asked for and what the pipeline's stages can do.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from base64 import b64encode
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from starlette.websockets import WebSocket, WebSocketDisconnect

from engine import AudioPrompt, ChatPrompt
from engine.interface.log_fields import package_logger
from omni.server.openai.answers import text_stage
from omni.server.openai.chat_request import merge_sampling
from omni.server.openai.realtime_events import (
    AppendAudio,
    Cancel,
    ClearAudio,
    CommitAudio,
    CreateItem,
    CreateResponse,
    Item,
    ResponseOptions,
    SessionUpdate,
    UpdateSession,
    event_id_of,
    parse_event,
)
from omni.server.openai.speech import SpokenPieces, check_voice, speaking_stage
from omni.server.serving.api_error import ApiError
from omni.server.serving.request_body import decoded
from omni.server.serving.response_stream import ResponseStream, Update

if TYPE_CHECKING:
    from engine import SamplingParams
    from omni.pipelines.pipeline import Pipeline
    from omni.server.serving.parsed_request import Client
    from omni.server.serving.pipeline_server import PipelineServer, ServedPipeline
    from stages import StageOutput

__all__ = [
    "Conversation",
    "RealtimeResponse",
    "RealtimeSession",
    "ResponsePlan",
    "merged_options",
    "planned",
    "talk",
]


_Messages = tuple[Mapping[str, Any], ...]
_Sounds = tuple[tuple[bytes, int], ...]
"""Samples of 16 bits, and how many a second."""


class Conversation:
    """The items of a session, and the buffer of sound that comes in.

    Args:
        max_bytes: of all text and sound together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._buffer = bytearray()
        self._messages: list[dict[str, Any]] = []
        self._sounds: list[tuple[bytes, int]] = []

    def append(self, samples: bytes) -> None:
        """Hear more.

        Raises:
            ApiError: the session holds too much.
        """
        self._take(len(samples))
        self._buffer += samples

    def clear(self) -> None:
        """Forget what was heard since the last item."""
        self._num_bytes -= len(self._buffer)
        self._buffer.clear()

    def commit(self, rate: int) -> Mapping[str, Any]:
        """Make an item of what was heard.

        Raises:
            ApiError: nothing was heard.
        """
        if not self._buffer:
            raise ApiError.bad_request(
                "nothing was appended to the buffer of sound",
                code="input_audio_buffer_commit_empty",
            )
        _check_whole(self._buffer)
        self._sounds.append((bytes(self._buffer), rate))
        self._buffer.clear()
        self._messages.append({"role": "user", "content": [{"type": "audio"}]})
        return _described(None, "user", [{"type": "input_audio"}])

    async def add(self, item: Item, rate: int) -> Mapping[str, Any]:
        """Add an item.

        Raises:
            ApiError: its sound cannot be read, or the session holds too much.
        """
        parts: list[dict[str, Any]] = []
        sounds: list[tuple[bytes, int]] = []
        size = 0
        for index, part in enumerate(item.content):
            if part.audio is not None:
                samples = await decoded(part.audio, f"item.content[{index}].audio")
                _check_whole(samples)
                sounds.append((samples, rate))
                parts.append({"type": "audio"})
                size += len(samples)
            else:
                text = part.text or ""
                parts.append({"type": "text", "text": text})
                size += len(text)
        self._take(size)
        self._sounds += sounds
        # Plain text where nothing else is said: not every template knows parts.
        is_text = len(parts) == 1 and "text" in parts[0]
        content: Any = parts[0]["text"] if is_text else parts
        self._messages.append({"role": item.role, "content": content})
        told = [part.model_dump(exclude_none=True, exclude={"audio"}) for part in item.content]
        return _described(item.id, item.role, told)

    def answered(self, text: str) -> None:
        """The assistant has said something."""
        self._num_bytes += len(text)
        self._messages.append({"role": "assistant", "content": text})

    def history(self, instructions: str | None) -> tuple[_Messages, _Sounds]:
        """Return all of it, for the next answer: messages, and the sounds in them in their order.

        Raises:
            ApiError: there is nothing to answer.
        """
        if not self._messages:
            raise ApiError.bad_request("the conversation has no items; there is nothing to answer")
        first = [{"role": "system", "content": instructions}] if instructions else []
        return (*first, *self._messages), tuple(self._sounds)

    def _take(self, num_bytes: int) -> None:
        if self._num_bytes + num_bytes > self._max_bytes:
            raise ApiError.bad_request(
                f"the session would hold {self._num_bytes + num_bytes} bytes of text and sound, "
                f"of at most {self._max_bytes}; begin another",
                code="session_full",
            )
        self._num_bytes += num_bytes


def _check_whole(samples: bytes | bytearray) -> None:
    if len(samples) % 2:
        raise ApiError.bad_request(
            f"audio: samples of 16 bits have two bytes each, got {len(samples)} bytes",
            param="audio",
        )


def _prompt(messages: _Messages, sounds: _Sounds) -> ChatPrompt:
    audio = [
        AudioPrompt(np.frombuffer(samples, "<i2").astype(np.float32) / 2**15, rate)
        for samples, rate in sounds
    ]
    return ChatPrompt(messages, multi_modal_data={"audio": tuple(audio)} if audio else {})


def _described(item_id: str | None, role: str, content: list[dict[str, Any]]) -> Mapping[str, Any]:
    return {
        "id": item_id or f"item_{uuid.uuid4().hex[:24]}",
        "object": "realtime.item",
        "type": "message",
        "status": "completed",
        "role": role,
        "content": content,
    }


class _Send(Protocol):
    async def __call__(self, kind: str, **content: Any) -> None: ...


class RealtimeResponse:
    """One answer to a conversation.

    Args:
        pipeline: that answers.
        client: who asks.
        conversation: so far; a whole answer is added to it.
        options: how it is to be.
        number: of the response in its session.

    Attributes:
        id: by which events name it.
        is_over: whether it is whole or has failed, so that it cannot be cancelled any more, though
            its end may still have to be told.

    Raises:
        ApiError: it cannot run as asked.
    """

    def __init__(
        self,
        pipeline: ServedPipeline,
        client: Client,
        conversation: Conversation,
        options: ResponseOptions,
        number: int,
    ) -> None:
        self._pipeline = pipeline
        self._client = client
        self._conversation = conversation
        self._number = number
        self._plan = planned(pipeline.omni.pipeline, options, "response")
        self._history = conversation.history(options.instructions)
        self._stage, self._voice = self._plan.writer, self._plan.voice
        self._pieces = SpokenPieces(self._plan.output_rate)
        self.id = f"resp_{client.request_id}_{number}"
        self._item_id = f"item_{client.request_id}_{number}"
        self.is_over = False
        self._text = ""
        self._output: StageOutput | None = None

    async def run(self, send: _Send) -> None:
        """Answer, and send it as it comes.

        Raises:
            ApiError: the request was refused, or failed.
        """
        await send("response.created", response=self.described("in_progress"))
        await send("response.output_item.added", **self._place(), item=self._item("in_progress"))
        messages, sounds = self._history
        # Sounds are twice as large in a prompt, and made in a thread.
        prompt = await asyncio.to_thread(_prompt, messages, sounds)
        plan = self._plan
        request = self._client.request(
            prompt, plan.sampling, index=self._number, speaker=plan.speaker
        )
        stages = [self._stage] if self._voice is None else [self._stage, self._voice]
        async with ResponseStream(self._pipeline, [request], "conversation", stages) as stream:
            async for update in stream.updates():
                await self._send_new(update, send)
        await self._send_sound(self._pieces.rest(), send)
        self.is_over = True
        self._conversation.answered(self._text)
        kind = "output_text" if self._voice is None else "output_audio_transcript"
        key = "text" if self._voice is None else "transcript"
        if self._voice is not None:
            await send("response.output_audio.done", **self._place())
        await send(f"response.{kind}.done", **self._place(), **{key: self._text})
        await send("response.output_item.done", **self._place(), item=self._item("completed"))
        await send("response.done", response=self.described("completed"))

    def cancel(self) -> None:
        """It was cancelled; what was said until then is part of the conversation."""
        if self._text and not self.is_over:
            self._conversation.answered(self._text)
        self.is_over = True

    async def fail(self, error: ApiError, send: _Send) -> None:
        """Tell that it ends like that."""
        self.is_over = True
        await send("error", error={**error.to_object()["error"], "event_id": None})
        await send("response.done", response=self.described("failed", error))

    def described(self, status: str, error: ApiError | None = None) -> Mapping[str, Any]:
        """The response as events tell it."""
        details = None
        if error is not None:
            details = {"type": "failed", "error": {"type": error.kind, "code": error.code}}
        elif status == "cancelled":
            details = {"type": "cancelled", "reason": "client_cancelled"}
        has_begun = self._text or status == "completed"
        return {
            "id": self.id,
            "object": "realtime.response",
            "status": status,
            "status_details": details,
            "output": [self._item(status)] if has_begun else [],
            "usage": self._usage(),
        }

    async def _send_new(self, update: Update, send: _Send) -> None:
        output = update.output.stages.get(self._stage)
        if output is not None:
            self._output = output
            new, self._text = (output.text or "")[len(self._text) :], output.text or ""
            kind = "output_text" if self._voice is None else "output_audio_transcript"
            if new:
                await send(f"response.{kind}.delta", **self._place(), delta=new)
        sounds = update.sounds.get(self._voice or "")
        if sounds:
            await self._send_sound(self._pieces.of(sounds), send)

    async def _send_sound(self, samples: bytes, send: _Send) -> None:
        if samples:
            delta = b64encode(samples).decode()
            rate = self._pieces.rate
            await send("response.output_audio.delta", **self._place(), delta=delta, rate=rate)

    def _place(self) -> dict[str, Any]:
        return {
            "response_id": self.id,
            "item_id": self._item_id,
            "output_index": 0,
            "content_index": 0,
        }

    def _item(self, status: str) -> Mapping[str, Any]:
        part: dict[str, Any] = {"type": "output_text", "text": self._text}
        if self._voice is not None:
            part = {"type": "output_audio", "transcript": self._text}
        return {
            "id": self._item_id,
            "object": "realtime.item",
            "type": "message",
            "status": "completed" if status == "completed" else "incomplete",
            "role": "assistant",
            "content": [part] if self._text else [],
        }

    def _usage(self) -> Mapping[str, Any] | None:
        if self._output is None:
            return None
        prompt, written = self._output.num_prompt_tokens, len(self._output.token_ids)
        return {
            "input_tokens": prompt,
            "output_tokens": written,
            "total_tokens": prompt + written,
            "input_token_details": {"cached_tokens": self._output.num_cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class ResponsePlan:
    """How a pipeline is to answer.

    Attributes:
        writer: the stage whose text answers.
        voice: the stage whose sound answers; None where text alone is wanted.
        speaker: whose voice; None leaves it to the pipeline.
        output_rate: samples a second of the sound that is told; None: as it is made.
        sampling: by stage.
    """

    writer: str
    voice: str | None
    speaker: str | None
    output_rate: int | None
    sampling: Mapping[str, SamplingParams]


def planned(pipeline: Pipeline, options: ResponseOptions, place: str) -> ResponsePlan:
    """Find out how to answer, before anything was said.

    Args:
        pipeline: that answers.
        options: of the client.
        place: where it stands in an event: ``session`` or ``response``.

    Raises:
        ApiError: with status 400: the pipeline cannot answer like that.
    """
    writer = text_stage(pipeline)
    output = options.audio.output if options.audio is not None else None
    speaker = output.voice if output is not None else None
    is_spoken = options.output_modalities == ["audio"]
    # Of a pipeline that speaks, before it is asked to; to others clients may name any.
    if is_spoken or pipeline.voices.speaks:
        check_voice(pipeline, speaker, f"{place}.audio.output.voice")
    voice = None
    if is_spoken:
        voice = speaking_stage(pipeline, f"{place}.output_modalities")
    fields: dict[str, int] = {}
    if pipeline.stages[writer].sampling is not None:
        fields["n"] = 1  # whatever the stage's own is
    if isinstance(options.max_output_tokens, int):
        fields["max_tokens"] = options.max_output_tokens
    names = {"max_tokens": f"{place}.max_output_tokens"}
    others = options.stages or {}
    sampling = merge_sampling(pipeline, writer, fields, others, names, f"{place}.stages")
    if writer in sampling and sampling[writer].n != 1:
        at = f"{place}.stages.{writer}.n"
        raise ApiError.bad_request(f"{at}: a conversation goes on in one way only", param=at)
    rate = output.format.rate if output is not None and output.format is not None else None
    return ResponsePlan(writer, voice, speaker if voice is not None else None, rate, sampling)


_logger = package_logger(__name__)

_UNSUPPORTED_DATA = 1003
_POLICY_VIOLATION = 1008
_TRY_AGAIN_LATER = 1013
_INPUT_RATE = 24_000
_SMALL = 1 << 16
"""Characters that are parsed at once; more go to another thread."""


async def talk(websocket: WebSocket) -> None:
    """Handle a connection: one session, or an error event that says why there is none."""
    offered = websocket.scope.get("subprotocols", ())
    await websocket.accept(subprotocol="realtime" if "realtime" in offered else None)
    server: PipelineServer = websocket.state.server
    model = websocket.query_params.get("model", "")
    try:
        with server.session():
            client: Client = websocket.state.client
            await RealtimeSession(websocket, server, server.find(model), client).run()
    except ApiError as error:
        websocket.state.refusal = error
        is_full = error.status is HTTPStatus.TOO_MANY_REQUESTS
        with _suppress_gone():
            await websocket.send_json({"type": "error", **error.to_object()})
            code = _TRY_AGAIN_LATER if is_full else _POLICY_VIOLATION
            await websocket.close(code, error.message[:100])


def _suppress_gone() -> AbstractContextManager[None]:
    """Pass over that whoever is sent something has gone, or was told to go."""
    return suppress(WebSocketDisconnect, OSError, RuntimeError)


class RealtimeSession:
    """One client's session with one pipeline. Its end aborts its own request, and nothing else.

    Args:
        websocket: accepted.
        server: that it came to.
        pipeline: that answers.
        client: who asks.

    Raises:
        ApiError: the pipeline is not ready, or writes no text.
    """

    def __init__(
        self,
        websocket: WebSocket,
        server: PipelineServer,
        pipeline: ServedPipeline,
        client: Client,
    ) -> None:
        # Whoever wishes for nothing can be answered, or there is no session.
        planned(pipeline.omni.pipeline, ResponseOptions(), "session")
        self._websocket = websocket
        self._limits = server.settings.limits
        self._pipeline = pipeline
        self._client = client
        self._options = ResponseOptions()
        self._conversation = Conversation(self._limits.max_body_bytes)
        self._answer: asyncio.Task[None] | None = None
        self._response: RealtimeResponse | None = None
        self._num_responses = 0

    async def run(self) -> None:
        """Talk until the client goes."""
        await self._send("session.created", session=self._session())
        try:
            while True:
                message = await self._websocket.receive()
                if message["type"] == "websocket.disconnect":
                    return
                text = message.get("text")
                if text is None:
                    with _suppress_gone():
                        await self._websocket.close(_UNSUPPORTED_DATA, "events are JSON in text")
                    return
                await self._take(text)
        finally:
            await self._stop_answer()

    async def _take(self, text: str) -> None:
        """Handle one event; what is wrong with it is told, and changes nothing."""
        try:
            if len(text) <= _SMALL:
                parsed = parse_event(text)
            else:
                parsed = await asyncio.to_thread(parse_event, text)
            match parsed:
                case UpdateSession() as event:
                    self._update(event.session)
                    await self._send("session.updated", session=self._session())
                case AppendAudio() as event:
                    self._conversation.append(await decoded(event.audio, "audio"))
                case CommitAudio():
                    item = self._conversation.commit(self._input_rate)
                    await self._send("input_audio_buffer.committed", item_id=item["id"])
                    await self._send("conversation.item.added", item=item)
                case ClearAudio():
                    self._conversation.clear()
                    await self._send("input_audio_buffer.cleared")
                case CreateItem() as event:
                    item = await self._conversation.add(event.item, self._input_rate)
                    await self._send("conversation.item.added", item=item)
                case CreateResponse() as event:
                    self._begin_answer(event.response)
                case Cancel() as event:
                    await self._cancel(event.response_id)
        except ApiError as error:
            event_id = event_id_of(text) if len(text) <= _SMALL else None
            await self._send("error", error={**error.to_object()["error"], "event_id": event_id})

    def _update(self, session: SessionUpdate) -> None:
        if session.model not in (None, self._pipeline.name):
            told = "session.model: the model of a session cannot be changed"
            raise ApiError.bad_request(told, param="session.model")
        options = merged_options(self._options, session)
        if session.stages is not None:  # all of them, so that one can be taken back
            options = options.model_copy(update={"stages": session.stages})
        planned(self._pipeline.omni.pipeline, options, "session")
        self._options = options

    def _begin_answer(self, options: ResponseOptions) -> None:
        if self._answer is not None and not self._answer.done():
            raise ApiError(
                HTTPStatus.CONFLICT,
                "a response is being given already; cancel it, or wait for its end",
                code="conversation_already_has_active_response",
            )
        response = RealtimeResponse(
            self._pipeline,
            self._client,
            self._conversation,
            merged_options(self._options, options),
            self._num_responses,
        )
        self._response = response
        self._num_responses += 1
        self._answer = asyncio.create_task(self._run_answer(response))

    async def _run_answer(self, response: RealtimeResponse) -> None:
        timeout_s = self._limits.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await response.run(self._send)
        except asyncio.CancelledError:
            response.cancel()
            raise
        except TimeoutError:
            late = ApiError(
                HTTPStatus.GATEWAY_TIMEOUT,
                f"the response was not done after {timeout_s:g} s, the server's limit, and was "
                "aborted",
                code="timeout",
            )
            await response.fail(late, self._send)
        except Exception as error:  # the session goes on
            if not isinstance(error, ApiError):
                _logger.exception("a response broke")
                error = ApiError.internal()
            await response.fail(error, self._send)

    async def _cancel(self, response_id: str | None) -> None:
        if self._answer is None or self._response is None or self._response.is_over:
            raise ApiError.bad_request("no response is being given", code="no_active_response")
        if response_id not in (None, self._response.id):
            raise ApiError.bad_request(
                f"response_id: {response_id!r:.80} is not being given, but {self._response.id!r}",
                param="response_id",
                code="no_active_response",
            )
        answer = self._answer
        await self._stop_answer()
        self._response.cancel()  # where it had not even begun
        if answer.cancelled():
            await self._send("response.done", response=self._response.described("cancelled"))

    async def _stop_answer(self) -> None:
        if self._answer is not None:
            self._answer.cancel()
            await asyncio.gather(self._answer, return_exceptions=True)

    async def _send(self, kind: str, **content: Any) -> None:
        """Send an event; nothing where the client has gone, which the next message tells."""
        event = {"type": kind, "event_id": f"event_{uuid.uuid4().hex}", **content}
        with _suppress_gone():
            await self._websocket.send_text(json.dumps(event))

    @property
    def _input_rate(self) -> int:
        audio = self._options.audio
        given = audio.input.format if audio is not None and audio.input is not None else None
        rate = given.rate if given is not None else None
        return _INPUT_RATE if rate is None else rate

    def _session(self) -> Mapping[str, Any]:
        return {
            "type": "realtime",
            "object": "realtime.session",
            "id": f"sess_{self._client.request_id}",
            "model": self._pipeline.name,
            "output_modalities": ["text"],
            **self._options.model_dump(exclude_none=True),
        }


def merged_options(before: ResponseOptions, change: ResponseOptions) -> ResponseOptions:
    """The wishes after a change; of ``audio``, too, what is not named stays."""
    merged = _laid_over(
        before.model_dump(exclude_none=True),
        change.model_dump(exclude_unset=True, exclude_none=True, exclude={"type", "model"}),
        depth=2,  # down to the fields of a stage's sampling, and of one direction of sound
    )
    return ResponseOptions.model_validate(merged)


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any], depth: int) -> dict[str, Any]:
    both = below.keys() & above.keys() if depth else ()
    deeper = {
        key: _laid_over(below[key], above[key], depth - 1)
        for key in both
        if isinstance(below[key], dict) and isinstance(above[key], dict)
    }
    return {**below, **above, **deeper}

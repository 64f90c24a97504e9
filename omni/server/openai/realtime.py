"""A realtime session: text and sound in, text and sound out, over one WebSocket.

A session keeps its conversation; each of its responses runs as one request, planned by the
client's options and by what the pipeline's stages can do.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from starlette.websockets import WebSocket, WebSocketDisconnect

from engine import AudioPrompt, ChatPrompt, SamplingParams
from engine.interface.log_fields import package_logger
from omni.server.openai.answers import TokenCount, text_stage
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
from omni.server.serving.client import Client
from omni.server.serving.pipeline_server import PipelineServer, ServedPipeline
from omni.server.serving.request_body import decoded
from omni.server.serving.response_stream import ResponseStream, Update

if TYPE_CHECKING:
    from omni.pipelines.pipeline import Pipeline

__all__ = ["RealtimeSession", "merged_options", "talk"]


_logger = package_logger(__name__)

_Messages = tuple[Mapping[str, Any], ...]
_Sounds = tuple[tuple[bytes, int], ...]
"""Samples of 16 bits, and how many a second."""


class Conversation:
    """The items of a session, and the buffer of sound that comes in, in at most ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._buffer = bytearray()
        self._messages: list[dict[str, Any]] = []
        self._sounds: list[tuple[bytes, int]] = []

    def append(self, samples: bytes) -> None:
        """Add to the buffer."""
        self._take(len(samples))
        self._buffer += samples

    def clear(self) -> None:
        """Empty the buffer."""
        self._num_bytes -= len(self._buffer)
        self._buffer.clear()

    def commit(self, rate: int) -> Mapping[str, Any]:
        """Make an item of the buffer."""
        if not self._buffer:
            raise ApiError.bad_request(
                "nothing was appended to the buffer of sound",
                code="input_audio_buffer_commit_empty",
            )
        _check_whole(self._buffer)
        self._sounds.append((bytes(self._buffer), rate))
        self._buffer.clear()
        self._messages.append({"role": "user", "content": [{"type": "audio"}]})
        return _item("user", [{"type": "input_audio"}])

    async def add(self, item: Item, rate: int) -> Mapping[str, Any]:
        """Add an item."""
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
        described = [part.model_dump(exclude_none=True, exclude={"audio"}) for part in item.content]
        return _item(item.role, described, item.id)

    def answered(self, text: str) -> None:
        """Add the assistant's answer."""
        self._num_bytes += len(text)
        self._messages.append({"role": "assistant", "content": text})

    def history(self, instructions: str | None) -> tuple[_Messages, _Sounds]:
        """Return all messages, for the next answer, and the sounds in them in their order."""
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
        raise ApiError.bad_field(
            "audio", f"samples of 16 bits have two bytes each, got {len(samples)} bytes"
        )


def _prompt(messages: _Messages, sounds: _Sounds) -> ChatPrompt:
    audio = [
        AudioPrompt(np.frombuffer(samples, "<i2").astype(np.float32) / 2**15, rate)
        for samples, rate in sounds
    ]
    return ChatPrompt(messages, multi_modal_data={"audio": tuple(audio)} if audio else {})


def _item(
    role: str, content: list[dict[str, Any]], item_id: str | None = None, status: str = "completed"
) -> Mapping[str, Any]:
    return {
        "id": item_id or f"item_{uuid.uuid4().hex[:24]}",
        "object": "realtime.item",
        "type": "message",
        "status": status,
        "role": role,
        "content": content,
    }


_Send: TypeAlias = Callable[..., Awaitable[None]]
"""Sends an event, given its kind and, by their names, its fields."""


class RealtimeResponse:
    """One answer to a conversation; a whole answer is added to it.

    Attributes:
        id: by which events name it.
        is_over: whether it is whole or has failed, so that it cannot be cancelled any more, though
            its end may still have to be sent.
    """

    def __init__(
        self,
        pipeline: ServedPipeline,
        client: Client,
        conversation: Conversation,
        options: ResponseOptions,
        number: int,
        send: _Send,
    ) -> None:
        self._pipeline = pipeline
        self._client = client
        self._conversation = conversation
        self._number = number
        self._plan = plan_response(pipeline.omni.pipeline, options, "response")
        self._history = conversation.history(options.instructions)
        self._sound = SpokenPieces(self._plan.output_rate)
        self._send = send
        self._speaks = self._plan.voice is not None
        self._text_kind = "output_audio_transcript" if self._speaks else "output_text"
        self.id = f"resp_{client.request_id}_{number}"
        item_id = f"item_{client.request_id}_{number}"
        self._place = {
            "response_id": self.id, "item_id": item_id, "output_index": 0, "content_index": 0,
        }  # fmt: skip
        self.is_over = False
        self._text = ""
        self._count = TokenCount()

    async def run(self, timeout_s: float) -> None:
        """Answer, and send it as it comes; failures, too, are events."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._answer()
        except asyncio.CancelledError:
            self.cancel()
            raise
        except TimeoutError:
            message = (
                f"the response was not done after {timeout_s:g} s, the server's limit, and was "
            )
            error = ApiError(HTTPStatus.GATEWAY_TIMEOUT, message + "aborted", code="timeout")
            await self._fail(error)
        except ApiError as error:
            await self._fail(error)
        except Exception:  # the session goes on
            _logger.exception("a response broke")
            await self._fail(ApiError.internal())

    async def _answer(self) -> None:
        place, send = self._place, self._send
        await send("response.created", response=self.described("in_progress"))
        await send("response.output_item.added", **place, item=self._answer_item("in_progress"))
        # Sounds are twice as large in a prompt, and made in a thread.
        prompt = await asyncio.to_thread(_prompt, *self._history)
        plan = self._plan
        request = self._client.request(
            prompt, plan.sampling, index=self._number, speaker=plan.speaker
        )
        stages = [plan.writer] if plan.voice is None else [plan.writer, plan.voice]
        async with ResponseStream(
            self._pipeline, self._client, [request], "conversation", stages
        ) as stream:
            async for update in stream.updates():
                await self._send_new(update)
        await self._send_sound(self._sound.rest())
        self.is_over = True
        self._conversation.answered(self._text)
        if self._speaks:
            await send("response.output_audio.done", **place)
        text = {"transcript" if self._speaks else "text": self._text}
        await send(f"response.{self._text_kind}.done", **place, **text)
        await send("response.output_item.done", **place, item=self._answer_item("completed"))
        await send("response.done", response=self.described("completed"))

    def cancel(self) -> None:
        """End it; what was sent until then is part of the conversation."""
        if self._text and not self.is_over:
            self._conversation.answered(self._text)
        self.is_over = True

    async def _fail(self, error: ApiError) -> None:
        self.is_over = True
        await self._send("error", error={**error.to_object()["error"], "event_id": None})
        await self._send("response.done", response=self.described("failed", error))

    def described(self, status: str, error: ApiError | None = None) -> Mapping[str, Any]:
        """Describe the response as events do."""
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
            "output": [self._answer_item(status)] if has_begun else [],
            "usage": self._usage(),
        }

    async def _send_new(self, update: Update) -> None:
        delta = update.of(self._plan.writer)
        if delta is not None:
            self._count.add(delta)
            if delta.text:
                self._text += delta.text
                kind = f"response.{self._text_kind}.delta"
                await self._send(kind, **self._place, delta=delta.text)
        sound = update.sound(self._plan.voice)
        if sound is not None:
            await self._send_sound(self._sound.of(sound))

    async def _send_sound(self, samples: bytes) -> None:
        if samples:
            delta, rate = b64encode(samples).decode(), self._sound.rate
            await self._send("response.output_audio.delta", **self._place, delta=delta, rate=rate)

    def _answer_item(self, status: str) -> Mapping[str, Any]:
        part = {"type": "output_text", "text": self._text}
        if self._speaks:
            part = {"type": "output_audio", "transcript": self._text}
        status = status if status == "completed" else "incomplete"
        content = [part] if self._text else []
        return _item("assistant", content, str(self._place["item_id"]), status)

    def _usage(self) -> Mapping[str, Any] | None:
        count = self._count
        if not count.written:
            return None
        return {
            "input_tokens": count.prompt,
            "output_tokens": count.written.get(0, 0),
            "total_tokens": count.prompt + count.written.get(0, 0),
            "input_token_details": {"cached_tokens": count.cached},
        }


@dataclass(frozen=True, slots=True)
class ResponsePlan:
    """The way in which a pipeline is to answer.

    Attributes:
        writer: the stage whose text answers.
        voice: the stage whose sound answers; None where text alone is wanted.
        speaker: whose voice; None leaves it to the pipeline.
        output_rate: samples a second of the sound that is sent; None: as it is made.
        sampling: by stage.
    """

    writer: str
    voice: str | None
    speaker: str | None
    output_rate: int | None
    sampling: Mapping[str, SamplingParams]


def plan_response(pipeline: Pipeline, options: ResponseOptions, place: str) -> ResponsePlan:
    """Find out how to answer with options at a place of an event: ``session`` or ``response``."""
    writer = text_stage(pipeline)
    output = options.audio.output if options.audio is not None else None
    speaker = output.voice if output is not None else None
    is_spoken = options.output_modalities == ["audio"]
    # Of a pipeline that speaks, before it has to; to others clients may name any.
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
        raise ApiError.bad_field(at, "a conversation goes on in one way only")
    rate = output.format.rate if output is not None and output.format is not None else None
    return ResponsePlan(writer, voice, speaker if voice is not None else None, rate, sampling)


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
    """Pass over that the client has gone, or was sent away."""
    return suppress(WebSocketDisconnect, OSError, RuntimeError)


class RealtimeSession:
    """One client's session with one pipeline. Its end aborts its own request, and nothing else."""

    def __init__(
        self,
        websocket: WebSocket,
        server: PipelineServer,
        pipeline: ServedPipeline,
        client: Client,
    ) -> None:
        # Without any options it can answer, or there is no session.
        plan_response(pipeline.omni.pipeline, ResponseOptions(), "session")
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
        """Handle events until the client goes."""
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
        """Handle one event; one that is wrong is answered by an error, and changes nothing."""
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
            raise ApiError.bad_field("session.model", "the model of a session cannot be changed")
        options = merged_options(self._options, session)
        if session.stages is not None:  # all of them, so that one can be taken back
            options = options.model_copy(update={"stages": session.stages})
        plan_response(self._pipeline.omni.pipeline, options, "session")
        self._options = options

    def _begin_answer(self, options: ResponseOptions) -> None:
        if self._answer is not None and not self._answer.done():
            raise ApiError(
                HTTPStatus.CONFLICT,
                "a response is being given already; cancel it, or wait for its end",
                code="conversation_already_has_active_response",
            )
        self._response = RealtimeResponse(
            self._pipeline,
            self._client,
            self._conversation,
            merged_options(self._options, options),
            self._num_responses,
            self._send,
        )
        self._num_responses += 1
        self._answer = asyncio.create_task(self._response.run(self._limits.request_timeout_s))

    async def _cancel(self, response_id: str | None) -> None:
        response, answer = self._response, self._answer
        if answer is None or response is None or response.is_over:
            raise ApiError.bad_request("no response is being given", code="no_active_response")
        if response_id not in (None, response.id):
            message = f"{response_id!r:.80} is not being given, but {response.id!r}"
            raise ApiError.bad_field("response_id", message, "no_active_response")
        await self._stop_answer()
        response.cancel()  # where it had not even begun
        if answer.cancelled():
            await self._send("response.done", response=response.described("cancelled"))

    async def _stop_answer(self) -> None:
        if self._answer is not None:
            self._answer.cancel()
            await asyncio.gather(self._answer, return_exceptions=True)

    async def _send(self, kind: str, **content: Any) -> None:
        """Send an event; nothing where the client has gone, as the next message says."""
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
    """Lay a change over options; of ``audio``, too, what is not named remains."""
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

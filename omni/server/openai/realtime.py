"""Realtime sessions: text and audio in both directions over one WebSocket.

A session has a conversation; each response and each transcription of the user's speech runs as one
request. With turn detection, speech is committed as items automatically::

    audio ─► buffer ─► speech starts: cancel the active response ─► ends: item ─► response
                                                                            └───► transcription
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from itertools import count
from typing import Any

from starlette import status
from starlette.websockets import WebSocket, WebSocketDisconnect

from engine import AudioPrompt, TranscriptionOptions
from engine.interface.log_fields import package_logger
from omni.server.openai.realtime_conversation import (
    Conversation,
    ConversationItem,
    InputSound,
    Part,
    Sound,
    SpeechTurn,
    new_item_id,
)
from omni.server.openai.realtime_events import (
    AboutItem,
    AppendAudio,
    Cancel,
    CreateItem,
    CreateResponse,
    EndAudio,
    InputTranscription,
    Item,
    OneResponse,
    ResponseOptions,
    SessionKind,
    SessionUpdate,
    TruncateItem,
    TurnDetection,
    UpdateSession,
    event_id_of,
    parse_event,
    to_older_names,
)
from omni.server.openai.realtime_response import (
    RealtimeResponse,
    failure_of,
    merge_options,
    plan_response,
)
from omni.server.openai.transcription import words_of
from omni.server.serving.api_error import ApiError
from omni.server.serving.client import Client
from omni.server.serving.pipeline_server import PipelineServer, ServedPipeline
from omni.server.serving.request_body import decode_base64, in_thread_if_large

_logger = package_logger(__name__)
_OLDER_API = "realtime=v1"

_MAX_ASIDE = 4
"""Maximum responses outside of a conversation at once: each may hold items of its own."""

_DISCONNECTED = (WebSocketDisconnect, OSError, RuntimeError)
"""Errors of sending to a client that has disconnected, or was disconnected."""


async def talk(websocket: WebSocket) -> None:
    """Run a realtime session over a WebSocket, or send an error event if it is refused."""
    offered = websocket.scope.get("subprotocols", ())
    await websocket.accept(subprotocol="realtime" if "realtime" in offered else None)
    server: PipelineServer = websocket.state.server
    asked = websocket.query_params
    kind: SessionKind = "transcription" if asked.get("intent") == "transcription" else "realtime"
    model = asked.get("model", "")
    if kind == "transcription" and not model:  # named by the client later, or left to the server
        model = server.settings.transcriber or next(iter(server.pipelines))
    is_older = _OLDER_API in websocket.headers.get("openai-beta", "")
    is_older |= "openai-beta.realtime-v1" in offered
    try:
        with server.session():
            client: Client = websocket.state.client
            pipeline = server.find(model)
            await RealtimeSession(
                websocket, server, pipeline, client, kind, is_older=is_older
            ).run()
    except ApiError as error:
        websocket.state.refusal = error
        is_full = error.status is HTTPStatus.TOO_MANY_REQUESTS
        with suppress(*_DISCONNECTED):
            event_id = f"event_{uuid.uuid4().hex}"
            await websocket.send_json({"type": "error", "event_id": event_id, **error.to_object()})
            code = status.WS_1013_TRY_AGAIN_LATER if is_full else status.WS_1008_POLICY_VIOLATION
            await websocket.close(code, error.message[:100])


class RealtimeSession:
    """One client's session with one pipeline. Its end aborts only its own requests.

    A client that ``is_older`` gets the names of OpenAI's beta. A session of kind ``transcription``
    only transcribes its audio, without responses.
    """

    def __init__(
        self,
        websocket: WebSocket,
        server: PipelineServer,
        pipeline: ServedPipeline,
        client: Client,
        kind: SessionKind = "realtime",
        *,
        is_older: bool = False,
    ) -> None:
        self._websocket = websocket
        self._server = server
        self._limits = server.settings.limits
        self._pipeline = pipeline
        self._client = client
        self._kind = kind
        self._is_older = is_older
        self._options = _initial_options(server, pipeline, kind)
        # Refuse the session if it could not respond with its initial options.
        self._check(self._options)
        self._conversation = Conversation(self._limits.max_body_bytes)
        sound = self._options.audio.input
        self._input = InputSound(sound.format, sound.turn_detection)
        self._speech_id = new_item_id()
        self._response: RealtimeResponse | None = None
        self._responses_aside: list[RealtimeResponse] = []  # outside of the conversation
        self._transcriptions: set[asyncio.Task[None]] = set()
        self._numbers = count()  # numbers of requests
        self._reads: list[str] = pipeline.describe()["modalities"]["input"]

    async def run(self) -> None:
        """Handle events until the client disconnects."""
        await self._send("session.created", session=self._describe_session())
        try:
            while True:
                message = await self._websocket.receive()
                if message["type"] == "websocket.disconnect":
                    return
                text = message.get("text")
                if text is None:
                    with suppress(*_DISCONNECTED):
                        await self._websocket.close(
                            status.WS_1003_UNSUPPORTED_DATA, "events are JSON in text"
                        )
                    return
                await self._handle(text)
        finally:
            for task in self._transcriptions:
                task.cancel()
            for response in (self._response, *self._responses_aside):
                if response is not None:
                    await response.abort()
            await asyncio.gather(*self._transcriptions, return_exceptions=True)

    async def _handle(self, text: str) -> None:
        """Handle one event; an invalid one causes an error event, and changes nothing."""
        try:
            match await in_thread_if_large(parse_event, text):
                case UpdateSession() as event:
                    is_beta = event.type == "transcription_session.update"
                    self._update(event.session, "transcription" if is_beta else event.session.type)
                    await self._send("session.updated", session=self._describe_session())
                case AppendAudio() as event:
                    content = await decode_base64(event.audio, "audio")
                    self._conversation.check_room(len(self._input) + len(content))
                    self._input.append(content)
                    async for turn in self._input.turns():
                        await self._handle_turn(turn)
                case EndAudio(type="input_audio_buffer.commit"):
                    await self._commit(self._input.take())
                case EndAudio():
                    self._input.clear()
                    await self._send("input_audio_buffer.cleared")
                case CreateResponse() as event:
                    await self._begin_answer(event.response)
                case Cancel() as event:
                    await self._cancel(event.response_id)
                case CreateItem() as event:
                    item = await ConversationItem.of(event.item, self._input.form, self._pipeline)
                    await self._add(item, event.previous_item_id)
                case AboutItem(type="conversation.item.retrieve") as event:
                    item = self._conversation.find(event.item_id, "retrieve")
                    shown = await asyncio.to_thread(item.describe, self._input.form)
                    await self._send("conversation.item.retrieved", item=shown)
                case AboutItem() as event:
                    self._conversation.delete(event.item_id)
                    await self._send("conversation.item.deleted", item_id=event.item_id)
                case TruncateItem() as event:
                    self._conversation.truncate(event.item_id, event.audio_end_ms / 1000)
                    await self._send(
                        "conversation.item.truncated", item_id=event.item_id, content_index=0,
                        audio_end_ms=event.audio_end_ms,
                    )  # fmt: skip
        except ApiError as error:
            await self._send_error(error, await in_thread_if_large(event_id_of, text))

    def _check(self, options: OneResponse) -> None:
        if self._kind == "realtime":
            plan_response(self._pipeline.omni.pipeline, options, "session")

    def _update(self, session: SessionUpdate, kind: SessionKind | None) -> None:
        if kind not in (None, self._kind):
            raise ApiError.bad_field(
                "session.type",
                f"this session is of type {self._kind!r}, which its address says: "
                "?intent=transcription for one that writes down what it hears",
            )
        if session.model and self._server.names.get(session.model) is not self._pipeline:
            raise ApiError.bad_field("session.model", "the model of a session cannot be changed")
        options = merge_options(self._options, session)
        if session.stages is not None:  # replace all of them, so that one can be removed
            options = options.model_copy(update={"stages": session.stages})
        self._check(options)
        self._transcriber(options)
        self._input.change(options.audio.input.format, options.audio.input.turn_detection)
        self._options = options

    async def _handle_turn(self, turn: SpeechTurn) -> None:
        """Handle a detected start or end of speech."""
        detection, item_id = self._input.detection, self._speech_id
        if turn.sound is None:
            await self._send(
                "input_audio_buffer.speech_started", audio_start_ms=turn.at_ms, item_id=item_id
            )
            if detection.interrupt_response and self._response is not None:
                await self._response.cancel("turn_detected")
            return
        await self._send(
            "input_audio_buffer.speech_stopped", audio_end_ms=turn.at_ms, item_id=item_id
        )
        try:
            await self._commit(turn.sound)
            if detection.create_response and self._kind == "realtime":
                await self._begin_answer(OneResponse())
        except ApiError as error:  # not caused by an event of the client
            await self._send_error(error, None)

    async def _commit(self, sound: Sound) -> None:
        item_id, self._speech_id = self._speech_id, new_item_id()
        last = self._conversation.items[-1].id if self._conversation.items else None
        item = ConversationItem(id=item_id, role="user", parts=[Part("input_audio", sound=sound)])
        await self._send("input_audio_buffer.committed", item_id=item_id, previous_item_id=last)
        await self._add(item, None)

    async def _add(self, item: ConversationItem, previous_id: str | None) -> None:
        """Add an item to the conversation, and start to transcribe its audio."""
        before = self._conversation.add(item, previous_id)
        transcriber = self._transcriber(self._options)
        shown = item.describe()
        await self._send("conversation.item.added", previous_item_id=before, item=shown)
        await self._send("conversation.item.done", previous_item_id=before, item=shown)
        for index, part in enumerate(item.parts):
            if part.sound is not None and transcriber is not None:
                task = asyncio.create_task(self._transcribe(transcriber, item.id, index, part))
                part.transcription = task
                self._transcriptions.add(task)
                task.add_done_callback(self._transcriptions.discard)

    async def _transcribe(
        self, pipeline: ServedPipeline, item_id: str, index: int, part: Part
    ) -> None:
        """Transcribe a part of an item, and send the transcript as it is generated."""
        kind, sound = "conversation.item.input_audio_transcription", part.sound
        place = {"item_id": item_id, "content_index": index}
        asked = self._options.audio.input.transcription
        assert sound is not None
        prompt = AudioPrompt(
            sound.floats,
            sound.rate,
            language=asked.language,
            transcription=TranscriptionOptions(prompt=asked.prompt) if asked.prompt else None,
        )

        async def write() -> None:
            async for words in words_of(pipeline, self._client, prompt, next(self._numbers)):
                part.text += words
                await self._send(f"{kind}.delta", **place, delta=words)

        what = f"the transcription of {item_id}"
        error = await failure_of(write(), self._limits.request_timeout_s, what)
        part.text = part.text.strip()
        self._conversation.count(len(part.text))
        if error is not None:
            await self._send(f"{kind}.failed", **place, error=error.to_object()["error"])
            return
        usage = {"type": "duration", "seconds": sound.seconds}
        await self._send(f"{kind}.completed", **place, transcript=part.text, usage=usage)

    def _transcriber(self, options: ResponseOptions) -> ServedPipeline | None:
        """Return the pipeline that transcribes the user's speech; None if disabled."""
        name = options.audio.input.transcription.model
        if not name:
            return None
        if name not in self._server.names:
            if self._server.settings.transcriber is None:
                raise ApiError.bad_field(
                    "session.audio.input.transcription.model",
                    f"no pipeline {name!r:.80} is served, and none was started as --transcriber",
                )
            name = self._server.settings.transcriber
        return self._server.find(name)

    async def _begin_answer(self, options: OneResponse) -> None:
        if self._kind != "realtime":
            raise ApiError.bad_request("a session of type 'transcription' answers nothing")
        if options.conversation == "none":
            await self._begin_answer_aside(options)
            return
        if self._response is not None and not self._response.task.done():
            raise ApiError(
                HTTPStatus.CONFLICT,
                "a response is being given already; cancel it, or wait for its end",
                code="conversation_already_has_active_response",
            )
        self._response = self._begin(self._conversation, options)

    async def _begin_answer_aside(self, options: OneResponse) -> None:
        """Begin a response to the conversation or to own items, which does not become part of it.

        Several may run at once, beside the conversation's own response.
        """
        running = [each for each in self._responses_aside if not each.task.done()]
        if len(running) >= _MAX_ASIDE:
            message = f"{_MAX_ASIDE} responses run aside, the maximum; wait for the end of one"
            raise ApiError(HTTPStatus.TOO_MANY_REQUESTS, message, code="too_many_responses")
        conversation = Conversation(self._limits.max_body_bytes)
        items = self._conversation.items
        if options.input is not None:
            places = enumerate(options.input)
            items = [await self._item_aside(x, f"response.input[{i}]") for i, x in places]
        for item in items:
            conversation.add(item)
        self._responses_aside = [*running, self._begin(conversation, options)]

    async def _item_aside(self, item: Item, place: str) -> ConversationItem:
        if item.type == "item_reference":
            return self._conversation.find(item.id or "", "create", f"{place}.id")
        created = await ConversationItem.of(item, self._input.form, self._pipeline, place)
        if "audio" not in self._reads and any(part.sound is not None for part in created.parts):
            message = "this model does not hear, and only items of the conversation are transcribed"
            raise ApiError.bad_field(place, message)
        return created

    def _begin(self, conversation: Conversation, options: OneResponse) -> RealtimeResponse:
        response = RealtimeResponse(
            self._pipeline,
            self._client,
            conversation,
            merge_options(self._options, options),
            next(self._numbers),
            self._send,
        )
        response.begin(self._limits.request_timeout_s)
        return response

    async def _cancel(self, response_id: str | None) -> None:
        response = self._response
        for each in self._responses_aside:
            if each.id == response_id:
                response = each
        if response is None or response.is_over:
            raise ApiError.bad_request(
                "no response is being given", code="response_cancel_not_active"
            )
        if response_id not in (None, response.id):
            message = f"{response_id!r:.80} is not being given, but {response.id!r}"
            raise ApiError.bad_field("response_id", message, "response_cancel_not_active")
        await response.cancel("client_cancelled")

    async def _send_error(self, error: ApiError, event_id: str | None) -> None:
        # As repr: text quoted by an error may look like another log line.
        session_id = f"sess_{self._client.request_id}"
        _logger.warning("an event of %s was refused: %.500r", session_id, error.message)
        await self._send("error", error={**error.to_object()["error"], "event_id": event_id})

    async def _send(self, kind: str, **content: Any) -> None:
        """Send an event, unless the client has disconnected, which ``run`` handles."""
        event: Mapping[str, Any] | None
        event = {"type": kind, "event_id": f"event_{uuid.uuid4().hex}", **content}
        if self._is_older:
            event = to_older_names(event)
        if event is not None:
            with suppress(*_DISCONNECTED):
                await self._websocket.send_text(json.dumps(event))

    def _describe_session(self) -> Mapping[str, Any]:
        options = self._options.model_dump(exclude_none=True, exclude={"conversation"})
        sound = options["audio"]["input"]
        if sound["turn_detection"]["type"] == "none":
            sound["turn_detection"] = None
        if not sound["transcription"]["model"]:
            sound["transcription"] = None
        own = {"type": self._kind, "id": f"sess_{self._client.request_id}"}
        if self._kind == "transcription":
            return own | {"object": "realtime.transcription_session", "audio": {"input": sound}}
        return own | {
            "object": "realtime.session",
            "model": self._pipeline.name,
            "instructions": "",
            "tools": [],
            "tool_choice": "auto",
            "max_output_tokens": "inf",
            **options,
        }


def _initial_options(
    server: PipelineServer, pipeline: ServedPipeline, kind: SessionKind
) -> OneResponse:
    """Return a session's initial options: OpenAI's defaults, if the pipeline supports them."""
    speaks = any("audio" in stage.final_output for stage in pipeline.omni.pipeline.stages.values())
    hears = "audio" in pipeline.describe()["modalities"]["input"]
    transcriber = server.settings.transcriber if kind == "realtime" else pipeline.name
    audio: dict[str, Any] = {}
    if hears or transcriber is not None:
        audio["turn_detection"] = TurnDetection()
    if (not hears or kind == "transcription") and transcriber is not None:
        audio["transcription"] = InputTranscription(model=transcriber)
    return OneResponse.model_validate(
        {"audio": {"input": audio}, "output_modalities": ["audio" if speaks else "text"]}
    )

"""A realtime session: text and sound in, text and sound out, over one WebSocket."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from engine.interface.log_fields import package_logger
from omni.server.openai.conversation import Conversation
from omni.server.openai.realtime_events import (
    AppendAudio,
    Cancel,
    ClearAudio,
    CommitAudio,
    CreateItem,
    CreateResponse,
    ResponseWish,
    SessionWish,
    UpdateSession,
    event_id_of,
    parse_event,
)
from omni.server.openai.realtime_response import RealtimeResponse
from omni.server.openai.response_plan import planned
from omni.server.serving.api_error import ApiError
from omni.server.serving.media_bytes import decoded

if TYPE_CHECKING:
    from omni.server.serving.guard import Client
    from omni.server.serving.pipeline_server import PipelineServer
    from omni.server.serving.served_pipeline import ServedPipeline

__all__ = ["RealtimeSession", "merged_wishes", "refuse_session"]

_logger = package_logger(__name__)

_UNSUPPORTED_DATA = 1003
_POLICY_VIOLATION = 1008
_TRY_AGAIN_LATER = 1013
_INPUT_RATE = 24_000
_SMALL = 1 << 16
"""Characters that are parsed at once; more go to another thread."""


async def refuse_session(websocket: WebSocket, error: ApiError) -> None:
    """Tell why there is no session, and close the connection.

    Args:
        websocket: accepted.
        error: that is why.
    """
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
        planned(pipeline.omni.pipeline, ResponseWish(), "session")
        self._websocket = websocket
        self._limits = server.settings.limits
        self._pipeline = pipeline
        self._client = client
        self._wish = ResponseWish()
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
            await self._tell(error, event_id_of(text) if len(text) <= _SMALL else None)

    def _update(self, session: SessionWish) -> None:
        if session.model not in (None, self._pipeline.name):
            told = "session.model: the model of a session cannot be changed"
            raise ApiError.bad_request(told, param="session.model")
        wish = merged_wishes(self._wish, session)
        if session.stages is not None:  # all of them, so that one can be taken back
            wish = wish.model_copy(update={"stages": session.stages})
        planned(self._pipeline.omni.pipeline, wish, "session")
        self._wish = wish

    def _begin_answer(self, wish: ResponseWish) -> None:
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
            merged_wishes(self._wish, wish),
            self._num_responses,
        )
        self._response = response
        self._num_responses += 1
        self._answer = asyncio.create_task(self._run_answer(response))

    async def _run_answer(self, response: RealtimeResponse) -> None:
        try:
            async with asyncio.timeout(self._limits.request_timeout_s):
                await response.run(self._send)
        except TimeoutError:
            seconds = self._limits.request_timeout_s
            late = ApiError(
                HTTPStatus.GATEWAY_TIMEOUT,
                f"the response was not done after {seconds:g} s, the server's limit, and was "
                "aborted",
                code="timeout",
            )
            await response.fail(late, self._send)
        except ApiError as error:
            await response.fail(error, self._send)
        except Exception:  # a mistake of this server: the session goes on
            _logger.exception("a response broke")
            told = "the server made a mistake; see its log"
            mistake = ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, told)
            await response.fail(mistake, self._send)
        except asyncio.CancelledError:
            response.cancel()
            raise

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

    async def _tell(self, error: ApiError, event_id: str | None = None) -> None:
        await self._send("error", error={**error.to_object()["error"], "event_id": event_id})

    async def _send(self, kind: str, **content: Any) -> None:
        """Send an event; nothing where the client has gone, which the next message tells."""
        event = {"type": kind, "event_id": f"event_{uuid.uuid4().hex}", **content}
        with _suppress_gone():
            await self._websocket.send_text(json.dumps(event))

    @property
    def _input_rate(self) -> int:
        audio = self._wish.audio
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
            **self._wish.model_dump(exclude_none=True),
        }


def merged_wishes(before: ResponseWish, change: ResponseWish) -> ResponseWish:
    """The wishes after a change; of ``audio``, too, what is not named stays."""
    merged = _laid_over(
        before.model_dump(exclude_none=True),
        change.model_dump(exclude_unset=True, exclude_none=True, exclude={"type", "model"}),
        depth=2,  # down to the fields of a stage's sampling, and of one direction of sound
    )
    return ResponseWish.model_validate(merged)


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any], depth: int) -> dict[str, Any]:
    both = below.keys() & above.keys() if depth else ()
    deeper = {
        key: _laid_over(below[key], above[key], depth - 1)
        for key in both
        if isinstance(below[key], dict) and isinstance(above[key], dict)
    }
    return {**below, **above, **deeper}

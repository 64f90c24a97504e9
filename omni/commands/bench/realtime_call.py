"""One answer over ``/v1/realtime``: a connection, a text said, and what comes back."""

from __future__ import annotations

import binascii
import json
from base64 import b64decode
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from omni.commands.bench.answer_events import error_text
from omni.commands.bench.http_settings import HttpSettings
from omni.commands.bench.measured_request import RequestFailure
from omni.commands.bench.request_timer import RequestTimer

__all__ = ["RealtimeCall"]

_USUAL_RATE = 24_000
_SAMPLE_BYTES = 2
_MOST_BYTES = 64 * 2**20
_TEXT_DELTAS = ("response.output_text.delta", "response.output_audio_transcript.delta")


class RealtimeCall:
    """Says a text over a connection of its own, and reads the answer to its end.

    Its times count from before the connection is made, as those of requests over HTTP.

    Args:
        settings: which server, by which key, and whether it is to speak, by whose voice.
        model: of the server.
        text: what to say.
    """

    def __init__(self, settings: HttpSettings, model: str, text: str) -> None:
        base = "ws" + settings.base_url.removeprefix("http")
        self._url = f"{base}/realtime?{urlencode({'model': model})}"
        key = settings.api_key
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._events = [json.dumps(event) for event in _events(settings, text)]

    async def send(self, timer: RequestTimer) -> str:
        """Ask; see :data:`~omni.commands.bench.load_source.Send`."""
        timer.send()
        try:
            async with connect(
                self._url, additional_headers=self._headers, max_size=_MOST_BYTES, proxy=None
            ) as connection:
                return await self._talk(connection, timer)
        except InvalidStatus as error:
            status = error.response.status_code
            told = (error.response.body or b"").decode("utf-8", "replace")[:500]
            raise RequestFailure(f"status {status}", told, is_rejection=status == 429) from error
        except (OSError, WebSocketException) as error:
            told = str(error) or type(error).__name__
            raise RequestFailure("connection broke", told) from error

    async def _talk(self, connection: ClientConnection, timer: RequestTimer) -> str:
        texts: list[str] = []
        for event in self._events:
            await connection.send(event)
        async for message in connection:
            try:
                event = json.loads(message)
                if self._take(event, texts, timer):
                    return "".join(texts)
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                told = f"{type(error).__name__}: {error}; it was {message!r:.200}"
                raise RequestFailure("unreadable event", told) from error
        raise RequestFailure("cut off", "the connection was closed before the answer was done")

    def _take(self, event: Mapping[str, Any], texts: list[str], timer: RequestTimer) -> bool:
        """Note what an event tells; whether it is the last one."""
        kind = event["type"]
        if kind in _TEXT_DELTAS:
            timer.text()
            texts.append(str(event["delta"]))
        elif kind == "response.output_audio.delta":
            try:
                num_bytes = len(b64decode(event["delta"], validate=True))
            except binascii.Error as error:
                raise ValueError(f"its sound is no base64: {error}") from error
            timer.audio(num_bytes / _SAMPLE_BYTES / event.get("rate", _USUAL_RATE))
        elif kind == "error":
            is_full = event["error"].get("code") == "queue_full"
            raise RequestFailure("error event", error_text(event), is_rejection=is_full)
        elif kind == "response.done":
            usage = event["response"].get("usage") or {}
            details = usage.get("input_token_details") or {}
            cached = details.get("cached_tokens")
            timer.usage(usage.get("input_tokens"), cached, usage.get("output_tokens"))
            if event["response"]["status"] != "completed":
                raise RequestFailure("not completed", str(event["response"]["status"]))
            return True
        return False


def _events(settings: HttpSettings, text: str) -> list[Mapping[str, Any]]:
    session: dict[str, Any] = {"type": "realtime", "output_modalities": ["text"]}
    if settings.speech:
        session["output_modalities"] = ["audio"]
        if settings.voice is not None:
            session["audio"] = {"output": {"voice": settings.voice}}
    said = {"type": "input_text", "text": text}
    item = {"type": "message", "role": "user", "content": [said]}
    return [
        {"type": "session.update", "session": session},
        {"type": "conversation.item.create", "item": item},
        {"type": "response.create"},
    ]

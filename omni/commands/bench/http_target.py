"""A server with OpenAI's API as the target of load."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode

import httpx2
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus, WebSocketException

from omni.commands.bench.measured_request import MeasuredRequest, RequestFailure, Send
from omni.commands.bench.openai_answers import RealtimeEvents, error_text
from omni.commands.bench.openai_requests import (
    HttpSettings,
    OpenAICall,
    openai_call,
    realtime_events,
)

__all__ = ["HttpSettings", "HttpTarget"]

_CHECK_TIMEOUT_S = 30.0
_IDLE_S = 2.0
"""Connections that were idle for longer are not used again: the other side may just close them."""

_MOST_ERROR_BYTES = 1 << 16
_MOST_MESSAGE_BYTES = 64 * 2**20


class HttpTarget:
    """A server, used in ``async with``, which checks that it can be reached.

    Args:
        settings: of the server, and what is requested.

    Raises:
        ValueError: on entering: the server cannot be reached, refuses the key, or does not have
            the model; names the flag.
    """

    answering_stage: str | None = None

    def __init__(self, settings: HttpSettings) -> None:
        self.settings = settings
        self.model = settings.model or ""
        key = settings.api_key
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._client = httpx2.AsyncClient(
            headers=self._headers,
            # As many connections as requests: a limit of the client is none of the server.
            limits=httpx2.Limits(
                max_connections=None, max_keepalive_connections=None, keepalive_expiry=_IDLE_S
            ),
            timeout=None,
            verify=_certificates(),
        )

    async def __aenter__(self) -> Self:
        try:
            self.model = await self._find_model()
        except BaseException:
            await self._client.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    def prepare(self, line: Mapping[str, Any], folder: Path) -> Send:
        """Make a request; see :class:`~omni.commands.bench.measured_request.LoadTarget`."""
        if self.settings.endpoint == "realtime":
            events = [json.dumps(event) for event in realtime_events(line, self.settings)]
            return partial(self._talk, events)
        call = openai_call(line, folder, self.settings, self.model)
        accept = f"{call.answer_type}*" if call.answer_type.endswith("/") else call.answer_type
        url = self.settings.base_url + call.path
        request = self._client.build_request("POST", url, headers={"accept": accept}, **call.body)
        request.read()  # the parts of a form, so that it can be sent again
        return partial(self._send, request, call)

    async def reset_caches(self) -> None:
        """Do nothing: the API has no way to. Made-up requests do not hit those of other levels."""

    async def _send(
        self, request: httpx2.Request, call: OpenAICall, record: MeasuredRequest
    ) -> str:
        record.send()
        async with self._answer(request, call.answer_type) as response:
            return await call.read(response, record)

    @asynccontextmanager
    async def _answer(
        self, request: httpx2.Request, answer_type: str
    ) -> AsyncIterator[httpx2.Response]:
        """An answer of a content type; any other, or a broken one, is a failure of its kind."""
        try:
            response = await self._client.send(request, stream=True)
            try:
                if response.status_code != HTTPStatus.OK:
                    raise await _refusal(response)
                kind = response.headers.get("content-type", "")
                if not kind.startswith(answer_type):
                    is_stream = answer_type == "text/event-stream"
                    expected = "not streamed" if is_stream else f"not {answer_type}"
                    raise RequestFailure("no stream", f"the answer is {kind!r:.80}, {expected}")
                yield response
            finally:
                await response.aclose()
        except httpx2.ConnectError as error:
            raise RequestFailure("no connection", _message(error)) from error
        except httpx2.TimeoutException as error:
            raise RequestFailure("timeout", _message(error)) from error
        except (httpx2.TransportError, httpx2.StreamError) as error:
            raise RequestFailure("connection broke", _message(error)) from error

    async def _talk(self, events: Sequence[str], record: MeasuredRequest) -> str:
        """Say a text over a WebSocket, whose connection is part of the time, as over HTTP."""
        base = "ws" + self.settings.base_url.removeprefix("http")
        url = f"{base}/realtime?{urlencode({'model': self.model})}"
        answer = RealtimeEvents(record)
        record.send()
        try:
            async with connect(
                url, additional_headers=self._headers, max_size=_MOST_MESSAGE_BYTES, proxy=None
            ) as connection:
                for event in events:
                    await connection.send(event)
                async for message in connection:
                    answer.take(message)
                    if answer.is_complete:
                        return answer.text
        except InvalidStatus as error:
            status = error.response.status_code
            raise _status_failure(status, bytes(error.response.body or b"")) from error
        except (OSError, WebSocketException) as error:
            raise RequestFailure("connection broke", _message(error)) from error
        raise RequestFailure("cut off", "the connection was closed before the answer was complete")

    async def _find_model(self) -> str:
        wanted, url = self.settings.model, self.settings.url
        try:
            response = await self._client.get(
                f"{self.settings.base_url}/models",
                timeout=_CHECK_TIMEOUT_S,
                # Servers close it after a mistake, when the first request may have taken it.
                headers={"connection": "close"},
            )
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ValueError(f"--url {url}: cannot be reached: {_message(error)}") from error
        if response.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise ValueError(
                f"--url {url}: refuses the key; see --api-key: {_body_text(response.content)}"
            )
        names = _names(response)
        if names is None:
            if wanted is None:
                raise ValueError(
                    f"--url {url}: does not list its models (status {response.status_code} for "
                    f"{self.settings.base_url}/models); name one with --model"
                )
            return wanted
        known = ", ".join(names) or "none"
        if wanted is None:
            if len(names) != 1:
                raise ValueError(f"--model: the server has several or none, name one: {known}")
            return names[0]
        if wanted not in names:
            raise ValueError(f"--model: the server has no {wanted!r:.80}; it has {known}")
        return wanted


@cache
def _certificates() -> ssl.SSLContext:
    """The trusted certificates; to read them takes longer than most requests."""
    return httpx2.create_ssl_context()


def _names(response: httpx2.Response) -> list[str] | None:
    """The models that an answer lists; None if it is no list."""
    if response.status_code != HTTPStatus.OK:
        return None
    try:
        return [str(each["id"]) for each in response.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return None


async def _refusal(response: httpx2.Response) -> RequestFailure:
    content = bytearray()
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > _MOST_ERROR_BYTES:
            break
    return _status_failure(response.status_code, bytes(content))


def _status_failure(status: int, content: bytes) -> RequestFailure:
    is_rejection = status == HTTPStatus.TOO_MANY_REQUESTS
    return RequestFailure(f"status {status}", _body_text(content), is_rejection=is_rejection)


def _body_text(content: bytes) -> str:
    try:
        return error_text(json.loads(content))
    except (ValueError, RecursionError):
        return content[:200].decode("utf-8", "replace") or "(an empty answer)"


def _message(error: Exception) -> str:
    return str(error) or type(error).__name__

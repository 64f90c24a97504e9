"""A server with OpenAI's API, ours or another, as what the load is put on."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache, partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self

import httpx2

from omni.commands.bench.answer_events import error_text
from omni.commands.bench.http_call import HttpCall, read_events
from omni.commands.bench.http_settings import HttpSettings
from omni.commands.bench.load_source import Send
from omni.commands.bench.measured_request import RequestFailure
from omni.commands.bench.openai_body import CHAT_PATH, openai_body
from omni.commands.bench.openai_call import openai_call, said_text
from omni.commands.bench.request_timer import RequestTimer

__all__ = ["HttpTarget"]

_CHECK_TIMEOUT_S = 30.0
_IDLE_S = 2.0
"""Connections that were idle for longer are not used again: the other side may just close them."""

_EVENTS = "text/event-stream"
_MOST_ERROR_BYTES = 1 << 16


class HttpTarget:
    """A server, used in ``async with``, which finds out whether it is there.

    Args:
        settings: what to ask, and how.

    Raises:
        ValueError: on entering: the server cannot be reached, does not let us in, or does not have
            the model; names the flag.
    """

    answering_stage: str | None = None

    def __init__(self, settings: HttpSettings) -> None:
        self.settings = settings
        self.model = settings.model or ""
        key = settings.api_key
        self._client = httpx2.AsyncClient(
            headers={} if key is None else {"authorization": f"Bearer {key}"},
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
        """Make a request of a line; see :class:`~omni.commands.bench.load_source.LoadTarget`."""
        endpoint = self.settings.endpoint
        if endpoint == "realtime":
            return self._realtime(said_text(line, endpoint))
        if endpoint in ("chat", "completions"):
            return partial(self._send, self._streamed(line, folder))
        call = openai_call(endpoint, line, folder, self.model, self.settings.voice)
        return partial(self._send, call)

    def _realtime(self, text: str) -> Send:
        try:
            from omni.commands.bench.realtime_call import RealtimeCall
        except ImportError as error:
            raise ValueError(
                f"--endpoint realtime needs a package that is not installed ({error.name}): "
                "pip install -e '.[bench]' in a checkout of omni-pipeline"
            ) from error
        return RealtimeCall(self.settings, self.model, text).send

    def _streamed(self, line: Mapping[str, Any], folder: Path) -> HttpCall:
        """A chat, or completions, as the line says."""
        body = openai_body(line, folder)
        fields: dict[str, Any] = {**body.fields, "model": self.model, "stream": True}
        fields["stream_options"] = {"include_usage": True}
        if body.path == CHAT_PATH and self.settings.speech:
            fields.setdefault("modalities", ["text", "audio"])
        if "audio" in fields.get("modalities", ()):
            voice = {} if self.settings.voice is None else {"voice": self.settings.voice}
            fields["audio"] = {**voice, **fields.get("audio", {}), "format": "pcm16"}
        elif "audio" in fields:  # a voice, but nothing is to be said
            del fields["audio"]
        content = json.dumps(fields).encode()
        return HttpCall(body.path, content, "application/json", _EVENTS, read_events)

    async def reset_caches(self) -> None:
        """Nothing: no API does that. Requests that are made up do not hit those of other levels."""

    async def _send(self, call: HttpCall, timer: RequestTimer) -> str:
        request = self._client.build_request(
            "POST",
            self.settings.base_url + call.path,
            content=call.content,
            headers={"content-type": call.content_type, "accept": call.accept},
        )
        timer.send()
        async with self._answer(request, call.answer_type) as response:
            return await call.read(response.aiter_bytes(), timer)

    @asynccontextmanager
    async def _answer(
        self, request: httpx2.Request, answer_type: str
    ) -> AsyncIterator[httpx2.Response]:
        """An answer of a type; what is none, or breaks, is a failure of its kind."""
        try:
            response = await self._client.send(request, stream=True)
            try:
                if response.status_code != HTTPStatus.OK:
                    raise await _refusal(response)
                kind = response.headers.get("content-type", "")
                if not kind.startswith(answer_type):
                    what = "not streamed" if answer_type == _EVENTS else f"not {answer_type}"
                    raise RequestFailure("no stream", f"the answer is {kind!r:.80}, {what}")
                yield response
            finally:
                await response.aclose()
        except httpx2.ConnectError as error:
            raise RequestFailure("no connection", _told(error)) from error
        except httpx2.TimeoutException as error:
            raise RequestFailure("timeout", _told(error)) from error
        except (httpx2.TransportError, httpx2.StreamError) as error:
            raise RequestFailure("connection broke", _told(error)) from error

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
            raise ValueError(f"--url {url}: cannot be reached: {_told(error)}") from error
        if response.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            told = _body_text(response.content)
            raise ValueError(f"--url {url}: does not let us in; see --api-key: {told}")
        names = _names(response)
        if names is None:
            if wanted is None:
                raise ValueError(
                    f"--url {url}: does not tell its models (status {response.status_code} for "
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
    """Whom to trust; to read them takes longer than most requests."""
    return httpx2.create_ssl_context()


def _names(response: httpx2.Response) -> list[str] | None:
    """The models that are told; None if the answer does not tell any."""
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
    status = response.status_code
    return RequestFailure(
        f"status {status}",
        _body_text(bytes(content)),
        is_rejection=status == HTTPStatus.TOO_MANY_REQUESTS,
    )


def _body_text(content: bytes) -> str:
    try:
        return error_text(json.loads(content))
    except (ValueError, RecursionError):
        return content[:200].decode("utf-8", "replace") or "(an empty answer)"


def _told(error: Exception) -> str:
    return str(error) or type(error).__name__

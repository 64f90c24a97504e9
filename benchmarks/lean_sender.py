"""A minimal HTTP sender, whose own delay does not distort measurements of the server.

A client library needs some milliseconds of CPU per request. At hundreds per second that is a whole
core, and on a machine with two cores half of the server's.
"""

from __future__ import annotations

import asyncio
import json
import re
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from omni.commands.bench.http_target import AnswerEvents
from omni.commands.bench.load import MeasuredRequest, RequestFailure, Send

_STATUS = re.compile(rb"HTTP/1\.1 (\d+)")


class LeanSender:
    """Sends requests with streamed answers, each on a separate connection.

    Args:
        url: URL of the server; its host is an address, not a name.
    """

    def __init__(self, url: str) -> None:
        where = urlsplit(url)
        assert where.hostname is not None and where.port is not None
        self._host, self._port = where.hostname, where.port

    def prepare(self, path: str, body: dict[str, Any]) -> Send:
        """Prepare a request that can be sent any number of times."""
        content = json.dumps({**body, "stream": True}).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        return partial(self._send, head.encode() + content)

    async def _send(self, request: bytes, record: MeasuredRequest) -> str:
        loop = asyncio.get_running_loop()
        answer = _Answer(request, record, loop.create_future())
        record.send()
        try:
            transport, _ = await loop.create_connection(lambda: answer, self._host, self._port)
        except OSError as error:
            raise RequestFailure("no connection", str(error)) from error
        try:
            return await answer.text
        finally:
            transport.abort()


class _Answer(asyncio.Protocol):
    """Reads a streamed answer as it arrives; any other status than 200 is a failure."""

    def __init__(self, request: bytes, record: MeasuredRequest, text: asyncio.Future[str]) -> None:
        self.text = text
        self._request = request
        self._record = record
        self._received = b""
        self._events: AnswerEvents | None = None
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._events is not None:
            self._read(data)
            return
        self._received += data
        head, end, rest = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        if (status := int(_STATUS.match(head)[1])) != 200:  # type: ignore[index]
            is_rejection = status == 429
            told = rest.decode("utf-8", "replace")
            self._end(RequestFailure(f"status {status}", told, is_rejection=is_rejection))
            return
        self._events = AnswerEvents(self._record)
        self._read(rest)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(RequestFailure("cut off", f"the connection ended: {error}"))

    def _read(self, data: bytes) -> None:
        """Read the events; chunk lengths are on separate lines, which are not event fields."""
        assert self._events is not None
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            for line in lines:
                if line.startswith(b"data: "):
                    self._events.take(line.removeprefix(b"data: ").decode())
        except RequestFailure as error:
            self._end(error)
        if self._events.is_complete and not self.text.done():
            self.text.set_result(self._events.text)

    def _end(self, error: Exception) -> None:
        if not self.text.done():
            self.text.set_exception(error)

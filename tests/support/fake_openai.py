"""A server with OpenAI's API whose answers a test scripts piece by piece."""

from __future__ import annotations

import asyncio
import json
import threading
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from tests.support.patience import PATIENCE_S


class Break(Exception):
    """Raised by a script to close the connection in the middle."""


class FakeOpenAI:
    """Listens on a free port in the running event loop.

    Args:
        answer: given a request's path and body, yields the pieces of its stream: events as
            objects, or raw bytes. It may wait in between, and raise :class:`Break`.
        models: ids that it lists; with None the address does not exist.

    Attributes:
        status: of the answers; statuses other than 200 send ``error`` instead of a stream.
        error: body of such an answer.
        content_type: of the streams.
        requests: path, headers and body of every generation request.
    """

    def __init__(
        self,
        answer: Callable[[str, Any], AsyncIterator[Any]] | None = None,
        models: list[str] | None = ["fake"],  # noqa: B006 - never mutated
    ) -> None:
        self._answer = answer
        self._models = models
        self.status = 200
        self.error: Any = {"error": {"message": "as it was told to", "type": "x", "code": "y"}}
        self.content_type = "text/event-stream; charset=utf-8"
        self.requests: list[tuple[str, dict[str, str], Any]] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            method, path, _ = head[0].split(" ")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            if method == "GET":
                self._tell_models(writer, path)
            else:
                self.requests.append((path, headers, json.loads(body)))
                await self._tell(writer, path, json.loads(body))
            await writer.drain()
        except (Break, ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def _tell_models(self, writer: asyncio.StreamWriter, path: str) -> None:
        if self.status in (401, 403):
            _whole(writer, self.status, self.error)
        elif self._models is None or path != "/v1/models":
            _whole(writer, 404, {"detail": "Not Found"})
        else:
            data = [{"id": each, "object": "model"} for each in self._models]
            _whole(writer, 200, {"object": "list", "data": data})

    async def _tell(self, writer: asyncio.StreamWriter, path: str, body: Any) -> None:
        if self.status != 200:
            _whole(writer, self.status, self.error)
            return
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {self.content_type}\r\nconnection: close\r\n"
        writer.write(head.encode() + b"transfer-encoding: chunked\r\n\r\n")
        assert self._answer is not None
        async for piece in self._answer(path, body):
            data = piece if isinstance(piece, bytes) else _event(piece)
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
            await writer.drain()
        writer.write(b"0\r\n\r\n")


def _event(content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def _whole(writer: asyncio.StreamWriter, status: int, content: Any) -> None:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)


def chat_piece(text: str | None, **delta: Any) -> dict[str, Any]:
    """Return a delta of a chat's answer."""
    choice = {"index": 0, "delta": {"content": text, **delta}, "finish_reason": None}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "fake",
            "choices": [choice]}  # fmt: skip


def audio_piece(num_samples: int, rate: int | None = None) -> dict[str, Any]:
    """Return a piece of audio."""
    audio = {"id": "a", "data": b64encode(bytes(2 * num_samples)).decode()}
    return chat_piece(None, audio=audio | ({"sampling_rate": rate} if rate else {}))


def completion_piece(text: str) -> dict[str, Any]:
    """Return a delta of a completion."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
    return {"id": "c", "object": "text_completion", "created": 1, "model": "fake",
            "choices": [choice]}  # fmt: skip


def usage_piece(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    """Return the last event before ``[DONE]``, with all counts."""
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "fake",
            "choices": [], "usage": usage}  # fmt: skip


@contextmanager
def in_thread(server: FakeOpenAI) -> Iterator[FakeOpenAI]:
    """Run the server in a thread, for clients with their own event loop."""
    started, ended = threading.Event(), threading.Event()

    async def serve() -> None:
        async with server:
            started.set()
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=asyncio.run, args=[serve()], daemon=True)
    thread.start()
    assert started.wait(PATIENCE_S)
    try:
        yield server
    finally:
        ended.set()
        thread.join(PATIENCE_S)

"""Answers that end with their client: what still runs for one that has gone is given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from engine.interface.log_fields import package_logger
from omni.server.serving.api_error import ApiError

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

__all__ = [
    "DIRECT_SEND",
    "DONE",
    "EventStream",
    "LastPiece",
    "LiveResponse",
    "LiveStream",
    "while_connected",
]

_logger = package_logger(__name__)

DIRECT_SEND = "omni.direct_send"
"""Key of a scope, under which the door leaves the ``send`` that it got. Between it and an answer
stand four more, that look at how an answer begins, and pass each of its pieces on."""


DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""


class LastPiece(bytes):
    """One that no other follows: it and the answer's end are sent in one call of the system, each
    of which wakes the client."""


class LiveResponse(Response):
    """Works for an answer while its client is there, and no longer than a time.

    Args:
        work: makes the answer; cancelled when the client goes or time is up.
        timeout_s: of the work.
    """

    def __init__(self, work: Coroutine[Any, Any, Response], timeout_s: float) -> None:
        super().__init__()
        self._work = work
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Work, and send what comes of it."""
        response = await while_connected(self._work, receive, self._timeout_s)
        if response is not None:
            await response(scope, receive, send)


class LiveStream(Response):
    """An answer in pieces. What fails before the first one is answered with a status of its own.

    Args:
        pieces: closed when the client goes or time is up, and after a :class:`LastPiece`, which
            may be missing.
        timeout_s: of all of them.
        media_type: what they are.
    """

    def __init__(self, pieces: AsyncIterator[bytes], timeout_s: float, media_type: str) -> None:
        # Proxies that gather what they pass on would hold text back.
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._pieces = pieces
        self._timeout_s = timeout_s
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send pieces as they come."""
        try:
            direct: Send = scope.get(DIRECT_SEND, send)
            await while_connected(self._send(send, direct), receive, self._timeout_s)
        except ApiError as error:
            if not self._has_begun:
                raise
            await self._end(send, error)
        except Exception:  # too late for a status: what has begun ends with an error that is told
            if not self._has_begun:
                raise
            _logger.exception("a stream broke")
            await self._end(
                send, ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "the server made a mistake")
            )

    async def _send(self, send: Send, direct: Send) -> None:
        last = b""
        async with aclosing(self._pieces) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                await self._begin(send)
                if isinstance(piece, LastPiece):
                    last = piece
                    break
                await direct({"type": "http.response.body", "body": piece, "more_body": True})
        await self._begin(send)  # if there was no piece at all
        # After the pieces are closed: once an answer has ended its client counts as gone, which
        # would cancel their closing, and a failure could not be told any more.
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _begin(self, send: Send) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )

    async def _end(self, send: Send, error: ApiError) -> None:
        """Break off: without the last piece, the client knows that some are missing."""
        _logger.info("a stream was broken off: %s", error)


class EventStream(LiveStream):
    """Server-sent events; an error after the first one is an event too.

    Args:
        events: each with its line feeds; closed when the client goes or time is up.
        timeout_s: of all of them.
    """

    def __init__(self, events: AsyncIterator[bytes], timeout_s: float) -> None:
        super().__init__(events, timeout_s, "text/event-stream")

    async def _end(self, send: Send, error: ApiError) -> None:
        body = b"data: " + error.to_json() + b"\n\n"
        await send({"type": "http.response.body", "body": body, "more_body": False})


async def while_connected(
    work: Coroutine[Any, Any, Any], receive: Receive, timeout_s: float
) -> Any:
    """Await work until its client disconnects.

    Args:
        work: cancelled, and waited for, when the client goes or time is up.
        receive: of the request; its body has been read.
        timeout_s: after which it is enough.

    Returns:
        The work's result; None if the client has gone.

    Raises:
        ApiError: with status 504: time is up; with 503: the server ends without waiting for it.
        Exception: whatever the work raises.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        done, _ = await asyncio.wait(
            (task, gone), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if task in done:
            return task.result()
        if gone in done:
            return None
        raise ApiError(
            HTTPStatus.GATEWAY_TIMEOUT,
            f"the request was not done after {timeout_s:g} s, the server's limit, and was aborted",
            code="timeout",
            # Clients try again by themselves, which would take as long.
            headers={"x-should-retry": "false"},
        )
    except asyncio.CancelledError:  # nothing but the server's end cancels what answers
        raise ApiError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "the server was stopped before the request was done",
            code="stopping",
        ) from None
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

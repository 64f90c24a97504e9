"""Responses that pipelines make, each for as long as its client is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.interface.log_fields import package_logger
from omni.requests.request import OmniRequest
from omni.server.serving.api_error import ApiError
from omni.server.serving.client import Client
from omni.server.serving.pipeline_server import PipelineServer
from omni.server.serving.response_stream import ResponseStream

_logger = package_logger(__name__)

EVENTS = "text/event-stream"

DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""


def event(content: bytes) -> bytes:
    """Write a server-sent event."""
    return b"data: " + content + b"\n\n"


class PipelineResponse(Response):
    """A response by one pipeline, in one piece or piece by piece; subclasses say which and how.

    Work for it ends when its client goes or its time is up. What fails before the first piece is
    answered with a status of its own; a failure after that is an event in a stream of events, and
    breaks off any other, so that its client knows that some is missing. Making one raises an
    :class:`ApiError` where it cannot run as the client wants.

    Sends :meth:`pieces` of a media type if it ``is_streamed``, else :meth:`whole`.
    """

    prompt_param: ClassVar[str] = "prompt"
    """The field in which clients send the prompt."""

    def __init__(
        self,
        request: Request,
        model: str,
        *,
        is_streamed: bool = False,
        media_type: str = EVENTS,
    ) -> None:
        # Proxies that gather what they pass on would hold text back.
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self.server: PipelineServer = request.state.server
        self.client: Client = request.state.client
        self.pipeline = self.server.find(model)
        self.stages = self.pipeline.omni.pipeline
        self._is_streamed = is_streamed
        self._has_begun = False

    def stream(self, requests: Sequence[OmniRequest], stages: Sequence[str] = ()) -> ResponseStream:
        """Run requests on the pipeline; see :class:`ResponseStream`."""
        return ResponseStream(self.pipeline, self.client, requests, self.prompt_param, stages)

    async def whole(self) -> Response:
        """Make the response in one piece."""
        raise NotImplementedError

    def pieces(self) -> AsyncIterator[bytes]:
        """Make the response piece by piece; an async generator."""
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Make the response and send it."""
        timeout_s = self.server.settings.limits.request_timeout_s
        if not self._is_streamed:
            response = await while_connected(self.whole(), receive, timeout_s)
            if response is not None:
                await response(scope, receive, send)
            return
        try:
            await while_connected(self._send_pieces(send), receive, timeout_s)
        except Exception as error:  # a status cannot be sent any more
            if not self._has_begun:
                raise
            if isinstance(error, ApiError):
                _logger.info("a stream was broken off: %s", error)
            else:
                _logger.exception("a stream broke")
                error = ApiError.internal()
            if self.media_type == EVENTS:
                await self._send(send, event(error.to_json()), more=False)

    async def _send_pieces(self, send: Send) -> None:
        async with aclosing(self.pieces()) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                await self._send(send, piece, more=True)
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, body: bytes, *, more: bool) -> None:
        if not self._has_begun:
            self._has_begun = True
            headers = self.raw_headers
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": more})


async def while_connected(
    work: Coroutine[Any, Any, Any], receive: Receive, timeout_s: float
) -> Any:
    """Await work, and cancel it when its client disconnects or time is up.

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
    except asyncio.CancelledError:  # only the end of the server cancels a response
        raise ApiError.unavailable(
            "the server was stopped before the request was done", "stopping"
        ) from None
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

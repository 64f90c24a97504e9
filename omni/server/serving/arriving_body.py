"""The body of a request, which may still be on its way when the answer is sent."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING

from omni.server.serving.api_error import ApiError

if TYPE_CHECKING:
    from starlette.datastructures import Headers
    from starlette.types import Message, Receive

__all__ = ["ArrivingBody"]

_REST_S = 5.0
"""Seconds for which the rest of a body may come after the answer; nginx waits as long for more."""


class ArrivingBody:
    """Passes a body on until it is too long, whatever its header said.

    A connection that is closed while something sent to it is unread is reset, and what was
    answered may be lost with it: the client learns nothing but that. So the rest of what is
    refused unread is let in, and dropped, before its connection may be closed ::

        client   head | the body ............................. | reads "413"
        server         | "413" | drops the rest of the body    | closes

    Args:
        receive: where the body comes from.
        headers: of the request.
        max_bytes: that may come.
    """

    def __init__(self, receive: Receive, headers: Headers, max_bytes: int) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._announced = headers.get("content-length", "0")
        self._is_coming = self._announced != "0" or "transfer-encoding" in headers

    @property
    def is_coming(self) -> bool:
        """Whether some of it has not been received, from a client that is there."""
        return self._is_coming

    def check_length(self) -> None:
        """Refuse what says that it is too long.

        Raises:
            ApiError: with status 413.
        """
        if not self._announced.isdecimal() or int(self._announced) > self._max_bytes:
            raise self._too_large()

    async def receive(self) -> Message:
        """The next part of it, or that the client has gone.

        Raises:
            ApiError: with status 413: more has come than may come.
        """
        message = await self._next()
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._max_bytes:
            raise self._too_large()
        return message

    async def drop_rest(self) -> None:
        """Let in what still comes, and keep nothing of it; not for long."""
        try:
            async with asyncio.timeout(_REST_S):
                while self._is_coming:
                    await self._next()
        except TimeoutError:  # whoever takes so long does without
            pass

    async def _next(self) -> Message:
        message = await self._receive()
        self._is_coming = message["type"] == "http.request" and message.get("more_body", False)
        return message

    def _too_large(self) -> ApiError:
        return ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body is larger than {self._max_bytes} bytes, the server's limit",
            code="body_too_large",
        )

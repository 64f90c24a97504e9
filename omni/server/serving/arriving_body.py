"""The body of a request, which may still be on its way when the answer is sent."""

from __future__ import annotations

import asyncio
import time
from http import HTTPStatus
from typing import TYPE_CHECKING

from omni.server.serving.api_error import ApiError

if TYPE_CHECKING:
    from starlette.datastructures import Headers
    from starlette.types import Message, Receive

    from omni.server.serving.settings import ServerLimits

__all__ = ["ArrivingBodies", "ArrivingBody"]

_REST_S = 5.0
"""Seconds for which the rest of a body may come after the answer; nginx waits as long for more."""

_UNCOUNTED = 1 << 16
"""Bytes of each body that others' large ones take no room from."""

_RETRY_S = 5


class ArrivingBodies:
    """How much of all bodies is held that nobody has read yet.

    Args:
        limits: of the server.

    Attributes:
        limits: as given.
        num_bytes: held now, of the larger ones.
    """

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Hold more.

        Raises:
            ApiError: with status 429: there is no room for it.
        """
        most = self.limits.max_arriving_bytes
        if num_bytes and self.num_bytes + num_bytes > most:
            raise ApiError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"bodies of {most} bytes are being sent already, as much as this server takes at "
                "once; try again later",
                code="bodies_full",
                headers={"Retry-After": str(_RETRY_S)},
            )
        self.num_bytes += num_bytes


class ArrivingBody:
    """Passes a body on until it is too long, whatever its header said.

    A connection that is closed while something sent to it is unread is reset, and what was
    answered may be lost with it: the client learns nothing but that. So the rest of what is
    refused unread is let in for a while, and dropped, before its connection may be closed ::

        client   head | the body ............................. | reads "413"
        server         | "413" | drops the rest of the body    | closes

    What has come counts among all that is held until its reader asks for what follows it, which is
    that the client has gone: by then it has been made into a request, or refused.

    Args:
        receive: where the body comes from.
        headers: of the request.
        others: that come at the same time.
    """

    def __init__(self, receive: Receive, headers: Headers, others: ArrivingBodies) -> None:
        self._receive = receive
        self._others = others
        self._limits = others.limits
        self._end = time.monotonic() + self._limits.max_arriving_s
        self._num_bytes = 0
        self._num_held = 0
        self._announced = headers.get("content-length", "0")
        self._is_coming = self._announced != "0" or "transfer-encoding" in headers
        self._is_waiting = "expect" in headers

    @property
    def is_coming(self) -> bool:
        """Whether some of it has not been received, from a client that is there."""
        return self._is_coming

    def check_length(self) -> None:
        """Refuse what says that it is too long.

        Raises:
            ApiError: with status 413.
        """
        most = self._limits.max_body_bytes
        if not self._announced.isdecimal() or int(self._announced) > most:
            raise self._too_large()

    async def receive(self) -> Message:
        """The next part of it, or that the client has gone.

        Raises:
            ApiError: with status 413: more has come than may come; with 408: it stands still, or
                takes too long; with 429: too much comes from all clients together.
        """
        if not self._is_coming:  # who waits for more than all of it has read it
            self.let_go()
            return await self._next()
        message = await self._next_in_time()
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._limits.max_body_bytes:
            raise self._too_large()
        more = max(self._num_bytes - _UNCOUNTED, 0) - self._num_held
        self._others.take(more)
        self._num_held += more
        return message

    def let_go(self) -> None:
        """It is not held any more. May be called again."""
        self._others.num_bytes -= self._num_held
        self._num_held = 0

    async def drop_rest(self) -> None:
        """Let in what still comes, and keep nothing of it; not for long."""
        self.let_go()
        if self._is_waiting:  # to be told to go on: that is not told now, so nothing comes
            return
        try:
            async with asyncio.timeout(_REST_S):
                while self._is_coming:
                    await self._next()
        except TimeoutError:  # whoever takes so long does without
            pass

    async def _next_in_time(self) -> Message:
        quiet_s = self._limits.body_timeout_s
        left_s = self._end - time.monotonic()
        try:
            async with asyncio.timeout(min(quiet_s, left_s)):
                return await self._next()
        except TimeoutError:
            what = f"nothing of the body came for {quiet_s:g} s"
            if left_s < quiet_s:
                what = f"the body had not come after {self._limits.max_arriving_s:g} s"
            raise ApiError(
                HTTPStatus.REQUEST_TIMEOUT,
                f"{what}, the server's limit",
                code="timeout",
                headers={"Connection": "close"},
            ) from None

    async def _next(self) -> Message:
        self._is_waiting = False
        message = await self._receive()
        self._is_coming = message["type"] == "http.request" and message.get("more_body", False)
        return message

    def _too_large(self) -> ApiError:
        return ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body is larger than {self._limits.max_body_bytes} bytes, the server's limit",
            code="body_too_large",
        )

"""Request guard: checks API keys, origins and sizes, assigns ids, limits bodies as they arrive.

Converts errors of the routes to responses, and logs one line per request. A body may still be
arriving when an error response is sent: its rest is read, so that the response gets through.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
import uuid
from dataclasses import replace
from functools import lru_cache
from http import HTTPStatus
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.interface.log_fields import package_logger
from omni.server.serving.api_error import ApiError
from omni.server.serving.client import Client
from omni.server.serving.pipeline_server import PipelineServer
from omni.server.serving.settings import ServerLimits

_DRAIN_TIMEOUT_S = 5.0
"""Timeout for the rest of a body after the response; nginx waits as long for more data."""

_UNCOUNTED_BYTES = 1 << 16
"""Bytes of each body that do not count towards the limit shared by all bodies."""

_RETRY_AFTER_S = 5


class ArrivingBodies:
    """Counter of the bytes of large bodies that are buffered but not yet parsed."""

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self.num_bytes = 0

    def reserve(self, num_bytes: int) -> None:
        """Reserve more bytes; raise an error with status 429 if the limit is exceeded."""
        most = self.limits.max_arriving_bytes
        if num_bytes and self.num_bytes + num_bytes > most:
            raise ApiError.too_many(
                f"bodies of {most} bytes are being sent already, as much as this server takes at "
                "once; try again later",
                "bodies_full",
                _RETRY_AFTER_S,
            )
        self.num_bytes += num_bytes


class ArrivingBody:
    """Forwards a body up to the size limit, whatever its Content-Length header claims.

    Closing a connection with unread data resets it, and the response may be lost: the client sees
    only the reset. The rest of a refused body is therefore read and dropped for a while before its
    connection is closed ::

        client   head | the body ............................. | reads "413"
        server         | "413" | drops the rest of the body    | closes

    Received bytes count towards the shared limit until the reader waits for the disconnect that
    follows the body: by then it has been parsed into a request, or refused.
    """

    def __init__(self, receive: Receive, headers: Headers, others: ArrivingBodies) -> None:
        self._receive = receive
        self._others = others
        self._limits = others.limits
        self._end = time.monotonic() + self._limits.max_arriving_s
        self._num_bytes = 0
        self._num_held = 0
        self._announced = headers.get("content-length", "0")
        # True while part of the body is outstanding and the client is connected.
        self.is_incomplete = self._announced != "0" or "transfer-encoding" in headers
        self._awaits_continue = "expect" in headers

    def check_length(self) -> None:
        """Refuse with status 413 a body whose announced length is invalid or over the limit."""
        most = self._limits.max_body_bytes
        if not self._announced.isdecimal() or int(self._announced) > most:
            raise self._too_large()

    async def receive(self) -> Message:
        """Return the next part of the body, or the disconnect of the client.

        Raises:
            ApiError: with status 413 if the body is too large; with 408 if it stalls or takes too
                long; with 429 if the bodies of all clients together are too large.
        """
        if not self.is_incomplete:  # a reader that waits for more has read the whole body
            self.release()
            return await self._next()
        message = await self._next_with_timeout()
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._limits.max_body_bytes:
            raise self._too_large()
        more = max(self._num_bytes - _UNCOUNTED_BYTES, 0) - self._num_held
        self._others.reserve(more)
        self._num_held += more
        return message

    def release(self) -> None:
        """Release the reserved bytes. Idempotent."""
        self._others.num_bytes -= self._num_held
        self._num_held = 0

    async def drop_rest(self) -> None:
        """Read and discard the rest of the body, for a limited time."""
        self.release()
        if self._awaits_continue:  # for "100 Continue", which will not be sent
            return
        try:
            async with asyncio.timeout(_DRAIN_TIMEOUT_S):
                while self.is_incomplete:
                    await self._next()
        except TimeoutError:  # a client this slow may lose the response
            pass

    async def _next_with_timeout(self) -> Message:
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
        self._awaits_continue = False
        message = await self._receive()
        self.is_incomplete = message["type"] == "http.request" and message.get("more_body", False)
        return message

    def _too_large(self) -> ApiError:
        return ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body is larger than {self._limits.max_body_bytes} bytes, the server's limit",
            code="body_too_large",
        )


_logger = package_logger(__name__)

_OPEN_PATHS = frozenset({"/", "/docs", "/openapi.json", "/health"})
"""Paths without authentication: pages without clients' data, and the health check."""

_PROTOCOL_PREFIX = "openai-insecure-api-key."
"""Subprotocol prefix of a key sent by a browser, which cannot set headers of a WebSocket."""

_POLICY_VIOLATION = 1008


class Guard:
    """The server's ASGI application: admits requests and sends error responses.

    Routes read ``server`` and ``client`` from the state of their scope, and raise an
    :class:`ApiError` to refuse a request. One that they have sent themselves they store in the
    state as ``refusal``.
    """

    def __init__(self, app: ASGIApp, server: PipelineServer) -> None:
        settings = server.settings
        self._app = app
        self._server = server
        self._keys = [
            hashlib.sha256(key.get_secret_value().encode()).digest() for key in settings.api_keys
        ]
        self._bodies = ArrivingBodies(settings.limits)
        self._origins = frozenset(_origin(each) for each in settings.allow_origins)
        # DNS rebinding: a web page can reach a local server by a host name that resolves to it.
        self._is_local_only = not settings.api_keys and _is_local(settings.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        scope["app"] = self  # makes Starlette's router raise its errors, which are handled here
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        client = Client(uuid.uuid4().hex, None, headers.get("traceparent"))
        body = ArrivingBody(receive, headers, self._bodies)
        answer = _Answer(send, body, client.request_id, self._allowed_origin(headers))
        state = scope.setdefault("state", {})
        try:
            self._check_origin(headers)
            method = scope.get("method")
            if method == "OPTIONS" and "access-control-request-method" in headers:
                await _PREFLIGHT(scope, receive, answer.send)
                return
            client = replace(client, tenant=self._tenant(scope["path"], headers))
            body.check_length()
            # A POST runs something. Under overload, a refused request must cost running ones
            # nothing, so its body is not even read.
            if method == "POST":
                self._server.check_room(client)
            state["server"], state["client"] = self._server, client
            is_http = scope["type"] == "http"
            await self._app(scope, body.receive if is_http else receive, answer.send)
        except Exception as error:  # sent to the client, or logged
            if answer.has_begun:  # too late for an error response
                raise
            state["refusal"] = refusal = _as_api_error(error, scope)
            await _refuse(refusal, scope, receive, answer.send)
        finally:
            body.release()
            ended: ApiError | None = state.get("refusal")
            answer.log(scope, ended)
            if ended is not None and not ended.is_recorded:
                self._trace_refusal(scope, client, ended, answer.took_s)

    def _trace_refusal(
        self, scope: Scope, client: Client, refusal: ApiError, took_s: float
    ) -> None:
        """Create a span for a request refused before it got a record of its pipeline."""
        spans, method = self._server.meters.spans, scope.get("method", "WebSocket")
        if spans is None or method not in ("POST", "WebSocket"):  # others run nothing
            return
        attributes: dict[str, str | int] = {
            "omni.request_id": client.request_id,
            "http.response.status_code": int(refusal.status),
            "url.path": scope["path"],
            "error.type": refusal.code or refusal.kind,
        }
        # Unknown paths are not span names: their number is unbounded.
        name = f"{method} {scope['path']}" if "endpoint" in scope else method
        spans.add_refused(name, client.traceparent, attributes, took_s)

    def _tenant(self, path: str, headers: Headers) -> str | None:
        """Check the API key, if one is required, and return its tenant.

        Compares in constant time, and always with all keys.
        """
        if not self._keys or path in _OPEN_PATHS:
            return None
        given = _given_key(headers)
        message = "this server wants an API key: send it as Authorization: Bearer KEY"
        if given is not None:
            digest = hashlib.sha256(given.encode("utf-8", "surrogatepass")).digest()
            if any([hmac.compare_digest(digest, known) for known in self._keys]):
                # Hashed again: the tenant must not be usable as a digest of the key.
                return hashlib.sha256(b"tenant" + digest).hexdigest()[:32]
            message = "the API key is wrong"
        raise ApiError(
            HTTPStatus.UNAUTHORIZED,
            message,
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _check_origin(self, headers: Headers) -> None:
        host = headers.get("host", "")
        if self._is_local_only and not _has_local_name(host):
            raise ApiError(
                HTTPStatus.FORBIDDEN,
                f"this server is for its own machine, and answers to its local names only, not to "
                f"{host!r:.80}; with --host or --api-key it answers to others",
            )
        origin = headers.get("origin")
        if origin is None or _origin(origin) in self._origins:
            return
        if _origin(origin).partition("://")[2] != host.lower():
            raise ApiError(
                HTTPStatus.FORBIDDEN,
                f"web pages of {origin!r:.80} may not ask this server; --allow-origin lets them",
            )

    def _allowed_origin(self, headers: Headers) -> str | None:
        origin = headers.get("origin")
        return origin if origin is not None and _origin(origin) in self._origins else None


_PREFLIGHT = Response(
    status_code=HTTPStatus.NO_CONTENT,
    headers={
        "access-control-allow-methods": "GET, POST, DELETE",
        "access-control-allow-headers": "authorization, content-type",
        "access-control-max-age": "600",
    },
)


class _Answer:
    """Adds the request id to a response, and collects what to log.

    The response ends once the whole request has arrived, or is no longer waited for. ``has_begun``
    is true once any part of the response was sent.
    """

    def __init__(self, send: Send, body: ArrivingBody, request_id: str, origin: str | None) -> None:
        self._send = send
        self._body = body
        self._request_id = request_id
        self._origin = origin
        self._status: int | None = None
        self._began_s = time.monotonic()
        self._ended_s: float | None = None
        self.has_begun = False

    @property
    def took_s(self) -> float:
        """Seconds until the response ended, or until now."""
        return (self._ended_s or time.monotonic()) - self._began_s

    async def send(self, message: Message) -> None:
        self.has_begun = True
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self._request_id
            headers["x-content-type-options"] = "nosniff"
            if self._origin is not None:
                headers["access-control-allow-origin"] = self._origin
                headers.add_vary_header("Origin")
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self._ended_s = time.monotonic()
            if self._body.is_incomplete:
                await self._send({**message, "more_body": True})
                await self._body.drop_rest()
                message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    def log(self, scope: Scope, refusal: ApiError | None) -> None:
        # As repr: a path, or text quoted by an error, may look like another log line.
        _logger.log(
            logging.INFO if refusal is None else logging.WARNING,
            "%s %s %r: %s, %.3f s%s",
            self._request_id,
            scope.get("method", "WebSocket"),
            scope["path"],
            self._status if self._status is not None else "closed",
            self.took_s,
            f": {refusal.message!r:.500}" if refusal is not None else "",
        )


def _as_api_error(error: Exception, scope: Scope) -> ApiError:
    match error:
        case ApiError():
            return error
        case HTTPException():
            message = f"{scope.get('method')} {scope['path']!r:.80}: {error.detail}"
            return ApiError(HTTPStatus(error.status_code), message, headers=error.headers)
        case ClientDisconnect():
            return ApiError.bad_request("the client left before all of its request had come")
    _logger.error("a request broke", exc_info=error)
    return ApiError.internal()


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send(
            {"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": error.message[:120]}
        )
        return
    response = Response(
        error.to_json(), error.status, headers=error.headers, media_type="application/json"
    )
    await response(scope, receive, send)


def _given_key(headers: Headers) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    for protocol in headers.get("sec-websocket-protocol", "").split(","):
        if protocol.strip().startswith(_PROTOCOL_PREFIX):
            return protocol.strip().removeprefix(_PROTOCOL_PREFIX)
    return None


def _origin(text: str) -> str:
    return text.strip().rstrip("/").lower()


@lru_cache(maxsize=64)
def _has_local_name(host: str) -> bool:
    try:
        return _is_local(urlsplit(f"//{host}").hostname or "")
    except ValueError:  # not a valid host
        return False


def _is_local(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"

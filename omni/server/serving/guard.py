"""Admits requests: checks keys, origins and sizes, gives ids, bounds bodies as they arrive.

Errors of whatever is behind it become answers here, and every request a line of the log. A body may
still be arriving when a refusal is sent: its rest is read, so that the answer arrives.
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

_REST_S = 5.0
"""Seconds for which the rest of a body may come after the answer; nginx waits as long for more."""

_UNCOUNTED = 1 << 16
"""Bytes of each body that others' large ones take no room from."""

_RETRY_S = 5


class ArrivingBodies:
    """Counts the bytes of larger bodies that are held unread."""

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Hold more; an error with status 429 if there is no room for it."""
        most = self.limits.max_arriving_bytes
        if num_bytes and self.num_bytes + num_bytes > most:
            raise ApiError.too_many(
                f"bodies of {most} bytes are being sent already, as much as this server takes at "
                "once; try again later",
                "bodies_full",
                _RETRY_S,
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
    """

    def __init__(self, receive: Receive, headers: Headers, others: ArrivingBodies) -> None:
        self._receive = receive
        self._others = others
        self._limits = others.limits
        self._end = time.monotonic() + self._limits.max_arriving_s
        self._num_bytes = 0
        self._num_held = 0
        self._announced = headers.get("content-length", "0")
        # Whether some of it has not been received, from a client that is there.
        self.is_coming = self._announced != "0" or "transfer-encoding" in headers
        self._is_waiting = "expect" in headers

    def check_length(self) -> None:
        """Refuse with status 413 what says that it is too long."""
        most = self._limits.max_body_bytes
        if not self._announced.isdecimal() or int(self._announced) > most:
            raise self._too_large()

    async def receive(self) -> Message:
        """Return the next part of it, or that the client has gone.

        Raises:
            ApiError: with status 413: more has come than may come; with 408: it stands still, or
                takes too long; with 429: too much comes from all clients together.
        """
        if not self.is_coming:  # who waits for more than all of it has read it
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
        """Stop holding it. May be called again."""
        self._others.num_bytes -= self._num_held
        self._num_held = 0

    async def drop_rest(self) -> None:
        """Let in what still comes, and keep nothing of it; not for long."""
        self.let_go()
        if self._is_waiting:  # to be sent "100 Continue", which is not sent now
            return
        try:
            async with asyncio.timeout(_REST_S):
                while self.is_coming:
                    await self._next()
        except TimeoutError:  # a client that takes so long does without
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
        self.is_coming = message["type"] == "http.request" and message.get("more_body", False)
        return message

    def _too_large(self) -> ApiError:
        return ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body is larger than {self._limits.max_body_bytes} bytes, the server's limit",
            code="body_too_large",
        )


_logger = package_logger(__name__)

_OPEN_PATHS = frozenset({"/", "/docs", "/openapi.json", "/health"})
"""For everybody: pages without anybody's data, and whether the server is well."""

_PROTOCOL_PREFIX = "openai-insecure-api-key."
"""How a browser, which cannot set headers of a WebSocket, sends a key among the subprotocols."""

_POLICY_VIOLATION = 1008


class Guard:
    """The server's ASGI application: lets in what may come in, and answers errors.

    The routes behind it find ``server`` and ``client`` in the state of their scope, raise an
    :class:`ApiError` to refuse a request, and leave one that they have sent themselves there, under
    ``refusal``.
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
        # Web pages can reach a server of this machine under a name that they let point to it.
        self._only_local = not settings.api_keys and _is_local(settings.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        scope["app"] = self  # so that Starlette's router raises its errors, which are answered here
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
            # A POST is to be run. Under a load that is too much, what is refused must take nothing
            # from what runs: its body is not even looked at.
            if method == "POST":
                self._server.check_room(client)
            state["server"], state["client"] = self._server, client
            is_http = scope["type"] == "http"
            await self._app(scope, body.receive if is_http else receive, answer.send)
        except Exception as error:  # sent to the client, or to the log
            if answer.has_begun:  # too late for another one
                raise
            state["refusal"] = refusal = _as_api_error(error, scope)
            await _refuse(refusal, scope, receive, answer.send)
        finally:
            body.let_go()
            ended: ApiError | None = state.get("refusal")
            answer.log(scope, ended)
            if ended is not None and not ended.is_recorded:
                self._trace_refusal(scope, client, ended, answer.took_s)

    def _trace_refusal(
        self, scope: Scope, client: Client, refusal: ApiError, took_s: float
    ) -> None:
        """Make a span of what was refused before a pipeline's records began."""
        spans, method = self._server.meters.spans, scope.get("method", "WebSocket")
        if spans is None or method not in ("POST", "WebSocket"):  # nothing was to be run
            return
        attributes: dict[str, str | int] = {
            "omni.request_id": client.request_id,
            "http.response.status_code": int(refusal.status),
            "url.path": scope["path"],
            "error.type": refusal.code or refusal.kind,
        }
        # A path that is none of the server's is no name: there are too many.
        name = f"{method} {scope['path']}" if "endpoint" in scope else method
        spans.add_refused(name, client.traceparent, attributes, took_s)

    def _tenant(self, path: str, headers: Headers) -> str | None:
        """Check the API key, where one is needed, and name its tenant.

        Keys are compared in constant time: all of them, whichever is right.
        """
        if not self._keys or path in _OPEN_PATHS:
            return None
        given = _given_key(headers)
        message = "this server wants an API key: send it as Authorization: Bearer KEY"
        if given is not None:
            digest = hashlib.sha256(given.encode("utf-8", "surrogatepass")).digest()
            if any([hmac.compare_digest(digest, known) for known in self._keys]):
                # Hashed once more: the name of a tenant must not serve as a digest of the key.
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
        if self._only_local and not _names_local(host):
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
        "access-control-allow-methods": "GET, POST",
        "access-control-allow-headers": "authorization, content-type",
        "access-control-max-age": "600",
    },
)


class _Answer:
    """Puts the request's id into the answer, and notes what to log.

    The answer ends when the whole request has come, or nothing more is waited for. ``has_begun``
    says whether anything of it was sent.
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
        """Seconds until the answer had ended, or until now."""
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
            if self._body.is_coming:
                await self._send({**message, "more_body": True})
                await self._body.drop_rest()
                message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    def log(self, scope: Scope, refusal: ApiError | None) -> None:
        # As repr: a path, and what a refusal quotes, may hold what looks like a line of the log.
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
def _names_local(host: str) -> bool:
    try:
        return _is_local(urlsplit(f"//{host}").hostname or "")
    except ValueError:  # it names nothing at all
        return False


def _is_local(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"

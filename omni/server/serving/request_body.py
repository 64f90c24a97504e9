"""Reads what a client sent, files in base64 or elsewhere included; says what is wrong with it."""

from __future__ import annotations

import asyncio
import binascii
import socket
import ssl
from base64 import b64decode
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, ClassVar, TypeVar
from urllib.parse import SplitResult, urlsplit

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import from_json
from starlette.requests import Request

from engine.interface.placed_error import PlacedError
from engine.interface.settings import dotted, explain_validation_error, place_of
from omni.server.serving.api_error import ApiError
from omni.server.serving.settings import ServerLimits

_FETCHES_AT_ONCE = 8
_BAD_URL = "invalid_url"


class UrlFetcher:
    """Fetches files by http and https.

    A client that could have anything fetched would see what only the server's network sees. So only
    named hosts are asked; all addresses that such a name has must be public; the connection goes to
    an address that was checked, whatever the name means a moment later; and no redirect is
    followed.

    Names of hosts are without ports. As many requests wait for files at once as may wait for their
    turn; one where none may.
    """

    def __init__(self, hosts: Sequence[str], limits: ServerLimits) -> None:
        self._hosts = frozenset(host.lower().rstrip(".") for host in hosts)
        self._limits = limits
        self._num_requests = 0
        self._room = asyncio.Semaphore(_FETCHES_AT_ONCE)
        # Its own: names that are looked up for long must keep no other work from its thread.
        self._threads = ThreadPoolExecutor(_FETCHES_AT_ONCE, "omni-fetch")

    def close(self) -> None:
        """Look up no more names."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def _place(self) -> Generator[None]:
        """Count a request that waits for a file while the block lasts; refuse one too many."""
        if self._num_requests >= max(1, self._limits.max_waiting_requests):
            raise ApiError.too_many(
                f"{self._num_requests} requests wait for files to be fetched, as many as this "
                "server lets wait; try again later",
                "queue_full",
                self._limits.url_timeout_s,
            )
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1

    async def fetch(self, url: str, param: str, room: int) -> bytes:
        """Fetch one file of at most ``room`` bytes; an error names ``param``, where it stands."""
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").rstrip("."), parts.port
        except ValueError as error:
            raise ApiError.bad_field(param, f"it is no address: {error}", _BAD_URL) from error
        if host not in self._hosts:
            raise ApiError.bad_field(
                param,
                f"nothing is fetched from {host!r:.80}; send the file as a data URL, or have "
                "the server started with --allow-url-hosts",
                _BAD_URL,
            )
        if not url.isascii() or not url.isprintable() or " " in url:
            raise ApiError.bad_field(
                param, "it has characters that an address cannot have", _BAD_URL
            )
        if parts.username is not None or parts.password is not None:
            raise ApiError.bad_field(param, "it must not name a user", _BAD_URL)
        with self._place():
            try:
                async with asyncio.timeout(self._limits.url_timeout_s), self._room:
                    return await self._get(parts, host, port, room)
            except Exception as error:  # of the network, of TLS, of the host's answer
                message = str(error) or type(error).__name__
                raise ApiError.bad_field(
                    param, f"it cannot be fetched from {host!r}: {message}", _BAD_URL
                ) from error

    async def _get(self, parts: SplitResult, host: str, port: int | None, room: int) -> bytes:
        import httpcore2  # most servers fetch nothing

        loop = asyncio.get_running_loop()
        port_number = port or (443 if parts.scheme == "https" else 80)
        # The name is for the host's eyes, and its certificate; the connection is to the address.
        address = await loop.run_in_executor(self._threads, _public_address, host, port_number)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        url = httpcore2.URL(scheme=parts.scheme, host=address, port=port_number, target=path)
        name = host if port is None else f"{host}:{port}"
        headers: dict[bytes | str, bytes | str]
        headers = {"Host": name, "Accept": "image/*, audio/*", "Connection": "close"}
        tls = None
        if parts.scheme == "https":  # it reads all certificates
            tls = await loop.run_in_executor(self._threads, ssl.create_default_context)
        async with (
            httpcore2.AsyncConnectionPool(ssl_context=tls) as pool,
            pool.stream("GET", url, headers=headers, extensions={"sni_hostname": host}) as response,
        ):
            if response.status != 200:
                message = f"it answered with status {response.status}"
                is_redirect = 300 <= response.status < 400
                raise ValueError(message + "; redirects are not followed" * is_redirect)
            content = bytearray()
            async for chunk in response.aiter_stream():
                content += chunk
                if len(content) > self._limits.max_url_bytes:
                    raise ValueError(f"it is larger than {self._limits.max_url_bytes} bytes")
                if len(content) > room:
                    raise ValueError("the request's files are larger than its body may be")
            return bytes(content)


def _public_address(host: str, port: int) -> str:
    """Find an address of a host; ``ValueError`` unless all that it has are public."""
    found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    for address in sorted(found):
        if not is_public(address):
            raise ValueError(f"it has the address {address}, which is not public")
    return min(found)


def is_public(address: str) -> bool:
    """Tell if an address is one of the internet: not of a machine, a network or a provider.

    An IPv6 address that stands for an IPv4 one (mapped, 6to4, NAT64) is judged by both.
    """
    found = ip_address(address.partition("%")[0])
    if not found.is_global or found.is_multicast or found.is_reserved:
        return False
    return all(is_public(str(inner)) for inner in _inner(found))


def _inner(address: IPv4Address | IPv6Address) -> list[IPv4Address]:
    if isinstance(address, IPv4Address):
        return []
    inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    packed = address.packed
    # 64:ff9b::/96 and, before a translator of one's own, ::/96.
    if packed[:12] in (bytes.fromhex("0064ff9b0000000000000000"), bytes(12)):
        inner.append(IPv4Address(packed[12:]))
    return [each for each in inner if each is not None]


_SMALL = 1 << 16
_ResultT = TypeVar("_ResultT")


async def without_faltering(
    work: Callable[..., _ResultT], data: bytes | str, *more: object
) -> _ResultT:
    """Work on data at once if it is little, and else in another thread: no stream falters then."""
    if len(data) <= _SMALL:
        return work(data, *more)
    return await asyncio.to_thread(work, data, *more)


async def decoded(data: str, param: str) -> bytes:
    """Decode base64; ``param`` is its place in the request, which an error names."""
    try:
        content = await without_faltering(partial(b64decode, validate=True), data)
    except (binascii.Error, ValueError) as error:
        raise ApiError.bad_field(param, f"not valid base64: {error}") from error
    if not content:
        raise ApiError.bad_field(param, "it is empty")
    return content


async def fetched(url: str, param: str, fetcher: UrlFetcher, room: int) -> bytes:
    """Read a data URL, or fetch a file of up to ``room`` bytes from the network; never a path.

    An error names its place in the request, ``param``.
    """
    head, comma, data = url.partition(",")
    scheme = head.partition(":")[0].lower()
    if scheme == "data":
        if not comma or not head.lower().endswith(";base64"):
            raise ApiError.bad_field(param, "a data URL must begin like 'data:image/png;base64,'")
        return await decoded(data, param)
    if scheme in ("http", "https"):
        return await fetcher.fetch(url, param, room)
    raise ApiError.bad_field(
        param,
        "must be a data URL, such as 'data:image/png;base64,...', or begin with http:// or "
        f"https://, got {url!r:.80}",
    )


_ModelT = TypeVar("_ModelT", bound=BaseModel)

_ABSENT: tuple[Any, ...] = (None, [], {})


def _add_hints(schema: dict[str, Any], model: type[ApiModel]) -> None:
    """Let the schema of a model have the keys that are taken and change nothing."""
    hints = {key: {"description": "changes nothing"} for key in sorted(model.without_effect)}
    schema["properties"] = schema.get("properties", {}) | hints


class ApiModel(BaseModel):
    """A request's body, or a part of it. Unknown keys are refused; null is as good as absent.

    Attributes:
        not_supported: keys that the shape has but this server does not do, with the values beside
            an empty one by which a client says that it does not want them.
        without_effect: keys that are taken, and change nothing about the answer.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra=_add_hints)

    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    without_effect: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_supported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for key in cls.not_supported.keys() & data.keys():
            harmless = (*_ABSENT, *cls.not_supported[key])
            if data[key] not in harmless:
                raise PlacedError((key,), f"not supported by this server, got {data[key]!r:.80}")
        left_out = cls.not_supported.keys() | cls.without_effect
        return {
            key: value for key, value in data.items() if key not in left_out and value is not None
        }


def check_part(part: BaseModel, names: Sequence[str], wanted: str, what: str) -> None:
    """Check that of some fields a part of a request has the wanted one alone."""
    for name in names:
        if (getattr(part, name) is not None) != (name == wanted):
            wrong = "missing; it must be given" if name == wanted else "does not belong here"
            raise PlacedError((name,), f"{wrong}: {what}")


async def read_json(request: Request, model: type[_ModelT]) -> _ModelT:
    """Read a body of JSON; an error has status 415 if it is of another kind, 400 if it is wrong."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Not only for tidiness: a web page may send plain text anywhere, but JSON only where it may.
    if kind != "application/json":
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"Content-Type must be application/json, got {kind or 'none'!r:.80}",
        )
    return await without_faltering(parse_json, await request.body(), model)


def parse_json(body: bytes | str, model: type[_ModelT]) -> _ModelT:
    """Check a document of JSON against a model; an error names the first wrong place."""
    try:
        return model.model_validate_json(body, strict=True)
    except ValidationError as error:
        finding = error.errors(include_url=False)[0]
        if finding["type"] == "json_invalid":
            cause = finding.get("ctx", {}).get("error", "")
            raise ApiError.bad_request(f"the body is not valid JSON: {cause}") from None
        data = from_json(body)
        if not isinstance(data, dict):
            raise ApiError.bad_request("the body must be a JSON object: {...}") from None
        lines = explain_validation_error(error, model, data).split("\n")
        place = dotted(place_of(finding, data))
        raise ApiError.bad_request("; ".join(lines), param=place or None) from None

"""Fetches what clients give an address of, from hosts that the server's owner has named."""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import SplitResult, urlsplit

from omni.server.serving.api_error import ApiError

__all__ = ["UrlFetcher", "is_public"]

_AT_ONCE = 8
_CHUNK_BYTES = 1 << 16


class UrlFetcher:
    """Fetches files by http and https.

    A client that could have anything fetched would see what only the server's network sees. So only
    named hosts are asked; all addresses that such a name has must be public; the connection goes to
    an address that was checked, whatever the name means a moment later; and no redirect is
    followed.

    Args:
        hosts: names that are allowed, without ports.
        max_bytes: of a file.
        timeout_s: of a whole fetch.
    """

    def __init__(self, hosts: Sequence[str], max_bytes: int, timeout_s: float) -> None:
        self._hosts = frozenset(host.lower().rstrip(".") for host in hosts)
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._room = asyncio.Semaphore(_AT_ONCE)
        # Its own: hosts that do not answer must keep nothing else from being done in a thread.
        self._threads = ThreadPoolExecutor(_AT_ONCE, "omni-fetch")

    def close(self) -> None:
        """Begin no more; what is being fetched ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def fetch(self, url: str, param: str, room: int) -> bytes:
        """Fetch one file, in another thread.

        Args:
            url: of http or https.
            param: where it stands in the request.
            room: bytes that the request may still have fetched.

        Raises:
            ApiError: with status 400: it may not be fetched, or cannot be.
        """
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").rstrip("."), parts.port
        except ValueError as error:
            raise _refused(param, f"it is no address: {error}") from error
        if host not in self._hosts:
            raise _refused(
                param,
                f"nothing is fetched from {host!r:.80}; send the file as a data URL, or have "
                "the server started with --allow-url-hosts",
            )
        if not url.isascii() or not url.isprintable() or " " in url:
            raise _refused(param, "it has characters that an address cannot have")
        if parts.username is not None or parts.password is not None:
            raise _refused(param, "it must not name a user")
        end = time.monotonic() + self._timeout_s
        try:
            async with asyncio.timeout(self._timeout_s), self._room:
                return await asyncio.get_running_loop().run_in_executor(
                    self._threads, self._fetch, parts, _Goal(host, port, end, room)
                )
        except (OSError, http.client.HTTPException, ValueError) as error:
            told = str(error) or type(error).__name__
            raise _refused(param, f"it cannot be fetched from {host!r}: {told}") from error

    def _fetch(self, parts: SplitResult, goal: _Goal) -> bytes:
        port = goal.port or (443 if parts.scheme == "https" else 80)
        address = _public_address(goal.host, port)
        connection = _Connection(goal.host, port, parts.scheme, address, goal.end)
        try:
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", path, headers={"Accept": "image/*, audio/*"})
            with connection.getresponse() as response:
                if response.status != 200:
                    told = f"it answered with status {response.status}"
                    is_redirect = 300 <= response.status < 400
                    raise ValueError(told + "; redirects are not followed" * is_redirect)
                return self._read(response, goal)
        finally:
            connection.close()

    def _read(self, response: http.client.HTTPResponse, goal: _Goal) -> bytes:
        content = bytearray()
        while chunk := response.read1(_CHUNK_BYTES):
            content += chunk
            if len(content) > self._max_bytes:
                raise ValueError(f"it is larger than {self._max_bytes} bytes")
            if len(content) > goal.room:
                raise ValueError(
                    "all that is fetched for the request is larger than its body may be"
                )
            if time.monotonic() > goal.end:
                raise ValueError(f"it took longer than {self._timeout_s:g} s")
        return bytes(content)


@dataclass(frozen=True, slots=True)
class _Goal:
    """Whom to ask, until when by the monotonic clock, and for how many bytes at most."""

    host: str
    port: int | None
    end: float
    room: int


class _Connection(http.client.HTTPConnection):
    """To an address that was checked; the name is for the host's eyes, and its certificate."""

    def __init__(self, host: str, port: int, scheme: str, address: str, end: float) -> None:
        super().__init__(host, port, timeout=max(0.1, end - time.monotonic()))
        self._address = address
        self._scheme = scheme

    def connect(self) -> None:
        """Connect, and for https check the certificate."""
        self.sock = socket.create_connection((self._address, self.port), self.timeout)
        if self._scheme == "https":
            context = ssl.create_default_context()
            self.sock = context.wrap_socket(self.sock, server_hostname=self.host)


def _public_address(host: str, port: int) -> str:
    """An address of a host, all of whose addresses are public; ``ValueError`` if one is not."""
    found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    for address in sorted(found):
        if not is_public(address):
            raise ValueError(f"it has the address {address}, which is not public")
    return min(found)


def is_public(address: str) -> bool:
    """Whether an address is one of the internet: not of a machine, a network or a provider.

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


def _refused(param: str, message: str) -> ApiError:
    return ApiError.bad_request(f"{param}: {message}", param=param, code="invalid_url")

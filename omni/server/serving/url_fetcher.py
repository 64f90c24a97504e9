"""Fetches what clients give an address of, from hosts that the server's owner has named."""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http import HTTPStatus
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
        max_requests: that wait for files at once.
    """

    def __init__(
        self, hosts: Sequence[str], max_bytes: int, timeout_s: float, max_requests: int = 64
    ) -> None:
        self._hosts = frozenset(host.lower().rstrip(".") for host in hosts)
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._max_requests = max_requests
        self._num_requests = 0
        self._room = asyncio.Semaphore(_AT_ONCE)
        # Its own: hosts that do not answer must keep nothing else from being done in a thread.
        self._threads = ThreadPoolExecutor(_AT_ONCE, "omni-fetch")

    def close(self) -> None:
        """Begin no more; what is being fetched ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def place(self) -> Generator[None]:
        """Count a request that waits for files for as long as the ``with`` block lasts.

        Raises:
            ApiError: with status 429: there are as many as may be.
        """
        if self._num_requests >= self._max_requests:
            raise ApiError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{self._num_requests} requests wait for files to be fetched, as many as this "
                "server lets wait; try again later",
                code="queue_full",
                headers={"Retry-After": str(max(1, round(self._timeout_s)))},
            )
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1

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
        connection = _Connection(host, port, parts.scheme, time.monotonic() + self._timeout_s)
        most = min(self._max_bytes, room)
        try:
            async with asyncio.timeout(self._timeout_s), self._room:
                return await asyncio.get_running_loop().run_in_executor(
                    self._threads, self._fetch, parts, connection, most
                )
        except (OSError, http.client.HTTPException, ValueError) as error:
            told = str(error) or type(error).__name__
            raise _refused(param, f"it cannot be fetched from {host!r}: {told}") from error
        finally:
            connection.break_off()  # a host that sends a little now and then would keep the thread

    def _fetch(self, parts: SplitResult, connection: _Connection, most: int) -> bytes:
        try:
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", path, headers={"Accept": "image/*, audio/*"})
            with connection.getresponse() as response:
                if response.status != 200:
                    told = f"it answered with status {response.status}"
                    is_redirect = 300 <= response.status < 400
                    raise ValueError(told + "; redirects are not followed" * is_redirect)
                return self._read(response, most)
        finally:
            connection.end()

    def _read(self, response: http.client.HTTPResponse, most: int) -> bytes:
        content = bytearray()
        while chunk := response.read1(_CHUNK_BYTES):
            content += chunk
            if len(content) > self._max_bytes:
                raise ValueError(f"it is larger than {self._max_bytes} bytes")
            if len(content) > most:
                raise ValueError("the request's files are larger than its body may be")
        return bytes(content)


class _Connection(http.client.HTTPConnection):
    """To an address that was checked; the name is for the host's eyes, and its certificate.

    Args:
        host: by its name.
        port: None: the scheme's.
        scheme: ``http`` or ``https``.
        end: by the monotonic clock; nothing waits for longer.
    """

    def __init__(self, host: str, port: int | None, scheme: str, end: float) -> None:
        super().__init__(host, port or (443 if scheme == "https" else 80))
        self._scheme = scheme
        self._end = end
        self._lock = threading.Lock()
        self._handle: socket.socket | None = None
        self._is_over = False

    def connect(self) -> None:
        """Connect, and for https check the certificate.

        Raises:
            OSError: it cannot be had, or was broken off.
            ValueError: an address of the host is not public.
        """
        address = _public_address(self.host, self.port)
        left_s = max(0.1, self._end - time.monotonic())
        self.sock = socket.create_connection((address, self.port), left_s)
        with self._lock:
            if self._is_over:  # it came before there was anything to break off
                raise TimeoutError("it was broken off")
            # One of its own: whoever reads closes the other when all has come.
            self._handle = self.sock.dup()
        if self._scheme == "https":
            context = ssl.create_default_context()
            self.sock = context.wrap_socket(self.sock, server_hostname=self.host)

    def break_off(self) -> None:
        """End whatever another thread waits for here; nothing where that is over.

        A time limit alone would not: it begins anew with every byte that comes.
        """
        with self._lock:
            self._is_over = True
            if self._handle is not None:
                with suppress(OSError):  # the host has ended it already
                    self._handle.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Close it for good."""
        self.close()
        with self._lock:
            if self._handle is not None:
                self._handle.close()
                self._handle = None


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

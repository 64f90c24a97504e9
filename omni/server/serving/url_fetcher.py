"""Fetcher of files given by URL in requests, from hosts allowed by the server's operator."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import SplitResult, urlsplit

from omni.server.serving.api_error import ApiError
from omni.server.serving.settings import ServerLimits

_MAX_CONCURRENT = 8
_CODE = "invalid_url"


class UrlFetcher:
    """Fetches files by HTTP and HTTPS.

    Guards against server-side request forgery: only allowed hosts are contacted; all addresses of a
    host must be public; the connection goes to a checked address, even if the name resolves
    differently a moment later; and redirects are not followed.

    Host names are without ports. The number of requests that wait for files is limited to the
    capacity of the admission queue, and to 1 if that is 0.
    """

    def __init__(self, hosts: Sequence[str], limits: ServerLimits) -> None:
        self._hosts = frozenset(host.lower().rstrip(".") for host in hosts)
        self._limits = limits
        self._num_requests = 0
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)
        # A separate pool: slow DNS lookups must not starve other work of threads.
        self._threads = ThreadPoolExecutor(_MAX_CONCURRENT, "omni-fetch")

    def close(self) -> None:
        """Stop the threads that resolve names."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def fetch(self, url: str, param: str, room: int) -> bytes:
        """Fetch a file of at most ``room`` bytes; an error names ``param``, the path of its URL."""
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").rstrip("."), parts.port
        except ValueError as error:
            raise ApiError.bad_field(param, f"it is no address: {error}", _CODE) from error
        if host not in self._hosts:
            raise ApiError.bad_field(
                param,
                f"nothing is fetched from {host!r:.80}; send the file as a data URL, or have "
                "the server started with --allow-url-hosts",
                _CODE,
            )
        if not url.isascii() or not url.isprintable() or " " in url:
            raise ApiError.bad_field(param, "it has characters that an address cannot have", _CODE)
        if parts.username is not None or parts.password is not None:
            raise ApiError.bad_field(param, "it must not name a user", _CODE)
        if self._num_requests >= max(1, self._limits.max_waiting_requests):
            raise ApiError.too_many(
                f"{self._num_requests} requests wait for files to be fetched, as many as this "
                "server lets wait; try again later",
                "queue_full",
                self._limits.url_timeout_s,
            )
        self._num_requests += 1
        try:
            async with asyncio.timeout(self._limits.url_timeout_s), self._slots:
                return await self._get(parts, host, port, room)
        except Exception as error:  # of the network, of TLS, of the host's response
            message = str(error) or type(error).__name__
            raise ApiError.bad_field(
                param, f"it cannot be fetched from {host!r}: {message}", _CODE
            ) from error
        finally:
            self._num_requests -= 1

    async def _get(self, parts: SplitResult, host: str, port: int | None, room: int) -> bytes:
        import httpcore2  # lazy: most servers fetch nothing

        loop = asyncio.get_running_loop()
        port_number = port or (443 if parts.scheme == "https" else 80)
        # Connect to the checked address; the name is for the Host header and the certificate.
        address = await loop.run_in_executor(self._threads, _public_address, host, port_number)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        url = httpcore2.URL(scheme=parts.scheme, host=address, port=port_number, target=path)
        name = host if port is None else f"{host}:{port}"
        headers: dict[bytes | str, bytes | str]
        headers = {"Host": name, "Accept": "image/*, audio/*", "Connection": "close"}
        tls = None
        if parts.scheme == "https":  # in a thread: it reads all certificates
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
    """Resolve a host to an address; raise ``ValueError`` unless all its addresses are public."""
    found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    for address in sorted(found):
        if not is_public(address):
            raise ValueError(f"it has the address {address}, which is not public")
    return min(found)


def is_public(address: str) -> bool:
    """Return True if an address is globally routable: not of a machine, a network or a provider.

    If an IPv6 address embeds an IPv4 one (mapped, 6to4, NAT64), both must be public.
    """
    found = ip_address(address.partition("%")[0])
    if not found.is_global or found.is_multicast or found.is_reserved:
        return False
    return all(is_public(str(embedded)) for embedded in _embedded(found))


def _embedded(address: IPv4Address | IPv6Address) -> list[IPv4Address]:
    if isinstance(address, IPv4Address):
        return []
    embedded = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    packed = address.packed
    # 64:ff9b::/96 and, for local translators, ::/96.
    if packed[:12] in (bytes.fromhex("0064ff9b0000000000000000"), bytes(12)):
        embedded.append(IPv4Address(packed[12:]))
    return [each for each in embedded if each is not None]

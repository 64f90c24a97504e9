"""One request by urllib, whatever its status, or by a plain socket."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from email.message import Message
from urllib.parse import urlsplit

from tests.support.patience import PATIENCE_S


def call(
    url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> tuple[int, Message, bytes]:
    """Send a request on a connection that then closes; with a body it is a POST of JSON."""
    kind = {} if body is None else {"Content-Type": "application/json"}
    request = urllib.request.Request(url, body, {**kind, **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def connection(url: str) -> socket.socket:
    """Connect to a server; the caller closes the socket."""
    where = urlsplit(url)
    return socket.create_connection((where.hostname, where.port), timeout=PATIENCE_S)


def raw_post(
    body: bytes = b"",
    length: int | None = None,
    *,
    path: str = "/v1/completions",
    kind: str = "application/json",
    more: str = "",
) -> bytes:
    """Return the bytes of a POST; ``length`` announces a body that is sent later."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n{more}"
    announced = len(body) if length is None else length
    return f"{head}Content-Length: {announced}\r\n\r\n".encode() + body

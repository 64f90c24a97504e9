"""One request by urllib, whatever its status is, or by a plain socket."""

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
    """Ask, on a connection that ends with the answer; with a body it is a POST of JSON."""
    kind = {} if body is None else {"Content-Type": "application/json"}
    request = urllib.request.Request(url, body, {**kind, **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def connection(url: str) -> socket.socket:
    """Connect to a server; closed by whoever gets it."""
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
    """A POST as it goes over the wire; of a body that is to come, its ``length`` is announced."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n{more}"
    announced = len(body) if length is None else length
    return f"{head}Content-Length: {announced}\r\n\r\n".encode() + body

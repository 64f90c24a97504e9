"""One request by urllib, whatever its status is."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Mapping
from email.message import Message

from tests.support.patience import PATIENCE_S

__all__ = ["call"]


def call(
    url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> tuple[int, Message, bytes]:
    """Ask, on a connection that ends with the answer; with a body it is a POST of JSON.

    Returns:
        The status, the headers and the content of the answer.
    """
    kind = {} if body is None else {"Content-Type": "application/json"}
    request = urllib.request.Request(url, body, {**kind, **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()

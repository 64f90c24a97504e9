"""Files that come inside a request, in base64."""

from __future__ import annotations

import asyncio
import binascii
from base64 import b64decode

from omni.server.serving.api_error import ApiError
from omni.server.serving.url_fetcher import UrlFetcher

__all__ = ["decoded", "fetched"]

_SMALL = 1 << 16
"""Characters that are decoded at once; more go to another thread."""


async def decoded(data: str, param: str) -> bytes:
    """Decode base64.

    Args:
        data: without line breaks.
        param: where it stands.

    Raises:
        ApiError: with status 400: it is none, or nothing.
    """
    try:
        if len(data) <= _SMALL:
            content = b64decode(data, validate=True)
        else:
            content = await asyncio.to_thread(b64decode, data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError.bad_request(f"{param}: not valid base64: {error}", param=param) from error
    if not content:
        raise ApiError.bad_request(f"{param}: it is empty", param=param)
    return content


async def fetched(url: str, param: str, fetcher: UrlFetcher, room: int) -> bytes:
    """What is at an address: in a data URL itself, else somewhere in the network.

    Args:
        url: as the client gives it; never a path.
        param: where it stands.
        fetcher: for addresses in the network.
        room: bytes that it may have there.

    Raises:
        ApiError: with status 400: it is neither, or cannot be had.
    """
    head, comma, data = url.partition(",")
    scheme = head.partition(":")[0].lower()
    if scheme == "data":
        if not comma or not head.lower().endswith(";base64"):
            told = f"{param}: a data URL must begin like 'data:image/png;base64,'"
            raise ApiError.bad_request(told, param=param)
        return await decoded(data, param)
    if scheme in ("http", "https"):
        return await fetcher.fetch(url, param, room)
    raise ApiError.bad_request(
        f"{param}: must be a data URL, such as 'data:image/png;base64,...', or begin with "
        f"http:// or https://, got {url!r:.80}",
        param=param,
    )

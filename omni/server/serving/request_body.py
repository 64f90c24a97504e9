"""Reads what a client sent, files in base64 included, and says what is wrong with it."""

from __future__ import annotations

import asyncio
import binascii
import json
from base64 import b64decode
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from engine.interface.placed_error import PlacedError
from engine.interface.settings import dotted, explain_validation_error, place_of
from omni.server.serving.api_error import ApiError
from omni.server.serving.url_fetcher import UrlFetcher

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request

__all__ = ["ApiModel", "decoded", "fetched", "parse_json", "read_json"]

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


_ModelT = TypeVar("_ModelT", bound=BaseModel)

_SMALL_BODY = 1 << 16
"""Bytes that are parsed at once. More go to another thread, so that no stream falters."""

_ABSENT: tuple[Any, ...] = (None, [], {})


class ApiModel(BaseModel):
    """A request's body, or a part of it. Unknown keys are refused; null is as good as absent.

    Attributes:
        not_supported: keys that the shape has but this server does not do, with the values beside
            an empty one by which a client says that it does not want them.
        without_effect: keys that are taken, and change nothing about the answer.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

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


async def read_json(request: Request, model: type[_ModelT]) -> _ModelT:
    """Read a body of JSON.

    Args:
        request: whose body has not been read.
        model: what it should be.

    Raises:
        ApiError: with status 415 if it is of another kind, with 400 if it is wrong.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Not only for tidiness: a web page may send plain text anywhere, but JSON only where it may.
    if kind != "application/json":
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"Content-Type must be application/json, got {kind or 'none'!r:.80}",
        )
    body = await request.body()
    if len(body) <= _SMALL_BODY:
        return parse_json(body, model)
    return await asyncio.to_thread(parse_json, body, model)


def parse_json(body: bytes | str, model: type[_ModelT]) -> _ModelT:
    """Check a document of JSON against a model.

    Raises:
        ApiError: with status 400, and the first wrong place as its ``param``.
    """
    try:
        return model.model_validate_json(body, strict=True)
    except ValidationError as error:
        if error.errors(include_url=False)[0]["type"] == "json_invalid":
            raise ApiError.bad_request(_no_json(error)) from None
        data = _loaded(body)
        if not isinstance(data, dict):
            raise ApiError.bad_request("the body must be a JSON object: {...}") from None
        lines = explain_validation_error(error, model, data).split("\n")
        place = dotted(place_of(error.errors(include_url=False)[0], data))
        raise ApiError.bad_request("; ".join(lines), param=place or None) from None


def _no_json(error: ValidationError) -> str:
    cause = error.errors(include_url=False)[0].get("ctx", {}).get("error", "")
    return f"the body is not valid JSON: {cause}"


def _loaded(body: bytes | str) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):  # pydantic's parser took it, this one need not
        raise ApiError.bad_request("the body is not valid JSON") from None

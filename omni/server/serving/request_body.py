"""Parsing and validation of request bodies, including files in base64."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, ClassVar, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import from_json
from starlette.requests import Request

from engine.interface.placed_error import PlacedError
from engine.interface.settings import dotted, explain_validation_error, place_of
from omni.server.serving.api_error import ApiError
from omni.server.serving.url_fetcher import UrlFetcher

_MAX_INLINE_BYTES = 1 << 16
_ResultT = TypeVar("_ResultT")


async def in_thread_if_large(
    work: Callable[..., _ResultT], data: bytes | str, *more: object
) -> _ResultT:
    """Process small data directly, and large data in a thread so that no stream stalls."""
    if len(data) <= _MAX_INLINE_BYTES:
        return work(data, *more)
    return await asyncio.to_thread(work, data, *more)


async def decode_base64(data: str, param: str) -> bytes:
    """Decode base64; an error names ``param``, its path in the request."""
    try:
        content = await in_thread_if_large(partial(b64decode, validate=True), data)
    except ValueError as error:
        raise ApiError.bad_field(param, f"not valid base64: {error}") from error
    if not content:
        raise ApiError.bad_field(param, "it is empty")
    return content


async def fetch_file(url: str, param: str, fetcher: UrlFetcher, room: int) -> bytes:
    """Decode a data URL, or fetch a file of at most ``room`` bytes by HTTP; never read a path.

    An error names ``param``, its path in the request.
    """
    head, comma, data = url.partition(",")
    scheme = head.partition(":")[0].lower()
    if scheme == "data":
        if not comma or not head.lower().endswith(";base64"):
            raise ApiError.bad_field(param, "a data URL must begin like 'data:image/png;base64,'")
        return await decode_base64(data, param)
    if scheme in ("http", "https"):
        return await fetcher.fetch(url, param, room)
    raise ApiError.bad_field(
        param,
        "must be a data URL, such as 'data:image/png;base64,...', or begin with http:// or "
        f"https://, got {url!r:.80}",
    )


_ModelT = TypeVar("_ModelT", bound=BaseModel)

_EMPTY_VALUES: tuple[Any, ...] = (None, [], {})


def _add_hints(schema: dict[str, Any], model: type[ApiModel]) -> None:
    """Add the keys of a model that are accepted and ignored to its schema."""
    hints = {key: {"description": "changes nothing"} for key in sorted(model.without_effect)}
    schema["properties"] = schema.get("properties", {}) | hints


class Unsupported(NamedTuple):
    """Reason not to support a key of the API, and the values with which a client disables it."""

    reason: str
    neutral: tuple[Any, ...] = ()


class ApiModel(BaseModel):
    """A request body, or a part of it. Unknown keys are refused; null is equivalent to absent.

    Attributes:
        not_supported: keys of the API that this server supports with neutral or empty values only.
        without_effect: keys that are accepted and ignored.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra=_add_hints)

    not_supported: ClassVar[Mapping[str, Unsupported]] = {}
    without_effect: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for key, (reason, neutral) in cls.not_supported.items():
            if data.get(key) not in (*_EMPTY_VALUES, *neutral):
                raise PlacedError((key,), f"not supported, got {data[key]!r:.80}: {reason}")
        dropped = cls.not_supported.keys() | cls.without_effect
        return {
            key: value for key, value in data.items() if key not in dropped and value is not None
        }


def check_part(part: BaseModel, names: Sequence[str], wanted: str, what: str) -> None:
    """Check that only the wanted one of these fields is set in a part of a request."""
    for name in names:
        if (getattr(part, name) is not None) != (name == wanted):
            wrong = "missing; it must be given" if name == wanted else "does not belong here"
            raise PlacedError((name,), f"{wrong}: {what}")


async def read_json(request: Request, model: type[_ModelT]) -> _ModelT:
    """Read a JSON body; an error has status 415 for another content type, 400 if it is invalid."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Also for security: web pages may send plain text to any origin, but JSON only if allowed.
    if kind != "application/json":
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"Content-Type must be application/json, got {kind or 'none'!r:.80}",
        )
    return await in_thread_if_large(parse_json, await request.body(), model)


def parse_json(body: bytes | str, model: type[_ModelT]) -> _ModelT:
    """Validate a JSON document against a model; an error names the first invalid field."""
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

"""Reads what a client sent, and says what is wrong with it."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from engine.interface.placed_error import PlacedError
from engine.interface.schema_error import dotted, explain_validation_error, place_of
from omni.server.serving.api_error import ApiError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request

__all__ = ["ApiModel", "parse_json", "read_json"]

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

"""Errors in the format of OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_TIMEOUT: "timeout_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}


class ApiError(Exception):
    """An error that ends a request and is sent to its client.

    ``param`` is the path of the field at fault, with dots and indices; the message is for people,
    the code for programs. ``is_recorded`` is true if the failed request already has a
    :class:`~omni.server.serving.meters.RequestRecord`.
    """

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(max(1, round(retry_after_s)))
        self.is_recorded = False

    @classmethod
    def bad_request(
        cls, message: str, *, param: str | None = None, code: str | None = None
    ) -> ApiError:
        """Create an error for a request that is malformed or cannot run."""
        return cls(HTTPStatus.BAD_REQUEST, message, param=param, code=code)

    @classmethod
    def bad_field(cls, param: str, message: str, code: str | None = None) -> ApiError:
        """Create an error for an invalid field; the message begins with its name."""
        return cls.bad_request(f"{param}: {message}", param=param, code=code)

    @classmethod
    def too_many(cls, message: str, code: str, retry_after_s: float | None = None) -> ApiError:
        """Create an error for a limit of the server that is currently reached."""
        status = HTTPStatus.TOO_MANY_REQUESTS
        return cls(status, message, code=code, retry_after_s=retry_after_s)

    @classmethod
    def unavailable(cls, message: str, code: str, retry_after_s: float | None = None) -> ApiError:
        """Create an error for a server or model that is currently unavailable."""
        status = HTTPStatus.SERVICE_UNAVAILABLE
        return cls(status, message, code=code, retry_after_s=retry_after_s)

    @classmethod
    def internal(cls) -> ApiError:
        """Create an error without the cause, which may be confidential and is only logged."""
        return cls(HTTPStatus.INTERNAL_SERVER_ERROR, "the server made a mistake; see its log")

    def renamed(self, rename: Callable[[str], str]) -> ApiError:
        """Return this error with the path of the field in the format of the client."""
        if self.param is not None:
            before, self.param = self.param, rename(self.param)
            if self.message.startswith(before):
                self.message = self.param + self.message.removeprefix(before)
        return self

    @property
    def kind(self) -> str:
        """The ``type`` of the error in OpenAI's terms."""
        other = "invalid_request_error" if self.status < 500 else "server_error"
        return _TYPES.get(self.status, other)

    def to_object(self) -> dict[str, Any]:
        """Return the error as a JSON object."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def to_json(self) -> bytes:
        """Return the error as encoded JSON."""
        return json.dumps(self.to_object(), ensure_ascii=False).encode("utf-8", "backslashreplace")

"""Responses in pieces begin with the first one, and end so that their client knows how."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from omni.server.serving.api_error import ApiError
from omni.server.serving.client import Client
from omni.server.serving.pipeline_response import PipelineResponse


class Pieces(PipelineResponse):
    """Sends what it is given; raises exceptions among it."""

    given: Sequence[bytes | Exception] = ()
    is_closed = False

    async def pieces(self) -> AsyncIterator[bytes]:
        try:
            for each in self.given:
                if isinstance(each, Exception):
                    raise each
                yield each
        finally:
            self.is_closed = True


def sent(given: Sequence[bytes | Exception], media_type: str) -> list[tuple[bytes, bool]]:
    """The bodies that a response of these pieces sends, each with whether more follows."""
    limits = SimpleNamespace(request_timeout_s=60.0)
    pipeline = SimpleNamespace(omni=SimpleNamespace(pipeline=None))
    server: Any = SimpleNamespace(find=lambda _: pipeline, settings=SimpleNamespace(limits=limits))
    response = Pieces(server, Client("id", None), "m", is_streamed=True, media_type=media_type)
    response.given = given
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    asyncio.run(response({"type": "http"}, receive, send))
    assert response.is_closed
    assert [each["type"] for each in messages[:1]] == ["http.response.start"]
    return [(each["body"], each["more_body"]) for each in messages[1:]]


@pytest.mark.parametrize("pieces", [[], [b"a"], [b"a", b"b"]])
def test_pieces_are_sent_one_by_one_and_then_the_end(pieces: Sequence[bytes]) -> None:
    expected = [*((each, True) for each in pieces), (b"", False)]
    assert sent(pieces, "text/event-stream") == expected


@pytest.mark.parametrize("error", [ApiError.bad_request("wrong"), KeyError("secret")])
def test_an_error_after_the_first_piece_is_an_event_or_breaks_the_response_off(
    error: Exception,
) -> None:
    first, (last, more) = sent([b"a", error], "text/event-stream")
    assert (first, more) == ((b"a", True), False)
    told = json.loads(last.removeprefix(b"data: "))["error"]["message"]
    assert told == ("wrong" if isinstance(error, ApiError) else str(ApiError.internal()))
    assert sent([b"a", error], "audio/wav") == [(b"a", True)]


def test_an_error_before_the_first_piece_is_raised() -> None:
    with pytest.raises(ApiError, match="wrong"):
        sent([ApiError.bad_request("wrong"), b"a"], "text/event-stream")

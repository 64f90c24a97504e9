"""What is dropped of a body whose request has been answered, and for how long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.datastructures import Headers

from omni.server.serving import arriving_body
from omni.server.serving.api_error import ApiError
from omni.server.serving.arriving_body import ArrivingBody

PART = {"type": "http.request", "body": b"abc", "more_body": True}
END = {"type": "http.request", "body": b"abc", "more_body": False}
GONE = {"type": "http.disconnect"}


class Sender:
    """Hands messages on, one a call, and then none for ever."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.left = list(messages)

    async def receive(self) -> dict[str, Any]:
        if not self.left:
            await asyncio.Event().wait()
        return self.left.pop(0)


def body_of(sender: Sender, max_bytes: int = 7, **headers: str) -> ArrivingBody:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return ArrivingBody(sender.receive, Headers(named), max_bytes)


@pytest.mark.parametrize("last", [END, GONE])
def test_all_that_comes_is_dropped_however_much_it_is(last: dict[str, Any]) -> None:
    sender = Sender(*[PART] * 5, last, PART)
    body = body_of(sender, transfer_encoding="chunked")
    asyncio.run(body.drop_rest())
    assert not body.is_coming and sender.left == [PART], "nothing after its end was asked for"


def test_who_sends_nothing_more_is_not_waited_for_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arriving_body, "_REST_S", 0.01)
    body = body_of(Sender(PART), content_length="6")
    asyncio.run(body.drop_rest())
    assert body.is_coming


@pytest.mark.parametrize(
    ("headers", "is_coming"),
    [
        ({}, False),
        ({"content_length": "0"}, False),
        ({"content_length": "3"}, True),
        ({"transfer_encoding": "chunked"}, True),
    ],
)
def test_only_what_is_announced_is_coming(headers: dict[str, str], is_coming: bool) -> None:
    assert body_of(Sender(), **headers).is_coming == is_coming


def test_what_is_too_long_is_refused_and_the_rest_of_it_is_coming() -> None:
    body = body_of(Sender(PART, PART, PART, END), content_length="3")
    body.check_length()
    assert [asyncio.run(body.receive()) for _ in range(2)] == [PART, PART]
    with pytest.raises(ApiError, match="larger than 7 bytes"):
        asyncio.run(body.receive())
    assert body.is_coming


@pytest.mark.parametrize("length", ["8", "-1", "1e3", ""])
def test_a_length_that_is_none_or_too_long_is_refused(length: str) -> None:
    with pytest.raises(ApiError, match="larger than 7 bytes"):
        body_of(Sender(), content_length=length).check_length()

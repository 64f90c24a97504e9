"""Limits of the size and the time of arriving bodies, and dropping the rest."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.datastructures import Headers

from omni.server.serving import guard
from omni.server.serving.api_error import ApiError
from omni.server.serving.guard import ArrivingBodies, ArrivingBody
from omni.server.serving.settings import ServerLimits

PART = {"type": "http.request", "body": b"x" * 1000, "more_body": True}
END = {"type": "http.request", "body": b"x" * 1000, "more_body": False}
LARGE = {"type": "http.request", "body": b"x" * (100_000 + (1 << 16)), "more_body": True}
GONE = {"type": "http.disconnect"}


class Sender:
    """Returns one message per call, and then waits forever."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.left = list(messages)

    async def receive(self) -> dict[str, Any]:
        if not self.left:
            await asyncio.Event().wait()
        return self.left.pop(0)


def bodies(max_body_bytes: int = 2048, **limits: float) -> ArrivingBodies:
    return ArrivingBodies(ServerLimits(max_body_bytes=max_body_bytes, **limits))


def body_of(sender: Sender, others: ArrivingBodies | None = None, **headers: str) -> ArrivingBody:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return ArrivingBody(sender.receive, Headers(named), others or bodies())


@pytest.mark.parametrize("last", [END, GONE])
def test_the_rest_of_a_body_is_dropped_whatever_its_size(last: dict[str, Any]) -> None:
    sender = Sender(*[PART] * 5, last, PART)
    body = body_of(sender, transfer_encoding="chunked")
    asyncio.run(body.drop_rest())
    assert not body.is_incomplete and sender.left == [PART], "nothing is read after the end"


def test_waiting_for_the_rest_of_a_body_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_DRAIN_TIMEOUT_S", 0.01)
    body = body_of(Sender(PART), content_length="6")
    asyncio.run(body.drop_rest())
    assert body.is_incomplete


@pytest.mark.parametrize(
    ("headers", "is_incomplete"),
    [
        ({}, False),
        ({"content_length": "0"}, False),
        ({"content_length": "3"}, True),
        ({"transfer_encoding": "chunked"}, True),
    ],
)
def test_only_an_announced_body_is_incomplete(headers: dict[str, str], is_incomplete: bool) -> None:
    assert body_of(Sender(), **headers).is_incomplete == is_incomplete


def test_a_body_that_is_too_long_is_refused() -> None:
    body = body_of(Sender(PART, PART, PART, END), content_length="2048")
    body.check_length()
    assert [asyncio.run(body.receive()) for _ in range(2)] == [PART, PART]
    with pytest.raises(ApiError, match="larger than 2048 bytes"):
        asyncio.run(body.receive())
    assert body.is_incomplete


@pytest.mark.parametrize("length", ["2049", "-1", "1e3", ""])
def test_an_invalid_or_too_large_length_is_refused(length: str) -> None:
    with pytest.raises(ApiError, match="larger than 2048 bytes"):
        body_of(Sender(), content_length=length).check_length()


def test_a_body_that_needs_100_continue_is_not_awaited() -> None:
    sender = Sender(PART)
    body = body_of(sender, content_length="6", expect="100-continue")
    asyncio.run(body.drop_rest())
    assert sender.left == [PART]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"body_timeout_s": 0.01}, "nothing of the body came for 0.01 s"),
        ({"body_timeout_s": 0.01, "request_timeout_s": 0.01}, "had not come after 0.01 s"),
    ],
)
def test_a_body_that_does_not_arrive_ends_its_request(
    limits: dict[str, float], message: str
) -> None:
    body = body_of(Sender(PART), bodies(**limits), content_length="2000")

    async def read() -> None:
        while True:
            await body.receive()

    with pytest.raises(ApiError, match=message) as error:
        asyncio.run(read())
    assert error.value.status == 408 and error.value.headers == {"Connection": "close"}


def test_all_large_bodies_share_a_limit_and_release_their_bytes() -> None:
    others = bodies(max_body_bytes=200_000)
    held = [
        body_of(Sender(LARGE, END, GONE), others, transfer_encoding="chunked") for _ in range(9)
    ]

    async def read() -> None:
        for body in held[:8]:
            await body.receive()
        assert others.num_bytes == 800_000
        with pytest.raises(ApiError, match="bodies of 800000 bytes are being sent") as error:
            await held[8].receive()
        assert error.value.status == 429 and error.value.headers["Retry-After"]
        small = body_of(Sender(PART, END), others, content_length="2000")
        assert [await small.receive() for _ in range(2)] == [PART, END], "small bodies do not count"
        held[7].release()
        held[7].release()
        assert others.num_bytes == 700_000
        await held[0].receive()  # one more part, and the end
        assert others.num_bytes == 701_000, "its reader still works on it"
        assert await held[0].receive() == GONE
        assert others.num_bytes == 600_000
        for body in held:
            await body.drop_rest()
        assert others.num_bytes == 0

    asyncio.run(read())

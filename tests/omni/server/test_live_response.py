"""Answers in pieces end with their last one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from omni.server.serving.live_response import EventStream, LastPiece


def sent(pieces: Sequence[bytes]) -> tuple[list[tuple[bytes, bool]], bool]:
    """The bodies that an answer of these pieces sends, each with whether more follows; and whether
    whatever made the pieces was closed."""
    bodies: list[tuple[bytes, bool]] = []
    is_closed = False
    has_begun = False

    async def made() -> AsyncIterator[bytes]:
        nonlocal is_closed
        try:
            for each in pieces:
                yield each
        finally:
            is_closed = True

    async def send(message: Any) -> None:
        nonlocal has_begun
        assert (message["type"] == "http.response.body") == has_begun
        if has_begun:
            bodies.append((message["body"], message["more_body"]))
        has_begun = True

    async def receive() -> Any:
        await asyncio.Event().wait()

    asyncio.run(EventStream(made(), 60.0)({"type": "http"}, receive, send))
    return bodies, is_closed


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"a", LastPiece(b"b")], [(b"a", True), (b"b", False)]),
        ([LastPiece(b"b")], [(b"b", False)]),
        ([b"a", b"b"], [(b"a", True), (b"b", True), (b"", False)]),
        ([], [(b"", False)]),
    ],
)
def test_the_last_piece_is_sent_with_the_end(
    pieces: Sequence[bytes], expected: list[tuple[bytes, bool]]
) -> None:
    assert sent(pieces) == (expected, True)


def test_nothing_follows_the_last_piece() -> None:
    assert sent([LastPiece(b"a"), b"b"]) == ([(b"a", False)], True)

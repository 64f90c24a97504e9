"""Streams of responses: each read returns everything since the previous one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from engine import TextPrompt, Waveform
from engine.interface.outputs import OutputDelta
from omni.requests.request import OmniDelta, OmniRequest
from omni.server.serving.admission_queue import AdmissionQueue
from omni.server.serving.api_error import ApiError
from omni.server.serving.client import Client
from omni.server.serving.meters import Meters
from omni.server.serving.pipeline_server import ServedPipeline
from omni.server.serving.response_stream import PipelineResponse, ResponseStream, Update


@dataclass
class _Pipeline:
    """A served pipeline that sends the outputs of the test."""

    name: str = "mine"
    meters: Meters = field(default_factory=lambda: Meters(()))
    queue: AdmissionQueue = field(default_factory=lambda: AdmissionQueue(1, 1))
    sink: Callable[[OmniDelta], object] = lambda _: None

    def check_stages(self) -> None:
        """Every stage has workers."""

    @property
    def driver(self) -> _Pipeline:
        return self

    def submit(self, _: OmniRequest, __: str, sink: Callable[[OmniDelta], object]) -> None:
        self.sink = sink

    def discard(self, _: object) -> None:
        """No request runs."""

    async def put(self, delta: OmniDelta) -> None:
        self.sink(delta)
        await asyncio.sleep(0)  # the event loop delivers it


def _said(text: str, *, sound: int = 0, is_over: bool = False) -> OmniDelta:
    audio = Waveform(torch.zeros(sound), 8) if sound else None
    writer = OutputDelta("r", is_over, text=text)
    return OmniDelta(
        "r", (("writer", writer), ("speaker", OutputDelta("r", is_over, audio=audio))), is_over
    )


@asynccontextmanager
async def _updates(*stages: list[str]) -> AsyncIterator[tuple[_Pipeline, AsyncIterator[Update]]]:
    """A pipeline that runs one request, and the request's updates."""
    pipeline = _Pipeline()
    request = OmniRequest(TextPrompt("x"), request_id="r")
    served = cast(ServedPipeline, pipeline)
    async with ResponseStream(served, Client("id", None), [request], "prompt", *stages) as stream:
        await asyncio.sleep(0)  # the request begins
        yield pipeline, stream.updates()


def _text(update: Update) -> str | None:
    delta = update.of("writer")
    return None if delta is None else delta.text


def test_a_reader_gets_all_text_and_sound_since_its_last_read():
    async def run() -> None:
        async with _updates() as (pipeline, updates):
            for text in ("a", "b", "c"):
                await pipeline.put(_said(text))
                assert _text(await anext(updates)) == text
            for text, sound in (("a", 2), ("b", 0), ("c", 3)):
                await pipeline.put(_said(text, sound=sound))
            update = await anext(updates)
            assert _text(update) == "abc"
            spoken = update.sound("speaker")
            assert spoken is not None and len(spoken.samples) == 5
            await pipeline.put(_said("the end", is_over=True))
            update = await anext(updates)
            assert _text(update) == "the end"
            assert update.sound("speaker") is None

    asyncio.run(run())


def test_a_stream_ends_when_the_stages_that_it_waits_for_are_done():
    async def run() -> None:
        async with _updates(["writer"]) as (pipeline, updates):
            await pipeline.put(_said("a"))
            assert not (await anext(updates)).is_last
            await pipeline.put(OmniDelta("r", (("writer", OutputDelta("r", True, text="b")),)))
            update = await anext(updates)
            assert update.is_last and _text(update) == "b"
            with pytest.raises(StopAsyncIteration):
                await anext(updates)

    asyncio.run(run())


class Pieces(PipelineResponse):
    """Sends the given pieces; raises those that are exceptions."""

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
    """The bodies of a response of these pieces, each with its ``more_body``."""
    limits = SimpleNamespace(request_timeout_s=60.0)
    pipeline = SimpleNamespace(omni=SimpleNamespace(pipeline=None))
    server = SimpleNamespace(find=lambda _: pipeline, settings=SimpleNamespace(limits=limits))
    request: Any = SimpleNamespace(state=SimpleNamespace(server=server, client=Client("id", None)))
    response = Pieces(request, "m", is_streamed=True, media_type=media_type)
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
def test_pieces_are_sent_one_by_one_before_the_end(pieces: Sequence[bytes]) -> None:
    expected = [*((each, True) for each in pieces), (b"", False)]
    assert sent(pieces, "text/event-stream") == expected


@pytest.mark.parametrize("error", [ApiError.bad_request("wrong"), KeyError("secret")])
def test_an_error_after_the_first_piece_is_an_event_or_cuts_the_response(
    error: Exception,
) -> None:
    first, (last, more) = sent([b"a", error], "text/event-stream")
    assert (first, more) == ((b"a", True), False)
    reported = json.loads(last.removeprefix(b"data: "))["error"]["message"]
    assert reported == ("wrong" if isinstance(error, ApiError) else str(ApiError.internal()))
    assert sent([b"a", error], "audio/wav") == [(b"a", True)]


def test_an_error_before_the_first_piece_is_raised() -> None:
    with pytest.raises(ApiError, match="wrong"):
        sent([ApiError.bad_request("wrong"), b"a"], "text/event-stream")

"""What a reader gets of a request: the newest state, and all the sound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from engine import TextPrompt, Waveform
from omni.requests.request import OmniOutput
from omni.server.serving.admission_queue import AdmissionQueue
from omni.server.serving.meters import Meters
from omni.server.serving.parsed_request import ParsedRequest
from omni.server.serving.pipeline_server import ServedPipeline
from omni.server.serving.response_stream import ResponseStream, Update
from stages import StageOutput


@dataclass
class _Pipeline:
    """A served pipeline whose outputs the test puts in."""

    name: str = "mine"
    meters: Meters = field(default_factory=lambda: Meters(()))
    queue: AdmissionQueue = field(default_factory=lambda: AdmissionQueue(1, 1))
    put: Callable[[OmniOutput], object] = lambda _: None

    @property
    def omni(self) -> _Pipeline:
        return self

    def check_stages(self) -> None:
        """All have workers."""

    async def agenerate(
        self, _: ParsedRequest, *, on_progress: Callable[[OmniOutput], Any]
    ) -> None:
        self.put = on_progress
        await asyncio.Event().wait()


def _said(text: str, *, sound: int = 0, is_over: bool = False) -> OmniOutput:
    delta = Waveform(torch.zeros(sound), 8) if sound else None
    stages = {
        "writer": StageOutput("r", "writer", finished=is_over, text=text),
        "speaker": StageOutput("r", "speaker", finished=is_over, audio_delta=delta),
    }
    return OmniOutput("r", stages, is_over)


def _read(act: Callable[[_Pipeline, Callable[[], Coroutine[Any, Any, Update]]], Any]) -> None:
    """Have a test put outputs in and look for updates in turns."""

    async def run() -> None:
        pipeline = _Pipeline()
        request = ParsedRequest(TextPrompt("x"), request_id="r")
        served = cast(ServedPipeline, pipeline)
        async with ResponseStream(served, [request], "prompt") as stream:
            await asyncio.sleep(0)  # the request has begun
            updates = stream.updates()
            await act(pipeline, lambda: anext(updates))

    asyncio.run(run())


def _text(update: Update) -> str | None:
    return update.output.stages["writer"].text


def test_a_reader_gets_each_update_as_it_comes():
    async def act(pipeline: _Pipeline, look: Callable[[], Coroutine[Any, Any, Update]]) -> None:
        for text in ("a", "ab", "abc"):
            pipeline.put(_said(text))
            assert _text(await look()) == text

    _read(act)


def test_a_slow_reader_gets_the_newest_text_and_all_the_sound():
    async def act(pipeline: _Pipeline, look: Callable[[], Coroutine[Any, Any, Update]]) -> None:
        for text, sound in (("a", 2), ("ab", 0), ("abc", 3)):
            pipeline.put(_said(text, sound=sound))
        update = await look()
        assert _text(update) == "abc"
        assert [len(each.samples) for each in update.sounds["speaker"]] == [2, 3]
        pipeline.put(_said("the end", is_over=True))
        update = await look()
        assert _text(update) == "the end"
        assert not update.sounds

    _read(act)


def test_a_stream_ends_when_the_stages_that_it_waits_for_are_done():
    async def run() -> None:
        pipeline = _Pipeline()
        request = ParsedRequest(TextPrompt("x"), request_id="r")
        served = cast(ServedPipeline, pipeline)
        async with ResponseStream(served, [request], "prompt", ["writer"]) as stream:
            await asyncio.sleep(0)
            updates = stream.updates()
            pipeline.put(_said("a"))
            assert not (await anext(updates)).is_last
            stages = {"writer": StageOutput("r", "writer", finished=True, text="ab")}
            pipeline.put(OmniOutput("r", stages, finished=False))
            update = await anext(updates)
            assert update.is_last and _text(update) == "ab"
            with pytest.raises(StopAsyncIteration):
                await anext(updates)

    asyncio.run(run())

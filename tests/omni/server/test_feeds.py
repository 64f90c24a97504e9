"""What a reader gets of a request, and when: text may wait for more of it, nothing else does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from engine import TextPrompt, Waveform
from omni.requests.request import OmniOutput
from omni.server.serving.asked import AskedRequest
from omni.server.serving.feeds import Feeds, Update
from omni.server.serving.meters import Meters
from omni.server.serving.served_pipeline import ServedPipeline
from omni.server.serving.turn_queue import TurnQueue
from stages import StageOutput

FOR_EVER = 3600.0


@dataclass
class _Pipeline:
    """A served pipeline whose outputs the test puts in."""

    name: str = "mine"
    meters: Meters = field(default_factory=lambda: Meters(()))
    turn_queue: TurnQueue = field(default_factory=lambda: TurnQueue(1, 1))
    put: Callable[[OmniOutput], object] = lambda _: None

    @property
    def omni(self) -> _Pipeline:
        return self

    def check_stages(self) -> None:
        """All have workers."""

    async def agenerate(self, _: AskedRequest, *, on_progress: Callable[[OmniOutput], Any]) -> None:
        self.put = on_progress
        await asyncio.Event().wait()


def _said(
    text: str, *, is_written: bool = False, sound: int = 0, is_over: bool = False
) -> OmniOutput:
    delta = Waveform(torch.zeros(sound), 8) if sound else None
    stages = {
        "writer": StageOutput("r", "writer", finished=is_written, text=text),
        "speaker": StageOutput("r", "speaker", finished=is_over, audio_delta=delta),
    }
    return OmniOutput("r", stages, is_over)


def _read(
    text_gap_s: float, act: Callable[[_Pipeline, Callable[[], Coroutine[Any, Any, Update]]], Any]
) -> None:
    """Have a test put outputs in and look for updates in turns."""

    async def run() -> None:
        pipeline = _Pipeline()
        request = AskedRequest(TextPrompt("x"), request_id="r")
        served = cast(ServedPipeline, pipeline)
        async with Feeds(served, [request], "prompt", text_gap_s=text_gap_s) as feeds:
            await asyncio.sleep(0)  # the request has begun
            updates = feeds.updates()
            await act(pipeline, lambda: anext(updates))

    asyncio.run(run())


def _text(update: Update) -> str | None:
    return update.output.stages["writer"].text


async def _is_silent(reading: asyncio.Task[Update]) -> bool:
    for _ in range(5):
        await asyncio.sleep(0)
    return not reading.done()


def test_each_text_is_handed_out_at_once_where_none_may_wait():
    async def act(pipeline: _Pipeline, look: Callable[[], Coroutine[Any, Any, Update]]) -> None:
        for text in ("a", "ab", "abc"):
            pipeline.put(_said(text))
            assert _text(await look()) == text

    _read(0.0, act)


def test_text_waits_for_sound_for_the_end_of_a_stage_and_for_its_own_end():
    async def act(pipeline: _Pipeline, look: Callable[[], Coroutine[Any, Any, Update]]) -> None:
        pipeline.put(_said("a"))
        assert _text(await look()) == "a", "the first one waits for nothing"
        for text, was_written, is_written, sound in (
            ("b", False, False, 3),
            ("c", False, True, 0),
            ("d", True, True, 2),
        ):
            reading = asyncio.ensure_future(look())
            pipeline.put(_said(text, is_written=was_written))
            assert await _is_silent(reading)
            pipeline.put(_said(2 * text, is_written=is_written, sound=sound))
            update = await reading
            assert _text(update) == 2 * text
            sounds = update.sounds.get("speaker", ())
            assert sum(len(each.samples) for each in sounds) == sound
        reading = asyncio.ensure_future(look())
        pipeline.put(_said("the end", is_written=True, is_over=True))
        assert _text(await reading) == "the end"

    _read(FOR_EVER, act)


def test_text_after_which_nothing_comes_is_handed_out_all_the_same():
    async def act(pipeline: _Pipeline, look: Callable[[], Coroutine[Any, Any, Update]]) -> None:
        pipeline.put(_said("a"))
        await look()
        pipeline.put(_said("ab"))
        assert _text(await look()) == "ab"

    _read(0.02, act)

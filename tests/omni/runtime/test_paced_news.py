"""Text may wait for more of it, or for sound; nothing else waits, and none is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from threading import Thread
from typing import Any, TypeAlias

import pytest
import torch

from engine import Waveform
from omni.requests.request import OmniOutput
from omni.requests.stage_time import StageTime
from omni.runtime.loop_mail import LoopMail
from omni.runtime.paced_news import PacedNews
from stages import StageOutput
from tests.support.patience import PATIENCE_S

FOR_EVER = 3600.0
News: TypeAlias = OmniOutput | BaseException


def _said(text: str, *, sound: int = 0, has_moved: bool = False, is_over: bool = False) -> News:
    delta = Waveform(torch.zeros(sound), 8) if sound else None
    stages = {
        "writer": StageOutput("r", "writer", finished=is_over, text=text),
        "speaker": StageOutput("r", "speaker", finished=is_over, audio_delta=delta),
    }
    timeline = (StageTime("writer", 1.0),) if has_moved else ()
    return OmniOutput("r", stages, is_over, timeline=timeline)


def _texts(seen: list[News]) -> list[str | None]:
    texts = []
    for news in seen:
        assert isinstance(news, OmniOutput)
        texts.append(news.stages["writer"].text)
    return texts


async def _handed_out() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():
            await asyncio.sleep(0)


def _ended(seen: list[News]) -> bool:
    return bool(seen) and isinstance(seen[-1], OmniOutput) and seen[-1].finished


def _run(gap_s: float, act: Callable[[PacedNews, list[News]], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        seen: list[News] = []
        await act(PacedNews(LoopMail(asyncio.get_running_loop()), seen.append, gap_s), seen)

    asyncio.run(run())


def test_the_first_one_waits_for_nothing_and_text_after_it_does():
    async def act(paced: PacedNews, seen: list[News]) -> None:
        paced.put(_said("a"))
        await _handed_out()
        assert _texts(seen) == ["a"]
        for text in ("ab", "abc"):
            paced.put(_said(text))
            await _handed_out()
        assert _texts(seen) == ["a"]

    _run(FOR_EVER, act)


@pytest.mark.parametrize(
    "kind",
    [{"sound": 3}, {"has_moved": True}, {"is_over": True}],
    ids=["sound", "a stage that it entered or left", "its end"],
)
def test_whatever_is_more_than_text_is_handed_on_at_once_and_what_was_kept_is_in_it(
    kind: dict[str, Any],
):
    async def act(paced: PacedNews, seen: list[News]) -> None:
        paced.put(_said("a"))
        paced.put(_said("ab"))
        paced.put(_said("abc", **kind))
        await _handed_out()
        assert _texts(seen) == ["a", "abc"]
        paced.put(_said("abcd"))
        await _handed_out()
        assert _texts(seen) == ["a", "abc"], "the next text waits again"

    _run(FOR_EVER, act)


def test_the_pipelines_end_is_handed_on_at_once():
    async def act(paced: PacedNews, seen: list[News]) -> None:
        crash = RuntimeError("it is over")
        paced.put(_said("a"))
        paced.put(_said("ab"))
        paced.put(crash)
        await _handed_out()
        assert seen[1:] == [crash]

    _run(FOR_EVER, act)


def test_no_output_without_text_makes_the_first_text_wait():
    async def act(paced: PacedNews, seen: list[News]) -> None:
        for text in ("", "", "a", "ab"):
            paced.put(_said(text))
        await _handed_out()
        assert _texts(seen) == ["", "", "a"]

    _run(FOR_EVER, act)


def test_text_after_which_nothing_comes_is_handed_on_all_the_same():
    async def act(paced: PacedNews, seen: list[News]) -> None:
        paced.put(_said("a"))
        paced.put(_said("ab"))
        await _until(lambda: len(seen) == 2)
        assert _texts(seen) == ["a", "ab"]

    _run(0.01, act)


def test_text_that_was_kept_is_not_handed_on_after_what_came_later():
    async def act(paced: PacedNews, seen: list[News]) -> None:
        for news in (_said("a"), _said("ab"), _said("abc", is_over=True)):
            paced.put(news)
        await asyncio.sleep(0.1)  # several times as long as any text is kept
        assert _texts(seen) == ["a", "abc"]

    _run(0.01, act)


def test_text_that_was_kept_is_handed_on_behind_what_came_before():
    async def act(paced: PacedNews, seen: list[News]) -> None:
        paced.put(_said("a"))  # on its way yet
        paced.put(_said("ab"))
        paced._look()  # as a timer calls it that is up at this moment
        await _handed_out()
        assert _texts(seen) == ["a", "ab"]
        paced.put(_said("abc"))
        paced._look()
        paced.put(_said("abcd", sound=1))
        await _handed_out()
        assert _texts(seen) in (["a", "ab", "abc", "abcd"], ["a", "ab", "abcd"])

    _run(FOR_EVER, act)


def test_no_timer_is_left(monkeypatch: pytest.MonkeyPatch):
    async def act(paced: PacedNews, _: list[News]) -> None:
        loop = asyncio.get_running_loop()
        timers: list[asyncio.TimerHandle] = []
        call_later = loop.call_later

        def noting(*given: Any) -> asyncio.TimerHandle:
            timers.append(call_later(*given))
            return timers[-1]

        monkeypatch.setattr(loop, "call_later", noting)
        for sound in (1, 2, 3):
            paced.put(_said("a", sound=sound))
            await _handed_out()
        assert [timer.cancelled() for timer in timers] == [True, True, False]
        paced.close()
        paced.put(_said("ab", sound=4))
        await _handed_out()
        assert all(timer.cancelled() for timer in timers)

    _run(FOR_EVER, act)


def test_one_that_is_closed_hands_nothing_on():
    async def act(paced: PacedNews, seen: list[News]) -> None:
        paced.put(_said("a"))
        await _handed_out()
        paced.put(_said("ab"))
        paced._look()
        paced.close()
        paced.put(_said("abc", is_over=True))
        await _handed_out()
        assert _texts(seen) == ["a"]

    _run(FOR_EVER, act)


@pytest.mark.parametrize("gap_s", [-1.0, float("nan"), float("inf"), "0.1"])
def test_what_is_no_number_of_seconds_is_refused(gap_s: Any):
    async def act(paced: PacedNews, _: list[News]) -> None: ...

    with pytest.raises(ValueError, match="text_gap_s must be a number of seconds.*, got"):
        _run(gap_s, act)


@pytest.mark.parametrize("gap_s", [0.00001, 0.001, FOR_EVER])
def test_from_another_thread_texts_only_grow_and_all_sound_and_the_end_come(gap_s: float):
    number = 2000

    async def act(paced: PacedNews, seen: list[News]) -> None:
        def drive() -> None:
            for length in range(1, number):
                paced.put(_said("x" * length, sound=int(length % 7 == 0)))
                if length % 50 == 0:
                    time.sleep(3 * min(gap_s, 0.0005))  # in which what is kept is looked for
            paced.put(_said("x" * number, is_over=True))

        thread = Thread(target=drive)
        thread.start()
        await _until(lambda: _ended(seen))
        thread.join()
        lengths = [len(text or "") for text in _texts(seen)]
        assert lengths == sorted(set(lengths))
        assert {length for length in range(7, number, 7)} <= set(lengths)
        assert lengths[-1] == number

    _run(gap_s, act)

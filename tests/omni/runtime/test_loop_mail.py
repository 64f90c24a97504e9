"""What other threads tell an event loop comes in order, whole, and by few wake-ups."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from omni.runtime import loop_mail
from omni.runtime.loop_mail import LoopMail


def test_what_is_posted_before_the_loop_wakes_comes_by_one_wake_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> tuple[list[int], int]:
        loop = asyncio.get_running_loop()
        calls = 0
        call = loop.call_soon_threadsafe

        def counted(callback: Any, *args: Any) -> Any:
            nonlocal calls
            calls += 1
            return call(callback, *args)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        mail, taken = LoopMail(loop), list[int]()
        for number in range(100):
            mail.post(taken.append, number)
        await asyncio.sleep(0)
        return taken, calls

    assert asyncio.run(scenario()) == ([*range(100)], 1)


def test_threads_that_post_at_once_lose_nothing_and_keep_their_order() -> None:
    async def scenario() -> list[tuple[int, int]]:
        mail, taken, is_over = LoopMail.here(), list[tuple[int, int]](), asyncio.Event()

        def take(news: tuple[int, int]) -> None:
            taken.append(news)
            if len(taken) == 4 * 2000:
                is_over.set()

        def post(thread: int) -> None:
            for number in range(2000):
                mail.post(take, (thread, number))

        threads = [threading.Thread(target=post, args=(each,)) for each in range(4)]
        for thread in threads:
            thread.start()
        await is_over.wait()
        for thread in threads:
            thread.join()
        return taken

    taken = asyncio.run(scenario())
    for thread in range(4):
        assert [number for who, number in taken if who == thread] == [*range(2000)]


def test_one_who_does_not_take_his_costs_nobody_else_theirs() -> None:
    told: list[object] = []

    async def scenario() -> list[int]:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
        mail, taken = LoopMail(loop), list[int]()
        mail.post(taken.append, 1)
        mail.post(lambda _: 1 // 0, 2)
        mail.post(taken.append, 3)
        while len(taken) < 2:
            await asyncio.sleep(0)
        return taken

    assert asyncio.run(scenario()) == [1, 3]
    assert [type(each) for each in told] == [ZeroDivisionError]


def test_who_posts_to_a_loop_that_is_closed_is_told_also_in_the_middle() -> None:
    async def begin() -> LoopMail:
        mail = LoopMail(asyncio.get_running_loop())
        mail.post(lambda _: None, 1)
        return mail

    mail = asyncio.run(begin())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the event loop is closed"):
            mail.post(lambda _: None, 2)


def test_every_loop_has_its_own_and_those_of_closed_ones_are_forgotten() -> None:
    async def own() -> bool:
        return LoopMail.here() is LoopMail.here()

    for _ in range(3):
        assert asyncio.run(own())
    assert len([loop for loop in loop_mail._MAILS if loop.is_closed()]) == 1

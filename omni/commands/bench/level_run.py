"""Puts one level of load on a target, and keeps what was seen."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from omni.commands.bench.clock import Clock
from omni.commands.bench.load_level import LoadLevel
from omni.commands.bench.load_source import LoadConversation, LoadSource, Send
from omni.commands.bench.loop_lag import LoopLag
from omni.commands.bench.measured_request import MeasuredRequest, RequestFailure
from omni.commands.bench.request_timer import RequestTimer

__all__ = ["LevelRun", "LoadAmount"]


@dataclass(frozen=True, slots=True)
class LoadAmount:
    """How much a level is to send.

    Attributes:
        num_conversations: at most.
        duration_s: after which no conversation begins any more; None: no such limit.
        timeout_s: of one request.
        seed: of arrivals.
    """

    num_conversations: int
    duration_s: float | None = None
    timeout_s: float = 600.0
    seed: int = 0


class LevelRun:
    """One level of load, from its first request to the last answer.

    Also one that is cut short has what was seen until then.

    Args:
        level: how much load at once.
        amount: how much of it.
        index: of the level among all, from 0; -1 for warming up.
        clock: to measure with.
        on_end: called with every request that has ended.

    Attributes:
        level: as given.
        records: of the requests that have ended, in the order of their ends.
        num_in_flight: requests that were sent and have not ended.
        lag: of the event loop that sends.
    """

    def __init__(
        self,
        level: LoadLevel,
        amount: LoadAmount,
        *,
        index: int = 0,
        clock: Clock | None = None,
        on_end: Callable[[MeasuredRequest], object] = lambda _: None,
    ) -> None:
        self.level = level
        self.records: list[MeasuredRequest] = []
        self.num_in_flight = 0
        self._amount = amount
        self._index = index
        self._clock = clock or Clock()
        self._on_end = on_end
        self.lag = LoopLag(self._clock)
        self._began: float | None = None
        self._ended: float | None = None
        self._cpu_began = 0.0
        self._cpu_s: float | None = None

    @property
    def duration_s(self) -> float:
        """Seconds from the beginning to the last end, or until now; 0 if it has not begun."""
        if self._began is None:
            return 0.0
        return (self._clock.now() if self._ended is None else self._ended) - self._began

    @property
    def cpu_s(self) -> float:
        """Seconds of CPU that this process used meanwhile."""
        return self._clock.cpu() - self._cpu_began if self._cpu_s is None else self._cpu_s

    async def run(self, source: LoadSource) -> None:
        """Send, and wait for all answers."""
        self._began, self._cpu_began = self._clock.now(), self._clock.cpu()
        lag = asyncio.create_task(self.lag.run())
        try:
            if self.level.concurrency is not None:
                await self._closed_loop(source, self.level.concurrency)
            else:
                assert self.level.rate is not None
                await self._open_loop(source, self.level.rate)
        except ExceptionGroup as errors:  # of the loops' tasks; one tells enough
            raise errors.exceptions[0] from errors
        finally:
            lag.cancel()
            self._ended, self._cpu_s = self._clock.now(), self._clock.cpu() - self._cpu_began

    async def _closed_loop(self, source: LoadSource, concurrency: int) -> None:
        conversations = self._conversations(source)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, self._amount.num_conversations)):
                group.create_task(self._client(conversations))

    async def _client(self, conversations: Iterator[LoadConversation]) -> None:
        scheduled = self._clock.now()
        while self._goes_on(scheduled):
            conversation = next(conversations, None)
            if conversation is None:
                return
            await self._hold(conversation, scheduled)
            scheduled = self._clock.now()

    async def _open_loop(self, source: LoadSource, rate: float) -> None:
        chance = random.Random(f"{self._amount.seed} {self._index}")
        scheduled = self._clock.now()
        async with asyncio.TaskGroup() as group:
            for conversation in self._conversations(source):
                await self._clock.sleep_until(scheduled)
                if not self._goes_on(scheduled):
                    return
                group.create_task(self._hold(conversation, scheduled))
                scheduled += chance.expovariate(rate)

    def _conversations(self, source: LoadSource) -> Iterator[LoadConversation]:
        for number in range(self._amount.num_conversations):
            yield source.conversation(self._index, number)

    def _goes_on(self, moment: float) -> bool:
        assert self._began is not None
        limit = self._amount.duration_s
        return limit is None or moment - self._began < limit

    async def _hold(self, conversation: LoadConversation, scheduled: float) -> None:
        """Send the requests of a conversation one after the other, while they are answered."""
        answer: str | None = None
        while (send := conversation.next(answer)) is not None:
            answer = await self._send(send, scheduled)
            if answer is None:
                return
            scheduled = self._clock.now()

    async def _send(self, send: Send, scheduled: float) -> str | None:
        timer = RequestTimer(scheduled, self._clock.now)
        answer, failure = None, None
        self.num_in_flight += 1
        try:
            async with asyncio.timeout(self._amount.timeout_s):
                answer = await send(timer)
        except RequestFailure as error:
            failure = error
        except TimeoutError:
            message = f"it was not answered within {self._amount.timeout_s:g} s (--timeout)"
            failure = RequestFailure("timeout", message)
        record = timer.end(failure)
        self.num_in_flight -= 1
        self.records.append(record)
        self._on_end(record)
        return answer

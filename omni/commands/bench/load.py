"""Load: how many requests are sent, and when."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from omni.commands.bench.load_sources import (
    LoadSource,
    LoadTurns,
    MadeUpShape,
    MadeUpSource,
    TokenLengths,
    line_source,
)
from omni.commands.bench.measured_request import LoadTarget, MeasuredRequest, RequestFailure, Send

__all__ = ["LevelRun", "LoadAmount", "LoadLevel", "Measurement", "MeasurementPlan", "parse_levels"]

_MOST_AT_ONCE = 65_536
_FASTEST_PER_S = 1_000_000.0
_LAG_EVERY_S = 0.01
_PROBE_WORDS = (32, 96)
"""Of the two prompts whose tokens are counted to find how many a word takes."""

_WARMUP = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLevel:
    """A level of load; exactly one of the two is set.

    Attributes:
        concurrency: a closed loop: so many clients, each of which sends its next request when the
            one before has ended.
        rate: an open loop: so many arrivals a second on average, by a Poisson process, however
            slow the answers are.
    """

    concurrency: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError("a level is either a concurrency or a rate")
        if self.concurrency is not None and not 1 <= self.concurrency <= _MOST_AT_ONCE:
            raise ValueError(
                f"--concurrency: must be from 1 to {_MOST_AT_ONCE}, got {self.concurrency}"
            )
        if self.rate is not None and not 0.0 < self.rate <= _FASTEST_PER_S:
            raise ValueError(
                f"--rate: must be above 0 and at most {_FASTEST_PER_S:g} requests a second, got "
                f"{self.rate:g}"
            )

    @property
    def label(self) -> str:
        """The level in tables."""
        return f"{self.concurrency}" if self.concurrency is not None else f"{self.rate:g}/s"


def parse_levels(concurrency: str | None, rate: str | None) -> tuple[LoadLevel, ...]:
    """Read ``1,2,4`` of one of two flags; without either, one request at a time.

    Raises:
        ValueError: both are given, or one is wrong; names the flag.
    """
    if concurrency is not None and rate is not None:
        raise ValueError("--concurrency waits for answers and --rate does not: give one of them")
    if rate is not None:
        return tuple(LoadLevel(rate=each) for each in _numbers("--rate", rate))
    numbers = _numbers("--concurrency", "1" if concurrency is None else concurrency)
    for number in numbers:
        if number != math.floor(number):
            raise ValueError(f"--concurrency: must be whole numbers, got {number:g}")
    return tuple(LoadLevel(concurrency=int(number)) for number in numbers)


def _numbers(flag: str, text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [math.nan]
    if not all(math.isfinite(number) and number > 0 for number in numbers):
        raise ValueError(f"{flag}: must be numbers above 0, such as 1,2,4; got {text!r:.80}")
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"{flag}: a number stands twice in {text!r:.80}")
    return numbers


@dataclass(frozen=True, slots=True)
class LoadAmount:
    """How much a level sends.

    Attributes:
        num_conversations: at most.
        duration_s: after which no conversation begins; None: no such limit.
        timeout_s: of one request.
        seed: of arrivals.
    """

    num_conversations: int
    duration_s: float | None = None
    timeout_s: float = 600.0
    seed: int = 0


class LevelRun:
    """One level of load, from its first request to the last answer.

    A run that is cancelled keeps what it recorded until then. Its clock is the event loop's.

    Args:
        level: of load.
        amount: that it sends.
        index: of the level among all, from 0; -1 to warm up.
        on_end: called with every request that has ended.

    Attributes:
        level: as given.
        records: of the requests that have ended, in the order of their ends.
        num_in_flight: requests that were sent and have not ended.
        loop_lags: seconds by which the event loop was late, every hundredth of a second. What
            arrives meanwhile is seen late by as much, so that no time is more precise than that.
        duration_s: seconds from the beginning to the last end.
        cpu_s: seconds of CPU that this process used meanwhile.
    """

    def __init__(
        self,
        level: LoadLevel,
        amount: LoadAmount,
        *,
        index: int = 0,
        on_end: Callable[[MeasuredRequest], object] = lambda _: None,
    ) -> None:
        self.level = level
        self.records: list[MeasuredRequest] = []
        self.num_in_flight = 0
        self.loop_lags: list[float] = []
        self.duration_s = self.cpu_s = 0.0
        self._amount = amount
        self._index = index
        self._on_end = on_end

    async def run(self, source: LoadSource) -> None:
        """Send, and wait for all answers."""
        self._now = asyncio.get_running_loop().time
        self._began, cpu_began = self._now(), time.process_time()
        lag = asyncio.create_task(self._measure_lag())
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
            self.duration_s = self._now() - self._began
            self.cpu_s = time.process_time() - cpu_began

    async def _measure_lag(self) -> None:
        while True:
            planned = self._now() + _LAG_EVERY_S
            await asyncio.sleep(_LAG_EVERY_S)
            self.loop_lags.append(max(0.0, self._now() - planned))

    async def _closed_loop(self, source: LoadSource, concurrency: int) -> None:
        conversations = self._conversations(source)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, self._amount.num_conversations)):
                group.create_task(self._client(conversations))

    async def _client(self, conversations: Iterator[LoadTurns]) -> None:
        scheduled = self._now()
        while self._goes_on(scheduled) and (conversation := next(conversations, None)) is not None:
            await self._hold(conversation, scheduled)
            scheduled = self._now()

    async def _open_loop(self, source: LoadSource, rate: float) -> None:
        chance = random.Random(f"{self._amount.seed} {self._index}")
        scheduled = self._now()
        async with asyncio.TaskGroup() as group:
            for conversation in self._conversations(source):
                await asyncio.sleep(max(0.0, scheduled - self._now()))
                if not self._goes_on(scheduled):
                    return
                group.create_task(self._hold(conversation, scheduled))
                scheduled += chance.expovariate(rate)

    def _conversations(self, source: LoadSource) -> Iterator[LoadTurns]:
        for number in range(self._amount.num_conversations):
            yield source(self._index, number)

    def _goes_on(self, moment: float) -> bool:
        limit = self._amount.duration_s
        return limit is None or moment - self._began < limit

    async def _hold(self, conversation: LoadTurns, scheduled: float) -> None:
        """Send the requests of a conversation one after the other, while they are answered."""
        send = next(conversation, None)
        while send is not None:
            answer = await self._send(send, scheduled)
            if answer is None:
                return
            scheduled = self._now()
            try:
                send = conversation.send(answer)
            except StopIteration:
                return

    async def _send(self, send: Send, scheduled: float) -> str | None:
        record = MeasuredRequest(scheduled, self._now)
        answer, failure = None, None
        self.num_in_flight += 1
        try:
            async with asyncio.timeout(self._amount.timeout_s):
                answer = await send(record)
        except RequestFailure as error:
            failure = error
        except TimeoutError:
            message = f"it was not answered within {self._amount.timeout_s:g} s (--timeout)"
            failure = RequestFailure("timeout", message)
        record.end(failure)
        self.num_in_flight -= 1
        self.records.append(record)
        self._on_end(record)
        return answer


@dataclass(frozen=True, slots=True)
class MeasurementPlan:
    """The levels of a measurement, and what each of them sends.

    Attributes:
        levels: of load, in their order.
        amount: that each level sends.
        warmup: requests before the first level, or conversations, which are not counted.
        shape: of requests that are made up.
    """

    levels: Sequence[LoadLevel]
    amount: LoadAmount
    warmup: int = 0
    shape: MadeUpShape = field(default_factory=MadeUpShape)


class Measurement:
    """Several levels of load on one target, one after the other.

    Args:
        plan: what is sent.
        on_begin: called before the first request that counts.
        on_end: called with every request that counts, when it has ended.

    Attributes:
        runs: levels that have begun; the last one may be cut short.
    """

    def __init__(
        self,
        plan: MeasurementPlan,
        *,
        on_begin: Callable[[], object] = lambda: None,
        on_end: Callable[[MeasuredRequest], object] = lambda _: None,
    ) -> None:
        self.runs: list[LevelRun] = []
        self._plan = plan
        self._on_begin = on_begin
        self._on_end = on_end

    async def run(self, target: LoadTarget, sends: Sequence[Send] | None = None) -> None:
        """Measure all levels.

        Args:
            target: of the load.
            sends: the requests; None makes them up.

        Raises:
            ValueError: not even the first requests are answered.
        """
        source = await self._made_up(target) if sends is None else line_source(sends)
        if self._plan.warmup:
            await self._warm_up(source)
        self._on_begin()
        for index, level in enumerate(self._plan.levels):
            await target.reset_caches()
            run = LevelRun(level, self._plan.amount, index=index, on_end=self._on_end)
            self.runs.append(run)
            await run.run(source)

    async def _made_up(self, target: LoadTarget) -> LoadSource:
        shape = self._plan.shape
        source = MadeUpSource(target, shape)
        counts = []
        for words in _PROBE_WORDS:
            record = MeasuredRequest(0.0)
            try:
                await source.probe(words)(record)
            except RequestFailure as error:
                raise _nothing_works(error) from error
            if record.prompt_tokens is None:  # the server counts no tokens; a word is about one
                return source.conversation
            counts.append((words, record.prompt_tokens))
        return MadeUpSource(target, shape, TokenLengths.measured(*counts)).conversation

    async def _warm_up(self, source: LoadSource) -> None:
        most = max(level.concurrency or 1 for level in self._plan.levels)
        amount = replace(self._plan.amount, num_conversations=self._plan.warmup, duration_s=None)
        level = LoadLevel(concurrency=min(most, self._plan.warmup))
        run = LevelRun(level, amount, index=_WARMUP)
        await run.run(source)
        failures = [record.failure for record in run.records if record.failure is not None]
        if len(failures) == len(run.records):
            raise _nothing_works(failures[0])


def _nothing_works(error: RequestFailure) -> ValueError:
    return ValueError(f"the first request was not answered: {error.kind}: {error}")

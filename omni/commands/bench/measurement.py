"""Several levels of load on one target, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from omni.commands.bench.clock import Clock
from omni.commands.bench.goodput_limits import GoodputLimits
from omni.commands.bench.level_report import LevelReport
from omni.commands.bench.level_run import LevelRun, LoadAmount
from omni.commands.bench.load_level import LoadLevel
from omni.commands.bench.load_source import LineSource, LoadSource, LoadTarget, Send
from omni.commands.bench.made_up_source import MadeUpShape, MadeUpSource
from omni.commands.bench.made_up_words import TokenLengths
from omni.commands.bench.measured_request import MeasuredRequest, RequestFailure
from omni.commands.bench.request_timer import RequestTimer

__all__ = ["Measurement", "MeasurementPlan"]

_PROBES = (32, 96)
"""Words of the two prompts from whose tokens the length of others is told."""

_WARMUP = -1


@dataclass(frozen=True, slots=True)
class MeasurementPlan:
    """What is to be measured.

    Attributes:
        levels: of load.
        amount: how much is sent on each.
        warmup: requests before the first level, or conversations, which are not counted.
        shape: what requests are to be like where they are made up.
    """

    levels: Sequence[LoadLevel]
    amount: LoadAmount
    warmup: int = 0
    shape: MadeUpShape = field(default_factory=MadeUpShape)


class Measurement:
    """Several levels of load on one target, one after the other.

    Args:
        plan: what is to be measured.
        on_begin: called before the first request that counts.
        on_end: called with every request that counts, when it has ended.
        clock: to measure with.

    Attributes:
        runs: levels that have begun; the last one may be cut short.
    """

    def __init__(
        self,
        plan: MeasurementPlan,
        *,
        on_begin: Callable[[], object] = lambda: None,
        on_end: Callable[[MeasuredRequest], object] = lambda _: None,
        clock: Clock | None = None,
    ) -> None:
        self.runs: list[LevelRun] = []
        self._plan = plan
        self._on_begin = on_begin
        self._on_end = on_end
        self._clock = clock or Clock()

    async def run(self, target: LoadTarget, sends: Sequence[Send] | None = None) -> None:
        """Measure all levels.

        Args:
            target: what the load is put on.
            sends: the requests; None has them made up.

        Raises:
            ValueError: not even the first requests are answered.
        """
        source: LoadSource
        source = await self._made_up(target) if sends is None else LineSource(sends)
        if self._plan.warmup:
            await self._warm_up(source)
        self._on_begin()
        for index, level in enumerate(self._plan.levels):
            await target.reset_caches()
            run = LevelRun(
                level, self._plan.amount, index=index, clock=self._clock, on_end=self._on_end
            )
            self.runs.append(run)
            await run.run(source)

    def reports(self, limits: GoodputLimits) -> list[LevelReport]:
        """What the levels came to that have begun."""
        return [LevelReport.of(run, limits) for run in self.runs]

    async def _made_up(self, target: LoadTarget) -> MadeUpSource:
        shape = self._plan.shape
        source = MadeUpSource(target, shape)
        counts = [(words, await self._num_tokens(source.probe(words))) for words in _PROBES]
        (fewer, short), (more, long) = counts
        if short is None or long is None:  # the server counts no tokens; a word is about one
            return source
        return MadeUpSource(target, shape, TokenLengths.measured((fewer, short), (more, long)))

    async def _num_tokens(self, send: Send) -> int | None:
        timer = RequestTimer(self._clock.now(), self._clock.now)
        try:
            await send(timer)
        except RequestFailure as error:
            raise _nothing_works(error) from error
        return timer.end().prompt_tokens

    async def _warm_up(self, source: LoadSource) -> None:
        most = max(level.concurrency or 1 for level in self._plan.levels)
        amount = replace(self._plan.amount, num_conversations=self._plan.warmup, duration_s=None)
        level = LoadLevel(concurrency=min(most, self._plan.warmup))
        run = LevelRun(level, amount, index=_WARMUP, clock=self._clock)
        await run.run(source)
        failures = [record.failure for record in run.records if record.failure is not None]
        if len(failures) == len(run.records):
            raise _nothing_works(failures[0])


def _nothing_works(error: RequestFailure) -> ValueError:
    return ValueError(f"the first request was not answered: {error.kind}: {error}")

"""Load generation: sends requests on a schedule and records each answer."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from omni.commands.bench.flags import BenchFlags
from omni.requests.request_file import read_lines

METRICS: Mapping[str, str] = {
    "first_token": "first token",
    "between_tokens": "between tokens",
    "per_token": "per token",
    "first_audio": "first audio",
    "audio_gap": "longest gap in sound",
    "real_time_factor": "real-time factor",
    "end_to_end": "end to end",
}
"""Reported properties of :class:`MeasuredRequest`, and their names in tables. All are in seconds
except the factor."""


class RequestFailure(Exception):
    """A request without a valid answer.

    Args:
        kind: short label by which failures are counted: ``status 500``, ``timeout``.
        is_rejection: true if the overloaded server refused the request (status 429).
    """

    def __init__(self, kind: str, message: str, *, is_rejection: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.is_rejection = is_rejection


@dataclass(slots=True)
class MeasuredRequest:
    """The record of one request, filled in while its answer arrives.

    Attributes:
        scheduled: time at which the request was due, in seconds of the clock.
        now: the clock, which is monotonic.
        sent: time just before the first byte was sent. Latencies count from here.
        ended: time at which the answer was complete or failed.
        text_times: arrival time of each chunk of the answer with text.
        first_audio_time: arrival time of the first chunk with audio; None if none arrived.
        audio_s: seconds of audio in the answer.
        audio_gap: longest underrun, in seconds, of a player that starts with the first chunk;
            None without audio.
        stages: time at which the request entered each stage; empty if the target reports none.
        prompt_tokens: prompt tokens as counted by the target; None if it does not count them.
        cached_tokens: prompt tokens found in the target's cache; likewise.
        completion_tokens: tokens of the answer; likewise.
    """

    scheduled: float
    now: Callable[[], float] = field(default=time.perf_counter, repr=False)
    sent: float = math.nan
    ended: float = math.nan
    text_times: list[float] = field(default_factory=list)
    first_audio_time: float | None = None
    audio_s: float = 0.0
    audio_gap: float | None = None
    stages: dict[str, float] = field(default_factory=dict)
    _played_until: float = field(default=math.nan, repr=False)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    failure: RequestFailure | None = None

    def send(self) -> None:
        """Record that the request is about to be sent."""
        self.sent = self.now()

    def text(self) -> None:
        """Record a chunk with text."""
        self.text_times.append(self.now())

    def audio(self, seconds: float) -> None:
        """Record a chunk with ``seconds`` of audio."""
        now = self.now()
        if self.first_audio_time is None or self.audio_gap is None:
            self.first_audio_time, self.audio_gap, self._played_until = now, 0.0, now
        self.audio_gap = max(self.audio_gap, now - self._played_until)
        self._played_until = max(self._played_until, now) + seconds
        self.audio_s += seconds

    def enter(self, stage: str, seconds_ago: float) -> None:
        """Record that the request has entered a stage; only the first call per stage counts."""
        self.stages.setdefault(stage, self.now() - seconds_ago)

    def usage(self, prompt: int | None, cached: int | None, completion: int | None) -> None:
        """Record the target's token counts; None for those that it does not report."""
        self.prompt_tokens, self.cached_tokens, self.completion_tokens = prompt, cached, completion

    def end(self, failure: RequestFailure | None = None) -> None:
        """Record that the answer is complete, or its failure."""
        self.ended, self.failure = self.now(), failure
        if math.isnan(self.sent):
            self.sent = self.ended

    @property
    def send_delay(self) -> float:
        """Seconds by which the sender was late."""
        return self.sent - self.scheduled

    @property
    def first_token(self) -> float | None:
        """Seconds until the first chunk of text."""
        return self.text_times[0] - self.sent if self.text_times else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between chunks of text: vLLM's inter-token latencies."""
        return [later - earlier for earlier, later in pairwise(self.text_times)]

    @property
    def between_tokens(self) -> float | None:
        """Mean of :attr:`gaps`; 0 for a single chunk."""
        return sum(self.gaps) / max(1, len(self.gaps)) if self.text_times else None

    @property
    def per_token(self) -> float | None:
        """Seconds per token after the first: vLLM's time per output token.

        Unlike :attr:`between_tokens` it does not depend on the number of tokens per chunk.
        """
        if not self.text_times or self.num_tokens < 2:
            return None
        return (self.text_times[-1] - self.text_times[0]) / (self.num_tokens - 1)

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer, or its chunks if the target does not count tokens."""
        counted = self.completion_tokens
        return len(self.text_times) if counted is None else counted

    @property
    def first_audio(self) -> float | None:
        """Seconds until the first chunk of audio."""
        return None if self.first_audio_time is None else self.first_audio_time - self.sent

    @property
    def end_to_end(self) -> float:
        """Seconds until the answer was complete."""
        return self.ended - self.sent

    @property
    def real_time_factor(self) -> float | None:
        """Seconds per second of audio; below 1 it can be played while it is generated."""
        return self.end_to_end / self.audio_s if self.audio_s else None


Send: TypeAlias = Callable[[MeasuredRequest], Awaitable[str]]
"""Sends one request, records its answer as it arrives, and returns the text of the answer.

Raises :class:`RequestFailure` if the answer is not valid."""


class LoadTarget(Protocol):
    """A pipeline or a server under load."""

    @property
    def answering_stage(self) -> str | None:
        """The stage of the sampling fields; None if requests do not name stages."""

    def prepare(self, line: Mapping[str, Any], folder: Path) -> Send:
        """Prepare a request that can be sent any number of times.

        Raises:
            ValueError: the target does not support it, or a file does not exist.
        """

    async def reset_caches(self) -> None:
        """Empty the target's caches, if supported."""


LoadTurns: TypeAlias = Generator[Send, str | None, None]
"""Generator of requests that is sent the answer to each before it yields the next."""

LoadSource: TypeAlias = Callable[[int, int], LoadTurns]
"""Starts a conversation, given the level's index (-1 for warm-up) and a number from 0."""

_TEXT = """
about above across again air animal answer around back because before began below book both bring
car carry change city close country cut day different door earth eat enough evening example eye
family father find first follow food form friend garden girl give good green group hand hard have
"""
_WORDS = _TEXT.split()


class RequestLines:
    """Lines of a request file; ``-`` is standard input.

    Raises:
        ValueError: the file cannot be read, or has no requests.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._name, self._folder, self._lines = read_lines(path)
            if not self._lines:
                raise ValueError(f"{self._name}: no request in it")
        except ValueError as error:
            raise ValueError(f"--input: {error}") from error

    def __len__(self) -> int:
        return len(self._lines)

    def prepared(self, target: LoadTarget) -> list[Send]:
        """Prepare requests from all lines; ``ValueError`` names all lines that are invalid."""
        sends, wrong = [], []
        for line in self._lines:
            try:
                if line.error is not None:
                    raise ValueError(line.error)
                sends.append(target.prepare(line.data, self._folder))
            except (ValueError, RecursionError) as error:
                wrong.append(f"{self._name}:{line.number}: {error}")
        if wrong:
            raise ValueError("\n".join(wrong))
        return sends


def line_source(sends: Sequence[Send]) -> LoadSource:
    """Create a source that repeats requests in order, each as a separate conversation."""

    def conversation(level: int, number: int) -> LoadTurns:
        yield sends[number % len(sends)]

    return conversation


def token_lengths(shorter: tuple[int, int], longer: tuple[int, int]) -> tuple[float, float]:
    """Compute the tokens per word of a prompt, and the constant number of tokens around them.

    Args:
        shorter, longer: two prompts, each given as its numbers of words and of tokens.

    Raises:
        ValueError: the longer one does not have more tokens.
    """
    (fewer_words, fewer_tokens), (more_words, more_tokens) = shorter, longer
    if more_tokens <= fewer_tokens:
        raise ValueError(
            f"{more_words} words are said to be {more_tokens} tokens, no more than "
            f"{fewer_words} words, {fewer_tokens}: prompts of a length cannot be made up"
        )
    per_word = (more_tokens - fewer_tokens) / (more_words - fewer_words)
    return per_word, max(0.0, fewer_tokens - per_word * fewer_words)


class SyntheticSource:
    """Source of synthetic conversations, different for every level, to avoid hits across levels.

    Args:
        per_word, around: see :func:`token_lengths`; by default a word is one token.
    """

    def __init__(
        self, target: LoadTarget, flags: BenchFlags, per_word: float = 1.0, around: float = 0.0
    ) -> None:
        self._target = target
        self._flags = flags
        self._is_chat = flags.endpoint in (None, "chat")
        # At least one word, unless there is no shared prefix.
        shared = flags.shared_prefix_tokens
        self._prefix_words = max(1, round(shared / per_word)) if shared else 0
        all_words = round((flags.synthetic_tokens - around) / per_word)
        self._own_words = max(1, all_words - self._prefix_words)

    def conversation(self, level: int, number: int) -> LoadTurns:
        """Generate a conversation; every ``prefixes``-th one of a level has the same prefix.

        Each turn repeats all earlier ones, including the answers, and adds as many words as the
        first turn has in addition to its prefix.
        """
        flags = self._flags
        prefix = synthetic_text(
            self._prefix_words, flags.seed, level, "prefix", number % flags.prefixes
        )
        messages: list[dict[str, str]] = []
        text = ""
        for turn in range(flags.turns):
            said = synthetic_text(self._own_words, flags.seed, level, number, turn)
            if prefix and not turn:
                said = f"{prefix} {said}"
            messages.append({"role": "user", "content": said})
            text += f" {said}" if turn else said
            prompt = list(messages) if self._is_chat else text
            answer = (yield self._prepare(prompt, flags.sampling)) or ""
            messages.append({"role": "assistant", "content": answer})
            text += answer

    def probe(self, num_words: int) -> Send:
        """Prepare a request of ``num_words`` words and one answer token, to count prompt tokens."""
        # Repeated words, so that only their number differs from one probe to the other.
        some = synthetic_text(_PROBE_WORDS[0], self._flags.seed, "probe")
        text = " ".join([some] * (num_words // _PROBE_WORDS[0]))
        sampling = {**self._flags.sampling, "max_tokens": 1} if self._flags.is_text else {}
        prompt = [{"role": "user", "content": text}] if self._is_chat else text
        return self._prepare(prompt, sampling)

    def _prepare(self, prompt: object, sampling: Mapping[str, Any]) -> Send:
        line: dict[str, Any] = {"prompt": prompt}
        if sampling:
            stage = self._target.answering_stage
            line["sampling"] = sampling if stage is None else {stage: sampling}
        return self._target.prepare(line, Path())


def synthetic_text(num_words: int, *seeds: object) -> str:
    """Generate a text of common words that depends only on the seeds."""
    return " ".join(random.Random(" ".join(map(str, seeds))).choices(_WORDS, k=num_words))


_MAX_CONCURRENCY = 65_536
_MAX_RATE = 1_000_000.0
_LAG_INTERVAL_S = 0.01
_PROBE_WORDS = (32, 96)
"""Words of the two prompts from which the tokens per word are estimated."""

_WARMUP = -1
_DEFAULT_FLAGS = BenchFlags()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLevel:
    """A level of load; exactly one of the two is set.

    Attributes:
        concurrency: number of clients of a closed loop: each sends its next request when the
            previous one has ended.
        rate: mean arrivals per second of an open loop, a Poisson process that does not wait for
            answers.
    """

    concurrency: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError("a level is either a concurrency or a rate")
        if self.concurrency is not None and not 1 <= self.concurrency <= _MAX_CONCURRENCY:
            raise ValueError(
                f"--concurrency: must be from 1 to {_MAX_CONCURRENCY}, got {self.concurrency}"
            )
        if self.rate is not None and not 0.0 < self.rate <= _MAX_RATE:
            raise ValueError(
                f"--rate: must be above 0 and at most {_MAX_RATE:g} requests a second, got "
                f"{self.rate:g}"
            )

    @property
    def label(self) -> str:
        """Name of the level in tables."""
        return f"{self.concurrency}" if self.concurrency is not None else f"{self.rate:g}/s"


def parse_levels(concurrency: str | None, rate: str | None) -> tuple[LoadLevel, ...]:
    """Parse ``1,2,4`` from one of the two flags; without either, one request at a time.

    Raises:
        ValueError: both are given, or one is wrong; the message names the flag.
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


class LevelRun:
    """One level of load, from its first request to the last answer.

    A cancelled run keeps what it has recorded. Its clock is the event loop's.

    Args:
        num_conversations: maximum number of conversations.
        flags: duration of the run, and timeout of a request.
        index: index of the level; arrivals depend on it and on the seed.

    Attributes:
        records: finished requests, in the order in which they finished.
        loop_lags: seconds by which the event loop was late, sampled every 10 ms. Events are
            observed late by as much, which bounds the precision of all times.
        duration_s: seconds from the start to the last end.
        cpu_s: CPU seconds used by this process during the run.
    """

    def __init__(
        self,
        level: LoadLevel,
        num_conversations: int,
        flags: BenchFlags = _DEFAULT_FLAGS,
        *,
        index: int = 0,
        on_end: Callable[[MeasuredRequest], object] = lambda _: None,
    ) -> None:
        self.level = level
        self.records: list[MeasuredRequest] = []
        self.num_in_flight = 0
        self.loop_lags: list[float] = []
        self.duration_s = self.cpu_s = 0.0
        self._num_conversations, self._flags = num_conversations, flags
        self._index = index
        self._on_end = on_end

    async def run(self, source: LoadSource) -> None:
        """Send all requests and wait for the answers."""
        self._now = asyncio.get_running_loop().time
        self._began, cpu_began = self._now(), time.process_time()
        lag = asyncio.create_task(self._measure_lag())
        conversations = (source(self._index, number) for number in range(self._num_conversations))
        try:
            async with asyncio.TaskGroup() as group:
                if self.level.concurrency is not None:
                    for _ in range(min(self.level.concurrency, self._num_conversations)):
                        group.create_task(self._client(conversations))
                else:
                    assert self.level.rate is not None
                    await self._open_loop(group, conversations, self.level.rate)
        except ExceptionGroup as errors:  # from the loops' tasks; one of them is enough
            raise errors.exceptions[0] from errors
        finally:
            lag.cancel()
            self.duration_s = self._now() - self._began
            self.cpu_s = time.process_time() - cpu_began

    async def _measure_lag(self) -> None:
        while True:
            planned = self._now() + _LAG_INTERVAL_S
            await asyncio.sleep(_LAG_INTERVAL_S)
            self.loop_lags.append(max(0.0, self._now() - planned))

    async def _client(self, conversations: Iterator[LoadTurns]) -> None:
        scheduled = self._now()
        while self._in_time(scheduled) and (conversation := next(conversations, None)) is not None:
            await self._run_conversation(conversation, scheduled)
            scheduled = self._now()

    async def _open_loop(
        self, group: asyncio.TaskGroup, conversations: Iterator[LoadTurns], rate: float
    ) -> None:
        chance = random.Random(f"{self._flags.seed} {self._index}")
        scheduled = self._now()
        for conversation in conversations:
            await asyncio.sleep(max(0.0, scheduled - self._now()))
            if not self._in_time(scheduled):
                return
            group.create_task(self._run_conversation(conversation, scheduled))
            scheduled += chance.expovariate(rate)

    def _in_time(self, moment: float) -> bool:
        limit = self._flags.duration
        return limit is None or moment - self._began < limit

    async def _run_conversation(self, conversation: LoadTurns, scheduled: float) -> None:
        """Send the requests of a conversation one after the other, until one fails."""
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
            async with asyncio.timeout(self._flags.timeout):
                answer = await send(record)
        except RequestFailure as error:
            failure = error
        except TimeoutError:
            message = f"it was not answered within {self._flags.timeout:g} s (--timeout)"
            failure = RequestFailure("timeout", message)
        record.end(failure)
        self.num_in_flight -= 1
        self.records.append(record)
        self._on_end(record)
        return answer


class Measurement:
    """Several levels of load on one target, one after the other.

    Args:
        num_conversations: maximum per level, see :meth:`BenchFlags.num_conversations`.
        on_begin: called before the first measured request.
        on_end: called with every measured request when it has ended.

    Attributes:
        runs: levels that have started; the last one may be incomplete.
    """

    def __init__(
        self,
        levels: Sequence[LoadLevel],
        flags: BenchFlags,
        num_conversations: int,
        *,
        on_begin: Callable[[], object] = lambda: None,
        on_end: Callable[[MeasuredRequest], object] = lambda _: None,
    ) -> None:
        self.runs: list[LevelRun] = []
        self._levels, self._flags = levels, flags
        self._num_conversations = num_conversations
        self._on_begin = on_begin
        self._on_end = on_end

    async def run(self, target: LoadTarget, sends: Sequence[Send] | None = None) -> None:
        """Measure all levels; ``ValueError`` if not even the first requests are answered."""
        source = await self._synthetic_source(target) if sends is None else line_source(sends)
        if self._flags.warmup:
            await self._warm_up(source)
        self._on_begin()
        for index, level in enumerate(self._levels):
            await target.reset_caches()
            run = LevelRun(
                level, self._num_conversations, self._flags, index=index, on_end=self._on_end
            )
            self.runs.append(run)
            await run.run(source)

    async def _synthetic_source(self, target: LoadTarget) -> LoadSource:
        source = SyntheticSource(target, self._flags)
        counts = []
        for words in _PROBE_WORDS:
            record = MeasuredRequest(0.0)
            try:
                await source.probe(words)(record)
            except RequestFailure as error:
                raise _no_answer(error) from error
            if record.prompt_tokens is None:  # not counted by the server: assume a token per word
                return source.conversation
            counts.append((words, record.prompt_tokens))
        return SyntheticSource(target, self._flags, *token_lengths(*counts)).conversation

    async def _warm_up(self, source: LoadSource) -> None:
        most = max(level.concurrency or 1 for level in self._levels)
        level = LoadLevel(concurrency=min(most, self._flags.warmup))
        run = LevelRun(
            level, self._flags.warmup, replace(self._flags, duration=None), index=_WARMUP
        )
        await run.run(source)
        failures = [record.failure for record in run.records if record.failure is not None]
        if len(failures) == len(run.records):
            raise _no_answer(failures[0])


def _no_answer(error: RequestFailure) -> ValueError:
    return ValueError(f"the first request was not answered: {error.kind}: {error}")

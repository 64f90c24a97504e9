"""A request as it is sent, and the record of its answer."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeAlias

METRICS: Mapping[str, str] = {
    "first_token": "first token",
    "between_tokens": "between tokens",
    "per_token": "per token",
    "first_audio": "first audio",
    "audio_gap": "longest gap in sound",
    "real_time_factor": "real-time factor",
    "end_to_end": "end to end",
}
"""Properties of a :class:`MeasuredRequest` that are reported, and their names in tables. All are in
seconds but the factor."""


class RequestFailure(Exception):
    """A request that was not answered as it should be.

    Args:
        kind: in a word or two, by which failures are counted: ``status 500``, ``connection``.
        is_rejection: whether the server refused it because it is overloaded (status 429).
    """

    def __init__(self, kind: str, message: str, *, is_rejection: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.is_rejection = is_rejection


@dataclass(slots=True)
class MeasuredRequest:
    """The record of one request, filled in while its answer arrives.

    Attributes:
        scheduled: when the request was due, in seconds of the clock.
        now: the clock, which is monotonic.
        sent: when it was sent: just before its first byte. Its times count from here.
        ended: when its answer was complete, or it was clear that it would not be.
        text_times: when each piece of the answer came that had text in it.
        first_audio_time: when the first piece with sound came; None if none did.
        audio_s: seconds of sound in the answer.
        audio_gap: longest time, in seconds, for which a player that starts with the first piece
            would have had nothing to play before more sound came; None if there was no sound.
        stages: when the request entered each stage; empty if the target does not report it.
        prompt_tokens: as the target counts them; None if it does not.
        cached_tokens: those of them that its cache had; likewise.
        completion_tokens: of the answer; likewise.
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
        """Note that the request is about to be sent."""
        self.sent = self.now()

    def text(self) -> None:
        """Note a piece with text in it."""
        self.text_times.append(self.now())

    def audio(self, seconds: float) -> None:
        """Note a piece with so much sound in it."""
        now = self.now()
        if self.first_audio_time is None or self.audio_gap is None:
            self.first_audio_time, self.audio_gap, self._played_until = now, 0.0, now
        self.audio_gap = max(self.audio_gap, now - self._played_until)
        self._played_until = max(self._played_until, now) + seconds
        self.audio_s += seconds

    def enter(self, stage: str, seconds_ago: float) -> None:
        """Note that the request has entered a stage; only the first note of each counts."""
        self.stages.setdefault(stage, self.now() - seconds_ago)

    def usage(self, prompt: int | None, cached: int | None, completion: int | None) -> None:
        """Note the target's own counts of tokens; None for one that it does not give."""
        self.prompt_tokens, self.cached_tokens, self.completion_tokens = prompt, cached, completion

    def end(self, failure: RequestFailure | None = None) -> None:
        """Note that the answer is complete, or why it is not."""
        self.ended, self.failure = self.now(), failure
        if math.isnan(self.sent):
            self.sent = self.ended

    @property
    def send_delay(self) -> float:
        """Seconds from when it was due until it was sent, which is the sender's fault."""
        return self.sent - self.scheduled

    @property
    def first_token(self) -> float | None:
        """Seconds until the first piece of text."""
        return self.text_times[0] - self.sent if self.text_times else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between the pieces of text: vLLM's inter-token latencies."""
        return [later - earlier for earlier, later in pairwise(self.text_times)]

    @property
    def between_tokens(self) -> float | None:
        """Mean of :attr:`gaps`; 0 for a single piece."""
        return sum(self.gaps) / max(1, len(self.gaps)) if self.text_times else None

    @property
    def per_token(self) -> float | None:
        """Seconds per token after the first: vLLM's time per output token.

        Unlike :attr:`between_tokens` it does not depend on how many tokens come in a piece.
        """
        if not self.text_times or self.num_tokens < 2:
            return None
        return (self.text_times[-1] - self.text_times[0]) / (self.num_tokens - 1)

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer, or its pieces if the target does not count tokens."""
        counted = self.completion_tokens
        return len(self.text_times) if counted is None else counted

    @property
    def first_audio(self) -> float | None:
        """Seconds until the first piece of sound."""
        return None if self.first_audio_time is None else self.first_audio_time - self.sent

    @property
    def end_to_end(self) -> float:
        """Seconds until the answer was complete."""
        return self.ended - self.sent

    @property
    def real_time_factor(self) -> float | None:
        """Seconds that a second of sound took; below 1 it can be played while it is generated."""
        return self.end_to_end / self.audio_s if self.audio_s else None


Send: TypeAlias = Callable[[MeasuredRequest], Awaitable[str]]
"""Sends one request, records its answer as it comes, and returns the text of the answer.

It raises :class:`RequestFailure` if the answer is not what it should be."""


class LoadTarget(Protocol):
    """A pipeline or a server that requests are sent to."""

    @property
    def answering_stage(self) -> str | None:
        """The stage that sampling fields are for; None where requests do not name it."""

    def prepare(self, line: Mapping[str, Any], folder: Path) -> Send:
        """Make a request that can be sent any number of times.

        Raises:
            ValueError: the target cannot take it, or a file does not exist.
        """

    async def reset_caches(self) -> None:
        """Empty the target's caches, if it has a way to."""

"""Notes what comes of one request, and when."""

from __future__ import annotations

from collections.abc import Callable

from omni.commands.bench.measured_request import MeasuredRequest, RequestFailure

__all__ = ["RequestTimer"]


class RequestTimer:
    """Notes what comes of one request, and when.

    Args:
        scheduled: when it was to be sent, by the clock.
        now: the clock, in seconds.
    """

    def __init__(self, scheduled: float, now: Callable[[], float]) -> None:
        self._now = now
        self._scheduled = scheduled
        self._sent: float | None = None
        self._text_times: list[float] = []
        self._first_audio_time: float | None = None
        self._audio_s = 0.0
        self._usage: tuple[int | None, int | None, int | None] = (None, None, None)

    def send(self) -> None:
        """The request is about to be sent."""
        self._sent = self._now()

    def text(self) -> None:
        """A piece with text in it came."""
        self._text_times.append(self._now())

    def audio(self, seconds: float) -> None:
        """A piece with so much sound in it came."""
        if self._first_audio_time is None:
            self._first_audio_time = self._now()
        self._audio_s += seconds

    def usage(
        self,
        prompt_tokens: int | None,
        cached_tokens: int | None,
        completion_tokens: int | None,
    ) -> None:
        """The other side has counted its tokens; None for what it does not tell."""
        self._usage = (prompt_tokens, cached_tokens, completion_tokens)

    def end(self, failure: RequestFailure | None = None) -> MeasuredRequest:
        """The answer is whole, or will not be."""
        ended = self._now()
        prompt_tokens, cached_tokens, completion_tokens = self._usage
        return MeasuredRequest(
            scheduled=self._scheduled,
            sent=ended if self._sent is None else self._sent,
            ended=ended,
            text_times=tuple(self._text_times),
            first_audio_time=self._first_audio_time,
            audio_s=self._audio_s,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            completion_tokens=completion_tokens,
            failure=failure,
        )

"""What was seen of one request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["PER_REQUEST_METRICS", "MeasuredRequest", "RequestFailure"]


class RequestFailure(Exception):
    """A request that was not answered as it should be.

    Args:
        kind: in a word or two, by which failures are counted: ``status 500``, ``connection``.
        message: what was told, for people.
        is_rejection: whether the server has said that it has too much to do (status 429), which
            is no mistake of its own.
    """

    def __init__(self, kind: str, message: str, *, is_rejection: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.is_rejection = is_rejection


@dataclass(frozen=True, slots=True)
class MeasuredRequest:
    """What was seen of one request; points in time are seconds of one monotonic clock.

    Attributes:
        scheduled: when it was to be sent.
        sent: when it was: just before its first byte. All its times count from here.
        ended: when its answer was whole, or it was clear that it would not be.
        text_times: when each piece of the answer came that had text in it.
        first_audio_time: when the first piece came that had sound in it; None if none did.
        audio_s: seconds of sound in the answer.
        prompt_tokens: as the other side counts them; None if it does not tell.
        cached_tokens: of these, how many its cache saved computing; likewise.
        completion_tokens: of the answer; likewise.
        failure: why it failed; None if it did not.
    """

    scheduled: float
    sent: float
    ended: float
    text_times: tuple[float, ...] = ()
    first_audio_time: float | None = None
    audio_s: float = 0.0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    failure: RequestFailure | None = None

    @property
    def send_delay(self) -> float:
        """How late it was sent, in seconds: due to the sender, not to the server."""
        return self.sent - self.scheduled

    @property
    def first_token(self) -> float | None:
        """Seconds until the first piece of text; one that only announces an answer is none."""
        return self.text_times[0] - self.sent if self.text_times else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between the pieces of text: vLLM's inter-token latencies."""
        times = self.text_times
        return [later - earlier for earlier, later in pairwise(times)]

    @property
    def between_tokens(self) -> float:
        """Mean of :attr:`gaps`; 0 where there is none."""
        return sum(self.gaps) / len(self.gaps) if self.gaps else 0.0

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
        """Tokens of the answer; where nobody counts them, its pieces stand for them."""
        counted = self.completion_tokens
        return len(self.text_times) if counted is None else counted

    @property
    def first_audio(self) -> float | None:
        """Seconds until the first piece of sound."""
        return None if self.first_audio_time is None else self.first_audio_time - self.sent

    @property
    def end_to_end(self) -> float:
        """Seconds until the answer was whole."""
        return self.ended - self.sent

    @property
    def real_time_factor(self) -> float | None:
        """Seconds that a second of sound took; below 1 it can be heard while it is made."""
        return self.end_to_end / self.audio_s if self.audio_s else None


PER_REQUEST_METRICS: dict[str, Callable[[MeasuredRequest], float | None]] = {
    "first_token": lambda record: record.first_token,
    "between_tokens": lambda record: record.between_tokens if record.text_times else None,
    "per_token": lambda record: record.per_token if record.num_tokens != 1 else 0.0,
    "first_audio": lambda record: record.first_audio,
    "real_time_factor": lambda record: record.real_time_factor,
    "end_to_end": lambda record: record.end_to_end,
}
"""What a request can be held to, by name: one number of each, all in seconds but the factor. One
token has no other to wait for, and keeps every limit on what comes between."""

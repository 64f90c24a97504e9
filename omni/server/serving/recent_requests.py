"""The last requests of a server, and where each of them spent its time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from omni.requests.stage_time import StageTime

__all__ = ["RecentRequests", "RequestRecord"]

_KEPT = 200
_KEPT_REJECTED = 50
_REJECTED = "rejected"


@dataclass(slots=True)
class RequestRecord:
    """One request, without anything that was asked or answered.

    Attributes:
        model: the pipeline's name.
        request_id: the server's own.
        tenant: whose key it came with; None where no key is needed.
        arrived_s: in seconds since 1970.
        began_s: of ``time.monotonic`` in this process, as all times below.
        turn_s: when it was handed to the pipeline; None if it never was.
        first_token_s: when the first token came; None if none did.
        first_audio_s: when the first sound came; likewise.
        ended_s: when it had ended.
        status: how: ok, refused, rejected, failed, aborted.
        traceparent: the client's, as W3C's Trace Context writes it; not checked.
        stages: its stays, as far as they are known: of stages that it had entered.
    """

    model: str
    request_id: str
    tenant: str | None
    arrived_s: float
    began_s: float
    turn_s: float | None = None
    first_token_s: float | None = None
    first_audio_s: float | None = None
    ended_s: float = 0.0
    status: str = ""
    traceparent: str | None = None
    stages: dict[str, StageTime] = field(default_factory=dict)

    def to_object(self) -> dict[str, Any]:
        """The same as JSON has it, in seconds since it arrived."""
        return {
            "request_id": self.request_id,
            "status": self.status,
            "arrived": round(self.arrived_s, 3),
            "seconds": self._since(self.ended_s),
            "turn": self._since(self.turn_s),
            "first_token": self._since(self.first_token_s),
            "first_audio": self._since(self.first_audio_s),
            "stages": [self._stage(each) for each in self.stages.values()],
        }

    def _stage(self, time: StageTime) -> dict[str, Any]:
        return {
            "name": time.stage,
            "entered": self._since(time.entered_s),
            # What it was taken out of, it left when it ended.
            "left": self._since(self.ended_s if time.ended_s is None else time.ended_s),
            "is_whole": time.ended_s is not None,
            "queue": time.queue_s,
            "first_token": time.first_token_s,
            "prompt_tokens": time.num_prompt_tokens,
            "cached_tokens": time.num_cached_tokens,
            "tokens": time.num_tokens,
            "preemptions": time.num_preemptions,
            "prefix_miss": time.prefix_miss,
        }

    def _since(self, time_s: float | None) -> float | None:
        return None if time_s is None else round(time_s - self.began_s, 6)


class RecentRequests:
    """Keeps the last requests of all pipelines; what was before them is forgotten.

    Those for which there was no room are kept apart: they come by the hundreds in a second, and
    would leave nothing of the others.
    """

    def __init__(self) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=_KEPT)
        self._rejected: deque[RequestRecord] = deque(maxlen=_KEPT_REJECTED)

    def add(self, record: RequestRecord) -> None:
        """Take in one that has ended."""
        (self._rejected if record.status == _REJECTED else self._records).append(record)

    def of(self, model: str, tenant: str | None) -> Iterator[RequestRecord]:
        """Those of a pipeline that came with one key, the one that ended last first."""
        kept = [*self._records, *self._rejected]
        for record in sorted(kept, key=lambda each: each.ended_s, reverse=True):
            if record.model == model and record.tenant == tenant:
                yield record

"""One request on one streamed edge, as the orchestrator sees it."""

from __future__ import annotations

from dataclasses import dataclass

from stages.worker.messages import StreamedEdge

__all__ = ["Stream"]


@dataclass(slots=True)
class Stream:
    """Where chunks go, and how many of them are on their way.

    Attributes:
        source: the stage that cuts the chunks.
        edge: the stage that takes them, and how.
        outstanding: chunks that were cut and not taken yet.
        has_begun: whether any chunk came.
        is_open: whether the consumer takes any more.
    """

    source: str
    edge: StreamedEdge
    outstanding: int = 0
    has_begun: bool = False
    is_open: bool = True

    @property
    def is_full(self) -> bool:
        """Whether the source lets the request rest, until the consumer has taken a chunk."""
        return self.is_open and self.outstanding >= self.edge.max_pending

"""The one Ray cluster of a test session."""

from __future__ import annotations

from stages.cluster.membership import Membership, join

__all__ = ["SessionCluster"]


class SessionCluster:
    """Started when it is made, and there until it is stopped."""

    def __init__(self) -> None:
        self._membership: Membership | None = join(None)

    def stop(self) -> None:
        """End it."""
        if self._membership is not None:
            self._membership.leave()

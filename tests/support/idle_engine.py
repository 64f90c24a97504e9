"""An engine that several tests share, without what the test before has left in it."""

from __future__ import annotations

from typing import Any

from engine import Engine

__all__ = ["drop_all"]


def drop_all(engine: Engine[Any]) -> None:
    """Abort every request."""
    for request_id in engine.live_request_ids:
        engine.abort(request_id)

"""Helpers that empty an engine shared by several tests."""

from __future__ import annotations

from typing import Any

from engine import Engine


def drop_all(engine: Engine[Any]) -> None:
    """Abort every request."""
    for request_id in engine.live_request_ids:
        engine.abort(request_id)


def finish(engine: Engine[Any]) -> dict[str, Any]:
    """Step until all requests finished, checking after every step; return last outputs by id."""
    done: dict[str, Any] = {}
    while engine.has_unfinished_requests:
        done |= {output.request_id: output for output in engine.step() if output.finished}
        engine.check_integrity()
    return done

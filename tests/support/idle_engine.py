"""Helpers that empty an engine shared by several tests."""

from __future__ import annotations

from typing import Any

from engine import Engine


def drop_all(engine: Engine[Any]) -> None:
    """Abort every request."""
    for request_id in engine.live_request_ids:
        engine.abort(request_id)


_MAX_STEPS = 10_000


def finish(engine: Engine[Any]) -> dict[str, Any]:
    """Step until all requests finished, checking after every step; return last outputs by id."""
    done: dict[str, Any] = {}
    for _ in range(_MAX_STEPS):
        if not engine.has_unfinished_requests:
            return done
        done |= {output.request_id: output for output in engine.step() if output.finished}
        engine.check_integrity()
    raise AssertionError(f"requests are unfinished after {_MAX_STEPS} steps")

"""How long tests wait for what has to happen."""

from __future__ import annotations

__all__ = ["PATIENCE_S"]

PATIENCE_S = 600.0
"""Seconds. Only a test that fails waits for so long: on a machine that is busy with other things,
what takes a moment may take minutes."""

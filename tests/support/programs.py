"""Which tests start programs, and wait for them: ``make test-programs`` runs those."""

from __future__ import annotations

import pytest

__all__ = ["WITHOUT_PROGRAMS", "needs_cluster"]

WITHOUT_PROGRAMS = "not programs"
"""The expression of marks that ``make test`` runs."""


def needs_cluster(item: pytest.Item) -> bool:
    """Whether a test asks for the run's Ray cluster, or has ``ray`` for where its stages run."""
    if not isinstance(item, pytest.Function):
        return False
    callspec = getattr(item, "callspec", None)
    params = () if callspec is None else callspec.params.values()
    words = [word for each in params for word in (each if isinstance(each, tuple) else (each,))]
    return "ray_cluster" in item.fixturenames or any(
        isinstance(word, str) and word == "ray" for word in words
    )

"""Which tests need a Ray cluster: ``make test-ray`` runs them, and ``make test`` all others."""

from __future__ import annotations

import pytest

__all__ = ["WITHOUT_RAY", "needs_ray"]

WITHOUT_RAY = "not ray"
"""The expression of marks that ``make test`` runs."""


def needs_ray(item: pytest.Item) -> bool:
    """Whether a test asks for the run's cluster, or has ``ray`` for where its stages run."""
    if not isinstance(item, pytest.Function):
        return False
    callspec = getattr(item, "callspec", None)
    params = () if callspec is None else callspec.params.values()
    words = [word for each in params for word in (each if isinstance(each, tuple) else (each,))]
    return "ray_cluster" in item.fixturenames or any(
        isinstance(word, str) and word == "ray" for word in words
    )

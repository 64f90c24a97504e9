"""Triton's kernels run as Python, on tensors of a CPU."""

from __future__ import annotations

import pytest

__all__ = ["interpret"]


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Triton interpret kernels; skip where it is not installed, as beside no Linux."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton", exc_type=ImportError)
    from engine.attention import triton_kernels

    assert triton_kernels.IS_INTERPRETED, "kernels were imported before, to be compiled"

"""Triton's kernels run as Python on CPU tensors; ``tests/conftest.py`` requests that."""

from __future__ import annotations

import pytest


def need_interpreter() -> None:
    """Skip where Triton is not installed, as outside Linux, or compiles for a GPU."""
    pytest.importorskip("triton", exc_type=ImportError)
    from engine.attention import triton_kernels

    if not triton_kernels.IS_INTERPRETED:
        pytest.skip("there is a GPU, for which kernels are compiled: tests marked gpu run them")

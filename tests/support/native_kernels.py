"""Marks for tests that need the C kernels.

They are skipped without a compiler or when kernels are turned off; with a compiler, kernels that
do not build are a failure.
"""

from __future__ import annotations

import os

import pytest

from engine.native.kernels import NativeBuildError, find_compiler

__all__ = ["needs_compiler", "needs_kernels"]


def _compiler() -> str | None:
    try:
        return find_compiler()
    except NativeBuildError:
        return None


needs_compiler = pytest.mark.skipif(_compiler() is None, reason="needs a C compiler")
needs_kernels = pytest.mark.skipif(
    _compiler() is None or os.environ.get("OMNI_NATIVE") == "0",
    reason="needs a C compiler, and OMNI_NATIVE not 0",
)

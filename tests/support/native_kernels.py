"""Marks for tests that need the C kernels, and a job of Python functions for their threads.

They are skipped without a compiler or when kernels are turned off; with a compiler, kernels that
do not build are a failure.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import pytest

from engine.native.kernels import NativeBuildError, compile_kernels, find_compiler

_WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)


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


def run_pieces(piece: Callable[[int], object], pieces: int, threads: int) -> None:
    """Run a job whose pieces are calls of a Python function, in so many threads."""
    work = _WORK(lambda _, number: piece(number) and None)
    ctypes.CDLL(str(compile_kernels())).omni_team_run(work, None, ctypes.c_int64(pieces), threads)

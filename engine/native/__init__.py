"""Optional C kernels for the CPU. Without a compiler everything runs in torch.

``OMNI_NATIVE=0`` in the environment turns them off. Imports files, interface and prefix_cache.
"""

from __future__ import annotations

import os
from functools import cache

from engine.interface.log_fields import package_logger
from engine.native.kernels import NativeBuildError as NativeBuildError
from engine.native.kernels import NativeKernels as NativeKernels
from engine.native.kernels import PackedCodes as PackedCodes
from engine.native.kernels import PagedSpans as PagedSpans
from engine.native.kernels import compile_kernels

logger = package_logger(__name__)


def load_kernels() -> NativeKernels:
    """Return the kernels, compiled and loaded once; or raise ``NativeBuildError`` with a reason."""
    if os.environ.get("OMNI_NATIVE") == "0":
        _log_disabled()
        raise NativeBuildError("native kernels are turned off by OMNI_NATIVE=0")
    loaded = _load_once()
    if isinstance(loaded, NativeBuildError):
        raise loaded
    return loaded


@cache
def _load_once() -> NativeKernels | NativeBuildError:
    """Cache failures too, so that a missing compiler is searched for, and logged, only once."""
    try:
        return NativeKernels(compile_kernels())
    except NativeBuildError as error:
        logger.warning("no native kernels, torch does their work, more slowly: %s", error)
        return error


@cache
def _log_disabled() -> None:
    logger.info("no native kernels, torch does their work: OMNI_NATIVE=0 turns them off")

"""Compiles the C kernels with the system's compiler, once per machine, source and compiler.

The result is an entry of the cache in ``$OMNI_CACHE_DIR/native`` or
``~/.cache/omni-pipeline/native``, under a hash of everything that it depends on; see
:class:`~engine.files.disk_cache.DiskCache`. A damaged library is never loaded: it would end the
process by a signal.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from engine.files.disk_cache import CacheFolderError, DiskCache, cache_root

__all__ = ["NativeBuildError", "compile_kernels", "find_compiler"]

SOURCES = tuple(sorted(Path(__file__).parent.glob("*.[ch]")))
# Not -ffast-math: linking with it makes the whole process flush denormals to zero.
_FLAGS = ("-O3", "-march=native", "-fopenmp-simd", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
_LIBRARY = "kernels.so"
# It takes seconds, and on a machine that is busy with other things many times as long.
_TIMEOUT_S = 1200


class NativeBuildError(RuntimeError):
    """The kernels cannot be built or loaded here; the message says why."""


def find_compiler() -> str:
    """``$CC`` if it is set, else the first of gcc, cc and clang on the path.

    Raises:
        NativeBuildError: there is none.
    """
    asked = os.environ.get("CC")
    for name in (asked,) if asked else ("gcc", "cc", "clang"):
        path = shutil.which(name)
        if path is not None:
            return path
    raise NativeBuildError(
        f"$CC is {asked!r}, which is no program"
        if asked
        else "there is no C compiler (gcc, cc, clang)"
    )


def compile_kernels() -> Path:
    """The shared library, built if this is the first time or what was built is damaged.

    Raises:
        NativeBuildError: there is no compiler, or it failed; says what it printed. Or the cache
            cannot be used.
    """
    compiler = find_compiler()
    source = b"".join(path.read_bytes() for path in SOURCES)
    # -march=native is decided by the machine, and home folders are shared between machines.
    parts = (source, " ".join(_FLAGS), _run([compiler, "--version"]), _cpu_features())
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    try:
        cache = DiskCache(cache_root() / "native")
        return cache.entry(digest.hexdigest(), partial(_build, compiler)) / _LIBRARY
    except CacheFolderError as error:
        raise NativeBuildError(str(error)) from error


def _build(compiler: str, folder: Path) -> None:
    sources = [str(source) for source in SOURCES if source.suffix == ".c"]
    headers = f"-I{Path(__file__).parent}"
    _run(
        [compiler, *_FLAGS, headers, "-pthread", "-shared", *sources, "-o", str(folder / _LIBRARY)]
    )


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        raise NativeBuildError(
            f"{' '.join(command)} exited with {done.returncode}: {done.stderr.strip()[-500:]}"
        )
    return done.stdout


def _cpu_features() -> str:
    """The line of ``/proc/cpuinfo`` that lists instruction sets; the machine's name elsewhere."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text("utf-8", errors="replace").splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return f"{platform.machine()} {platform.processor()}"

"""Building of the C kernels: in a wheel, or where they run, when they are first needed.

Where they run, they are compiled once per machine, source and compiler: an entry of the cache in
``$OMNI_CACHE_DIR/native`` or ``~/.cache/omni-pipeline/native``, under a hash of everything that it
depends on; see :class:`~engine.files.disk_cache.DiskCache`. A damaged library is never loaded: it
would kill the process by a signal. A wheel built with ``OMNI_BUILD_KERNELS=1`` has a library for
each of the processors in :data:`PREBUILT`.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = tuple(sorted(FOLDER.glob("*.[ch]")))
# Not -ffast-math: linking with it makes the whole process flush denormals to zero.
_FLAGS = ("-O3", "-fopenmp-simd", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
_LIBRARY = "kernels.so"
_V3 = frozenset(("avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))
_VNNI = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"}
_VNNI_FLAGS = ("-march=x86-64-v4", "-mavx512vnni")
_AMX_FLAGS = (*_VNNI_FLAGS, "-mavx512bf16", "-mamx-tile", "-mamx-bf16")
_ALL: dict[str, dict[str, tuple[tuple[str, ...], frozenset[str]]]] = {
    "x86_64": {
        "amx": (_AMX_FLAGS, _VNNI | {"avx512_bf16", "amx_tile", "amx_bf16"}),
        "avx512_vnni": (_VNNI_FLAGS, _VNNI),
        "avx2": (("-march=x86-64-v3",), _V3),
    },
    "aarch64": {"neon": (("-march=armv8-a",), frozenset(("asimd",)))},
}
PREBUILT = _ALL.get(platform.machine(), {})
"""Libraries of a wheel, fastest first: flags, and the processor's features that each needs."""
# Compilation takes seconds, and many times as long on a busy machine.
_TIMEOUT_S = 1200


class NativeBuildError(RuntimeError):
    """Error if the kernels cannot be built or loaded; the message gives the reason."""


def find_compiler() -> str:
    """Return ``$CC``, or the first of gcc, cc and clang; ``NativeBuildError`` if there is none."""
    configured = os.environ.get("CC")
    for name in (configured,) if configured else ("gcc", "cc", "clang"):
        path = shutil.which(name)
        if path is not None:
            return path
    raise NativeBuildError(
        f"$CC is {configured!r}, which is no program"
        if configured
        else "there is no C compiler (gcc, cc, clang)"
    )


def compile_kernels() -> Path:
    """Return the path of the shared library: the wheel's, or built if it is missing or damaged.

    Raises:
        NativeBuildError: there is no compiler, it failed (the message includes its output), or the
            cache cannot be used.
    """
    # Imported here: setup.py reads this file where torch is not installed.
    from engine.files.disk_cache import CacheFolderError, DiskCache, cache_root

    for name, (_, features) in PREBUILT.items():
        library = FOLDER / f"{name}.so"
        if library.exists() and features <= set(_cpu_features().split()):
            return library
    compiler = find_compiler()
    source = b"".join(path.read_bytes() for path in SOURCES)
    # -march=native depends on the machine, and home folders are shared between machines.
    parts = (source, " ".join(_FLAGS), _run([compiler, "--version"]), _cpu_features())
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)

    def build(folder: Path) -> None:
        _compile(compiler, ("-march=native",), folder / _LIBRARY)

    try:
        cache = DiskCache(cache_root() / "native")
        return cache.entry(digest.hexdigest(), build) / _LIBRARY
    except CacheFolderError as error:
        raise NativeBuildError(str(error)) from error


def prebuild_kernels(folder: Path) -> None:
    """Compile the libraries of a wheel, which need no compiler where they are installed."""
    for name, (flags, _) in PREBUILT.items():
        _compile(find_compiler(), flags, folder / f"{name}.so")


def _compile(compiler: str, flags: Sequence[str], library: Path) -> None:
    sources = [str(source) for source in SOURCES if source.suffix == ".c"]
    where = (f"-I{FOLDER}", "-pthread", "-shared", *sources, "-o", str(library))
    _run([compiler, *_FLAGS, *flags, *where])


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
    """Return the ``/proc/cpuinfo`` line of instruction sets, or else the machine's name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text("utf-8", errors="replace").splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return f"{platform.machine()} {platform.processor()}"

"""Builds wheels with compiled C kernels if ``OMNI_BUILD_KERNELS=1``; all else is pyproject.toml's.

Such a wheel is for this kind of machine, and needs no compiler where it is installed. It has a
library for each level of processors, named by the features that the level needs.
"""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HAS_KERNELS = os.environ.get("OMNI_BUILD_KERNELS") == "1"
NATIVE = Path(__file__).parent / "engine" / "native"

AVX2 = "avx2+bmi1+bmi2+f16c+fma+abm+movbe"
VNNI = f"{AVX2}+avx512f+avx512bw+avx512cd+avx512dq+avx512vl+avx512_vnni"
VNNI_FLAGS = ("-march=x86-64-v4", "-mavx512vnni")
LEVELS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        AVX2: ("-march=x86-64-v3",),
        VNNI: VNNI_FLAGS,
        f"{VNNI}+avx512_bf16+amx_tile+amx_bf16": (
            *VNNI_FLAGS, "-mavx512bf16", "-mamx-tile", "-mamx-bf16",
        ),
    },
    "aarch64": {"asimd": ("-march=armv8-a",)},
}  # fmt: skip
"""The compiler's flags by the features of /proc/cpuinfo that the code needs, for each machine."""


def build_kernels(folder: Path, *more_flags: str) -> None:
    """Compile the kernels for every level of this kind of machine into a folder."""
    sources = map(str, NATIVE.glob("*.c"))
    command = [os.environ.get("CC", "cc"), f"@{NATIVE / 'flags.txt'}", f"-I{NATIVE}", *sources]
    command += ["-pthread", "-shared", *more_flags]
    for features, flags in LEVELS.get(platform.machine(), {}).items():
        subprocess.run([*command, *flags, "-o", str(folder / f"{features}.so")], check=True)


class BuildWithKernels(build_py):
    """Adds the compiled kernels to the files of the build."""

    def run(self) -> None:
        """Copy the packages, then compile."""
        super().run()
        if HAS_KERNELS and not self.editable_mode:
            build_kernels(Path(self.build_lib) / "engine" / "native")


class DistributionWithKernels(Distribution):
    """Belongs to a platform if it has kernels."""

    def has_ext_modules(self) -> bool:
        """Return True if there are compiled files."""
        return HAS_KERNELS


class WheelOfAnyPython(bdist_wheel):
    """Names the platform of a wheel with kernels, which any Python can load."""

    def get_tag(self) -> Any:
        """Return the tags of Python, its ABI and the platform."""
        *_, machine = super().get_tag()
        return ("py3", "none", machine)


if __name__ == "__main__":
    setup(
        distclass=DistributionWithKernels,
        cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelOfAnyPython},
    )

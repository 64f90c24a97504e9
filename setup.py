"""Builds wheels with compiled C kernels if ``OMNI_BUILD_KERNELS=1``; all else is pyproject.toml's.

Such a wheel is for this kind of machine, and needs no compiler where it is installed.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HAS_KERNELS = os.environ.get("OMNI_BUILD_KERNELS") == "1"


class BuildWithKernels(build_py):
    """Adds the compiled kernels to the files of the build."""

    def run(self) -> None:
        """Copy the packages, then compile."""
        super().run()
        if HAS_KERNELS and not self.editable_mode:
            # By its path: the package imports torch, which is not there while wheels are built.
            source = Path(__file__).parent / "engine/native/build.py"
            spec = importlib.util.spec_from_file_location("build_kernels", source)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            module.prebuild_kernels(Path(self.build_lib) / "engine" / "native")


class DistributionWithKernels(Distribution):
    """Belongs to a platform if it has kernels."""

    def has_ext_modules(self) -> bool:
        """Return True if there are compiled files."""
        return HAS_KERNELS


class WheelOfAnyPython(bdist_wheel):
    """Names the platform of a wheel with kernels, which any Python can load."""

    def get_tag(self) -> Any:
        """Return the tags of Python, its ABI and the platform."""
        *_, platform = super().get_tag()
        return ("py3", "none", platform)


setup(
    distclass=DistributionWithKernels,
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelOfAnyPython},
)

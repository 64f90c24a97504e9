"""Finds a user's own module that hides one of our packages, before its first name is missed."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

_PACKAGES = ("engine", "prefix_cache", "stages", "stage_configs")


@cache
def check_packages() -> None:
    """Check that the packages beside this one are what their names import.

    Raises:
        ImportError: one is hidden by another module of its name, such as a script ``engine.py``.
    """
    root = Path(__file__).resolve().parents[1]
    for name in _PACKAGES:
        try:
            spec = find_spec(name)
        except (ValueError, ImportError):  # a module that says nothing of where it comes from
            continue
        found = None if spec is None or spec.origin is None else Path(spec.origin).resolve()
        if found is None or found.parents[1:2] == (root,) or not (root / name).is_dir():
            continue
        raise ImportError(
            f"omni needs its package {name!r}, which {found} hides: rename that module, or take "
            "its folder off the import path (sys.path)"
        )

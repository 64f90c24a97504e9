"""Reads the packages' source as syntax trees; imports nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

__all__ = ["LAYERS", "ROOT", "arrows_back", "imported_packages", "modules"]

ROOT = Path(__file__).resolve().parents[2]

LAYERS = ("prefix_cache", "engine", "stages", "omni")
"""Lowest first: a package may import itself and those before it."""


def modules(package: str) -> list[Path]:
    """Every Python file of a top-level package."""
    return sorted((ROOT / package).rglob("*.py"))


def imported_packages(source: str) -> Iterator[tuple[int, str]]:
    """Line and top-level package of every absolute import, wherever in the file it stands.

    Imports inside functions and under ``TYPE_CHECKING`` count too, and so do literal
    ``import_module("...")`` and ``__import__("...")``.
    """
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield node.lineno, alias.name.partition(".")[0]
            case ast.ImportFrom(module=str(module), level=0):
                yield node.lineno, module.partition(".")[0]
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield node.lineno, module.partition(".")[0]


def arrows_back(package: str, source: str, place: str) -> list[str]:
    """Every import in ``source`` that a module of ``package`` must not make."""
    forbidden = LAYERS[LAYERS.index(package) + 1 :]
    return [
        f"{place}:{line}: {package} must not import {imported}"
        for line, imported in imported_packages(source)
        if imported in forbidden
    ]

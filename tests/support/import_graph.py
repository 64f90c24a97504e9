"""Reads the packages' source as syntax trees, without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]

LAYERS = ("prefix_cache", "engine", "stages", "omni")
"""Lowest first: a package may import itself and those before it."""


def modules(package: str) -> list[Path]:
    """Return every Python file of a top-level package."""
    return sorted((ROOT / package).rglob("*.py"))


def public_names(package: ModuleType) -> list[str]:
    """Return a package's re-exported names: those that it imports ``as`` themselves."""
    source = Path(str(package.__file__)).read_text("utf-8")
    found = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.ImportFrom)]
    return sorted({name.name for each in found for name in each.names if name.name == name.asname})


def module_name(file: str) -> str:
    """Return ``engine.models`` for ``engine/models/__init__.py``."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_names(source: str | ast.Module, package: str = "") -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of every import, anywhere in the file.

    ``from a import b`` is ``a.b``, module or not. Imports inside functions and under
    ``TYPE_CHECKING`` count too, and so do literal ``import_module("...")`` and
    ``__import__("...")``.
    """
    for node in ast.walk(ast.parse(source) if isinstance(source, str) else source):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield node.lineno, alias.name
            case ast.ImportFrom(module=module, names=names, level=level):
                if level and not package:
                    continue
                above = package.split(".")[: len(package.split(".")) + 1 - level] if level else []
                start = ".".join([*above, *([module] if module else [])])
                for alias in names:
                    yield node.lineno, f"{start}.{alias.name}"
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield node.lineno, module


def imported_packages(source: str | ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and top-level package of every absolute import."""
    seen = ((line, name.partition(".")[0]) for line, name in imported_names(source))
    yield from dict.fromkeys(seen)


def arrows_back(package: str, source: str, place: str) -> list[str]:
    """Return every import in ``source`` that a module of ``package`` must not make."""
    forbidden = LAYERS[LAYERS.index(package) + 1 :]
    return [
        f"{place}:{line}: {package} must not import {imported}"
        for line, imported in imported_packages(source)
        if imported in forbidden
    ]


def arrows(sources: Mapping[str, str]) -> dict[tuple[str, str], int]:
    """Return the edges between files, with the line of the first such import."""
    files = {module_name(file): file for file in sources}
    found: dict[tuple[str, str], int] = {}
    for file, source in sources.items():
        package = file.rpartition("/")[0].replace("/", ".")
        for line, name in imported_names(source, package):
            # The longest part of the name that is a file: the rest is defined in that file.
            while name and name not in files:
                name = name.rpartition(".")[0]
            if name and files[name] != file:
                found.setdefault((file, files[name]), line)
    return found


def circles(pairs: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Return the import cycles: a shortest path for each two files on one."""
    onward: dict[str, list[str]] = {}
    for start, end in sorted(pairs):
        onward.setdefault(start, []).append(end)
    found: list[list[str]] = []
    on_a_circle: set[str] = set()
    for start in sorted(onward):
        if start in on_a_circle:
            continue
        way = _shortest_way(onward, start)
        if way:
            found.append(way)
            on_a_circle.update(way)
    return found


def _shortest_way(onward: Mapping[str, list[str]], start: str) -> list[str]:
    """Return a shortest path from a file back to itself; empty if there is none."""
    ways = [[start]]
    seen: set[str] = set()
    for way in ways:
        for end in onward.get(way[-1], []):
            if end == start:
                return [*way, end]
            if end not in seen:
                seen.add(end)
                ways.append([*way, end])
    return []

"""What a module's text says of its names, without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

__all__ = ["FunctionText", "ModuleText"]

FunctionText: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
"""A function's definition, parsed."""

_REACH_INTO_MODULES = frozenset({"globals", "locals", "vars", "exec", "eval", "setattr"})
"""By which a module may give itself names that no statement of it shows."""


@dataclass(frozen=True, slots=True)
class ModuleText:
    """A module that was read.

    Attributes:
        tree: the text, parsed.
        bindings: its top-level names and what gives them, in their order; ``"*"`` for whatever an
            import brings.
    """

    tree: ast.Module
    bindings: tuple[tuple[str, ast.stmt], ...]

    @staticmethod
    def read(file: Path) -> ModuleText:
        """Parse a file.

        Raises:
            ValueError: it is no Python, or none that can be parsed.
        """
        try:
            tree = ast.parse(file.read_bytes(), str(file))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"{str(file)!r} is no Python: {error}") from error
        return ModuleText(tree, tuple(_bindings(tree.body)))

    @property
    def names(self) -> frozenset[str]:
        """The top-level names."""
        return frozenset(name for name, _ in self.bindings)

    @property
    def makes_names(self) -> bool:
        """Whether it may have names that its text does not tell."""
        return not self.names.isdisjoint({"*", "__getattr__"})

    def functions(self, name: str) -> tuple[FunctionText, ...]:
        """The definitions of a name, if it can be nothing else than one of them as it stands.

        None of one that is decorated, given in another way as well, or used by the module itself,
        which may declare it or put something else in its place.
        """
        given = [node for each, node in self.bindings if each in (name, "*")]
        sure = [place for place, node in enumerate(given) if node in self.tree.body]
        given = given[sure[-1] if sure else 0 :]
        functions = tuple(
            node for node in given if isinstance(node, FunctionText) and not node.decorator_list
        )
        return functions if len(functions) == len(given) and not self._uses(name) else ()

    def decorators(self, name: str) -> tuple[ast.expr, ...] | None:
        """What stands above the one definition of a function; None if it may be another one."""
        given = [node for each, node in self.bindings if each in (name, "*")]
        match given:
            case [ast.FunctionDef() as function] if function in self.tree.body:
                return None if self._uses(name) else tuple(function.decorator_list)
        return None

    def imported_as(self, expression: ast.expr) -> str | None:
        """The name by which ``from omni import x`` or ``omni.x`` brings what is written."""
        match expression:
            case ast.Attribute(value=ast.Name(id=package), attr=attribute):
                nodes = [node for name, node in self.bindings if name == package]
                is_module = len(nodes) == 1 and isinstance(nodes[0], ast.Import)
                return f"{package}.{attribute}" if is_module else None
            case ast.Name(id=written):
                nodes = [node for name, node in self.bindings if name == written]
                match nodes:
                    case [ast.ImportFrom(module=str(module), names=names, level=0)]:
                        for alias in names:
                            if (alias.asname or alias.name) == written:
                                return f"{module}.{alias.name}"
        return None

    def what_it_is(self, name: str) -> str | None:
        """What a name stands for, if its text shows that this cannot be called: a module, a str.

        None of one that may be given in another way as well.
        """
        given = [node for each, node in self.bindings if each in (name, "*")]
        shown = {_value_of(node, name) for node in given}
        return shown.pop() if len(shown) == 1 and not self._may_change(name, given) else None

    def _may_change(self, name: str, given: list[ast.stmt]) -> bool:
        """Whether anything but some statements may give a name."""
        own = {id(node) for statement in given for node in ast.walk(statement)}
        for node in ast.walk(self.tree):
            match node:
                case ast.Name(id=written, ctx=ast.Store()) if written == name:
                    if id(node) not in own:
                        return True
                case ast.Name(id=written) if written in _REACH_INTO_MODULES:
                    return True
                case ast.Attribute(attr="modules" | "__dict__"):
                    return True
                case ast.Global(names=names) if name in names:
                    return True
                case ast.MatchAs(name=taken) | ast.MatchStar(name=taken) if taken == name:
                    return True
                case ast.alias() if id(node) not in own:
                    if name in (node.asname or node.name.partition(".")[0], "*"):
                        return True
        return False

    def _uses(self, name: str) -> bool:
        return any(
            isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
            for node in ast.walk(self.tree)
        )


def _bindings(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node
            case ast.ClassDef(name=name):
                yield name, node
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                for alias in aliases:
                    yield alias.asname or alias.name.partition(".")[0], node
            case ast.Assign() | ast.AnnAssign() | ast.With() | ast.For():
                for each in ast.walk(node):
                    if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                        yield each.id, node
                yield from _bindings(getattr(node, "body", []))
            case ast.If() | ast.Try() | ast.TryStar():
                for part in ("body", "orelse", "finalbody"):
                    yield from _bindings(getattr(node, part, []))
                for handler in getattr(node, "handlers", []):
                    yield from _bindings(handler.body)


def _value_of(node: ast.stmt, name: str) -> str | None:
    """What kind of a value a statement gives a name, if none of that kind can be called."""
    match node:
        case ast.Import():
            return "module"
        case ast.Assign(targets=targets, value=value):
            is_whole = any(isinstance(each, ast.Name) and each.id == name for each in targets)
            return _kind_of(value) if is_whole else None
        case ast.AnnAssign(target=ast.Name(), value=ast.expr() as value):
            return _kind_of(value)
    return None


def _kind_of(value: ast.expr) -> str | None:
    """The class of what a literal, or a display, makes."""
    match value:
        case ast.Constant():
            return type(value.value).__name__
        case ast.JoinedStr():
            return "str"
        case ast.List() | ast.ListComp():
            return "list"
        case ast.Dict() | ast.DictComp():
            return "dict"
        case ast.Set() | ast.SetComp():
            return "set"
        case ast.Tuple():
            return "tuple"
        case ast.GeneratorExp():
            return "generator"
    return None

"""Code of users: found beside the pipeline's file or among installed modules, and loaded.

Transforms are code of users, and so are kinds of stages.

Finding runs no code: the name's shape is checked, the file looked for, and its text read. Loading
runs the file. One that is stored beside a pipeline's file is loaded under a name of its folder's
own and never through the import path, so that no other import finds what else is stored there: a
``json.py`` beside a pipeline's file does not replace the standard library's ``json``.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TypeAlias

from engine.interface.placed_error import suggest
from stages.stage import TransformContext

FOLDER_PACKAGE = "omni_transforms_"
"""How the names begin of packages that stand for folders of pipelines' files."""

_FORM = "the form 'package.module:function', or 'file.py:function'"
_MOST_BYTES = 2**20

_FunctionText: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
"""A function's definition, parsed."""


def locate_custom(spec: str, folder: Path | None, *, what: str = "transform") -> str:
    """Find a function or a class that a user names, and run nothing.

    Args:
        spec: ``"package.module:function"`` or ``"file.py:function"``.
        folder: of the pipeline's file, which is searched first; None leaves installed
            modules.
        what: it is to be: a ``transform``, whose text is checked, or anything else.

    Returns:
        The name under which :func:`load_custom` finds the same from anywhere: with the whole path
        of a file beside the pipeline's, and otherwise as it was given.

    Raises:
        ValueError: it has another form, or there is no such file, module or function.
    """
    module, function = _parts(spec, what)
    if module.endswith(".py"):
        file = Path(module) if folder is None else folder / module
        if not _is_file(file):
            raise ValueError(f"{what} {spec!r}: there is no file {str(file)[:200]!r}")
    else:
        beside = None if folder is None else _source_in(folder, module.split("."))
        if beside is None:
            _check_installed(spec, module, function, folder, what)
            return spec
        file = beside
    _check_defines(spec, file, function, what)
    return f"{file.resolve()}:{function}"


def imported_custom(spec: str) -> tuple[object, ...]:
    """What a name stands for, alone, if its module is imported already and says so without running.

    Args:
        spec: as :func:`locate_custom` gives it.
    """
    module, function = _parts(spec)
    names = vars(sys.modules.get(module, object))
    return (names[function],) if function in names else ()


def load_custom(spec: str, *, what: str = "transform") -> object:
    """Import the module of a function or a class, which runs it, and give what the name stands for.

    Args:
        spec: as :func:`locate_custom` gives it, or of an installed module.
        what: likewise, for messages.

    Raises:
        ValueError: it has another form, or the module cannot be imported, or lacks the name.
    """
    module_name, function_name = _parts(spec, what)
    try:
        if module_name.endswith(".py"):
            module = _load_file(Path(module_name).expanduser().resolve())
        else:
            module = importlib.import_module(module_name)
    except Exception as error:  # whatever a user's module raises is this name's error
        raise ValueError(
            f"{what} {spec!r}: module {module_name!r} cannot be imported: "
            f"{type(error).__name__}: {error}{_neighbour_hint(module_name, error)}"
        ) from error
    if not hasattr(module, function_name):
        raise ValueError(_lacks(f"{what} {spec!r}", module_name, function_name, dir(module)))
    return getattr(module, function_name)


def _parts(spec: str, what: str = "transform") -> tuple[str, str]:
    module, _, function = spec.rpartition(":")
    is_file = module.endswith(".py")
    is_module = all(part.isidentifier() for part in module.split("."))
    if not function.isidentifier() or not (is_file or is_module):
        raise ValueError(f"{what} {spec!r} must have {_FORM}")
    return module, function


def _source_in(folder: Path, parts: list[str]) -> Path | None:
    """The source of a module in a folder, if it is there."""
    base = folder.joinpath(*parts)
    for file in (base.with_name(f"{base.name}.py"), base / "__init__.py"):
        if _is_file(file):
            return file
    return None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # no name can be so long
        return False


def _check_installed(spec: str, module: str, function: str, folder: Path | None, what: str) -> None:
    """Look for an installed module as far as that goes without importing anything."""
    subject = f"{what} {spec!r}"
    imported = sys.modules.get(module)
    if imported is not None:
        names = vars(imported).keys()
        if function not in names and "__getattr__" not in names:
            raise ValueError(_lacks(subject, module, function, list(names)))
        return
    found = find_module(module)
    if found is None:
        where = (
            "" if folder is None else f"not beside the pipeline's file, in {str(folder)!r}, and "
        )
        top = module.partition(".")[0]
        though = f", though {top!r} is" if top != module and find_module(top) is not None else ""
        raise ValueError(f"{subject}: module {module!r} is {where}not installed{though}")
    file = Path(found.origin or "")
    # Compiled modules, and those of special loaders, are looked at when they are loaded.
    if file.suffix == ".py" and _is_file(file):
        _check_defines(spec, file, function, what)


def find_module(module: str) -> ModuleSpec | None:
    """Find a module as another process would, not among those that are imported; import nothing."""
    found, path = None, None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        specs = (
            finder.find_spec(name, path) for finder in sys.meta_path if hasattr(finder, "find_spec")
        )
        found = next((spec for spec in specs if spec is not None), None)
        path = None if found is None else found.submodule_search_locations
        if found is None or (path is None and depth < len(parts)):
            return None
    return found


def _check_defines(spec: str, file: Path, function: str, what: str) -> None:
    """Check that a file's text has a top-level name that may be a transform; else it raises."""
    subject = f"{what} {spec!r}"
    if file.stat().st_size > _MOST_BYTES:
        raise ValueError(
            f"{subject}: {str(file)!r} has more than {_MOST_BYTES} bytes; put the "
            f"{what} into a module of its own"
        )
    try:
        text = ModuleText.read(file)
    except ValueError as error:
        raise ValueError(f"{subject}: {error}") from error
    if function not in text.names and not text.makes_names:
        raise ValueError(_lacks(subject, str(file), function, list(text.names)))
    if what != "transform":
        return
    refusals: list[ValueError] = []
    functions = text.functions(function)
    for each in functions:
        try:
            _check_written(each, spec)
        except ValueError as error:
            refusals.append(error)
    # Of several definitions, one is chosen when the module runs.
    if refusals and len(refusals) == len(functions):
        raise refusals[0]


def _load_file(file: Path) -> ModuleType:
    """Import a file as what it is: a module of its package, or of its folder."""
    parts = [] if file.stem == "__init__" else [file.stem]
    root = file.parent
    while (root / "__init__.py").is_file():
        parts.insert(0, root.name)
        root = root.parent
    folder = _package_of(root)
    importlib.invalidate_caches()  # the file may be newer than what was read of its folder
    return importlib.import_module(".".join((folder, *parts)))


def _package_of(folder: Path) -> str:
    """The name of a package that stands for a folder: its modules see each other by ``from .``."""
    name = f"{FOLDER_PACKAGE}{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"
    if name not in sys.modules:
        package = ModuleType(name, f"The modules in {folder}.")
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    return name


def _neighbour_hint(module_name: str, error: Exception) -> str:
    """What to write in the place of ``import neighbour``, if that is what failed."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return ""
    if (
        not module_name.endswith(".py")
        or _source_in(Path(module_name).parent, [error.name]) is None
    ):
        return ""
    return f"; a module imports its neighbours by 'from . import {error.name}'"


def _lacks(subject: str, module: str, function: str, names: list[str]) -> str:
    near = suggest(function, names)
    hint = near if near.endswith("?") else ""  # not all names of a module
    return f"{subject}: module {module!r} has no {function!r}{hint}"


def check_takes_context(signature: inspect.Signature, name: str) -> None:
    """Refuse what cannot be called with one argument."""
    try:
        signature.bind(None)
    except TypeError as error:
        raise ValueError(
            f"transform {name!r} must take exactly one argument, a TransformContext: {error}"
        ) from error


def check_looks_like_one(signature: inspect.Signature, name: str) -> None:
    """Refuse to call what nothing says is a transform: ``os:system``.

    Args:
        signature: of what takes one argument, and is not declared as a transform.
        name: as whom the file names it.

    Raises:
        ValueError: the argument has neither the name nor the type of a transform's.
    """
    argument = next(iter(signature.parameters.values()))
    annotation = argument.annotation
    named = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    if argument.name != "context" and named.rpartition(".")[2] != TransformContext.__name__:
        raise ValueError(
            f"{name!r} is no transform: the argument of one is named 'context' or annotated as a "
            f"TransformContext, or it is declared by @omni.requires(); this one takes {argument}"
        )


def _check_written(function: _FunctionText, name: str) -> None:
    """Refuse, by its text alone, a function that would be refused once it is loaded."""
    if isinstance(function, ast.AsyncFunctionDef):
        raise ValueError(f"transform {name!r} is a coroutine function; it must be a plain one")
    signature = _signature_of(function)
    check_takes_context(signature, name)
    check_looks_like_one(signature, name)


def _signature_of(function: _FunctionText) -> inspect.Signature:
    """The signature of a function that is compiled and never made, by a stand-in for it."""
    args = function.args
    try:
        constants = compile(ast.Module([function], []), "", "exec").co_consts
    except SyntaxError as error:  # what a parser lets pass, such as break without a loop
        raise ValueError(f"{function.name!r} is no Python: {error}") from error
    codes = (each for each in constants if isinstance(each, CodeType))
    code = next(each for each in codes if each.co_name == function.name)
    stand_in = FunctionType(code, {}, argdefs=(None,) * len(args.defaults))
    pairs = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    stand_in.__kwdefaults__ = {arg.arg: None for arg, default in pairs if default is not None}
    for arg in filter(None, (*args.posonlyargs, *args.args, args.vararg)):
        match arg.annotation:
            case None:
                pass
            case ast.Name(id=written) if hasattr(builtins, written):
                stand_in.__annotations__[arg.arg] = getattr(builtins, written)
            case _:  # it may stand for anything
                stand_in.__annotations__[arg.arg] = TransformContext
    return inspect.signature(stand_in)


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

    def functions(self, name: str) -> tuple[_FunctionText, ...]:
        """The definitions of a name, if it can be nothing else than one of them as it stands.

        None of one that is decorated, given in another way as well, or used by the module itself,
        which may declare it or put something else in its place.
        """
        given = [node for each, node in self.bindings if each in (name, "*")]
        sure = [place for place, node in enumerate(given) if node in self.tree.body]
        given = given[sure[-1] if sure else 0 :]
        functions = tuple(
            node for node in given if isinstance(node, _FunctionText) and not node.decorator_list
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

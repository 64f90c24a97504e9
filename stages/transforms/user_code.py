"""Lookup and import of user code (transforms and stage kinds).

User code is in files next to the pipeline's file, or in installed modules.

Locating runs no code: it checks the format of the name, searches the file, and parses its text.
Loading runs the file. A file next to a pipeline's file is loaded into a package that is unique to
its folder and never through the import path, so that other imports do not find files there: a
``json.py`` next to a pipeline's file does not replace the standard library's ``json``.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import sys
from importlib.machinery import ModuleSpec
from importlib.util import decode_source
from pathlib import Path
from symtable import symtable
from types import ModuleType

from engine.interface.placed_error import suggest

FOLDER_PACKAGE = "omni_transforms_"
"""Prefix of the names of packages that represent folders of pipelines' files."""

_FORM = "the form 'package.module:function', or 'file.py:function'"
_MAX_BYTES = 2**20


def locate_custom(spec: str, folder: Path | None, *, what: str = "transform") -> str:
    """Locate a function or class by a user's reference, without running code.

    Args:
        spec: ``"package.module:function"`` or ``"file.py:function"``.
        folder: folder of the pipeline's file, which is searched first; None: search only
            installed modules.
        what: kind of object, for messages.

    Returns:
        A name that :func:`load_custom` resolves to the same object in any folder: with the
        absolute path of a file next to the pipeline's file, otherwise as given.

    Raises:
        ValueError: it has another form, or there is no such file, module or function.
    """
    module, function = _parts(spec, what)
    file: Path | None
    if module.endswith(".py"):
        file = Path(module) if folder is None else folder / module
        if not _is_file(file):
            raise ValueError(f"{what} {spec!r}: there is no file {str(file)[:200]!r}")
    else:
        file = None if folder is None else _source_in(folder, module.split("."))
        if file is None:
            _check_installed(spec, module, function, folder, what)
            return spec
    _check_defines(spec, file, function, what)
    return f"{file.resolve()}:{function}"


def load_custom(spec: str, *, what: str = "transform") -> object:
    """Import the module of a function or class, which runs it, and return the object.

    Args:
        spec: a name from :func:`locate_custom`, or of an installed module.
        what: kind of object, for messages.

    Raises:
        ValueError: it has another form, or the module cannot be imported, or lacks the name.
    """
    module_name, function_name = _parts(spec, what)
    try:
        if module_name.endswith(".py"):
            module = _load_file(Path(module_name).expanduser().resolve())
        else:
            module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything; report it for this name
        raise ValueError(
            f"{what} {spec!r}: module {module_name!r} cannot be imported: "
            f"{type(error).__name__}: {error}{_neighbour_hint(module_name, error)}"
        ) from error
    if not hasattr(module, function_name):
        raise ValueError(_missing(f"{what} {spec!r}", module_name, function_name, dir(module)))
    return getattr(module, function_name)


def _parts(spec: str, what: str) -> tuple[str, str]:
    module, _, function = spec.rpartition(":")
    is_file = module.endswith(".py")
    is_module = all(part.isidentifier() for part in module.split("."))
    if not function.isidentifier() or not (is_file or is_module):
        raise ValueError(f"{what} {spec!r} must have {_FORM}")
    return module, function


def _source_in(folder: Path, parts: list[str]) -> Path | None:
    """Return the source file of a module in a folder, or None."""
    base = folder.joinpath(*parts)
    for file in (base.with_name(f"{base.name}.py"), base / "__init__.py"):
        if _is_file(file):
            return file
    return None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # the name is too long
        return False


def _check_installed(spec: str, module: str, function: str, folder: Path | None, what: str) -> None:
    """Check for an installed module, as far as possible without importing anything."""
    subject = f"{what} {spec!r}"
    imported = sys.modules.get(module)
    if imported is not None:
        names = vars(imported).keys()
        if function not in names and "__getattr__" not in names:
            raise ValueError(_missing(subject, module, function, list(names)))
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
    # Compiled modules, and those of special loaders, are checked when they are loaded.
    if file.suffix == ".py" and _is_file(file):
        _check_defines(spec, file, function, what)


def find_module(module: str) -> ModuleSpec | None:
    """Find a module as another process would, ignoring imported ones, without importing it."""
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
    """Raise ``ValueError`` unless a file's text defines a top-level name."""
    subject = f"{what} {spec!r}"
    if file.stat().st_size > _MAX_BYTES:
        raise ValueError(
            f"{subject}: {str(file)!r} has more than {_MAX_BYTES} bytes; put the "
            f"{what} into a module of its own"
        )
    try:
        names = _top_level_names(decode_source(file.read_bytes()), str(file))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{subject}: {str(file)!r} is no Python: {error}") from error
    if names.isdisjoint({function, "*", "__getattr__"}):
        raise ValueError(_missing(subject, str(file), function, list(names)))


def _load_file(file: Path) -> ModuleType:
    """Import a file as a module of its package, or of its folder."""
    parts = [] if file.stem == "__init__" else [file.stem]
    root = file.parent
    while (root / "__init__.py").is_file():
        parts.insert(0, root.name)
        root = root.parent
    folder = _folder_package(root)
    importlib.invalidate_caches()  # the file may be newer than the cached listing of its folder
    return importlib.import_module(".".join((folder, *parts)))


def _folder_package(folder: Path) -> str:
    """Return a package for a folder, whose modules import each other by ``from .``."""
    name = f"{FOLDER_PACKAGE}{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"
    if name not in sys.modules:
        package = ModuleType(name, f"The modules in {folder}.")
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    return name


def _neighbour_hint(module_name: str, error: Exception) -> str:
    """Return a hint to use a relative import, if ``import neighbour`` failed."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    folder = Path(module_name).parent
    if missing is None or not module_name.endswith(".py") or not _source_in(folder, [missing]):
        return ""
    return f"; a module imports its neighbours by 'from . import {missing}'"


def _missing(subject: str, module: str, function: str, names: list[str]) -> str:
    near = suggest(function, names)
    hint = near if near.endswith("?") else ""  # do not list all names of a module
    return f"{subject}: module {module!r} has no {function!r}{hint}"


def _top_level_names(text: str, file: str) -> set[str]:
    """Return the top-level names that a module's text defines; ``"*"`` for star imports."""
    imports = (each for each in ast.walk(ast.parse(text, file)) if isinstance(each, ast.ImportFrom))
    stars = {alias.name for each in imports for alias in each.names if alias.name == "*"}
    symbols = symtable(text, file, "exec").get_symbols()
    return stars | {each.get_name() for each in symbols if each.is_assigned() or each.is_imported()}

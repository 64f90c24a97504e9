"""Names by which other processes import transforms and stage classes.

Workers in other processes import the code that they run; no code is ever sent to them. Objects that
cannot be imported by name (lambdas, nested functions, definitions in a main script) must stay here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

from engine.interface.placed_error import described
from stages.stage import Stage, Transform
from stages.stage_config import StageConfig
from stages.transforms.registry import is_custom, resolve_transform
from stages.transforms.user_code import FOLDER_PACKAGE, find_module, load_custom

_BUILT_IN_PREFIX = "stages.transforms."


def check_portable(stages: Mapping[str, Stage | StageConfig]) -> None:
    """Check that a worker in another process can import the code of (built or configured) stages.

    No worker is started, and no model is loaded; modules of transforms are imported.

    Raises:
        ValueError: the class of a stage, or its transform, cannot be imported by a name; states
            which, the reason and a remedy.
    """
    for name, stage in stages.items():
        try:
            _check_stage(stage)
        except ValueError as error:
            raise ValueError(f"stage {name!r}: {error}") from error


def _check_stage(stage: Stage | StageConfig) -> None:
    try:
        import_name(type(stage))
    except ValueError as error:
        what = f"kind {stage.kind!r}" if isinstance(stage, StageConfig) else "its class"
        raise ValueError(f"{what}: {error}") from error
    if stage.inputs is not None:
        portable_transform(stage.inputs.transform)


def portable_transform(spec: str | Transform) -> str:
    """Return the name by which another process finds a transform; see :func:`load_by_name`.

    Raises:
        ValueError: there is no such name; states the reason.
    """
    if isinstance(spec, str):
        if is_custom(spec):
            if spec.startswith("__main__:"):
                raise ValueError(f"transform {spec!r}: {_main_error(spec.partition(':')[2])}")
            return spec
        function = resolve_transform(spec)
        if function.__module__.startswith(_BUILT_IN_PREFIX):
            return spec
    else:
        function = spec
    try:
        return import_name(function)
    except ValueError as error:
        name = getattr(function, "__qualname__", type(function).__name__)
        raise ValueError(f"transform {name!r}: {error}") from error


def import_name(value: Any) -> str:
    """Return the name by which a process with the same import path finds a function or class.

    Returns:
        ``"package.module:Class"``, or ``"/folder/file.py:function"`` for a file next to a
        pipeline's file.

    Raises:
        ValueError: there is no such name; states the reason and a remedy.
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        raise ValueError(
            f"a {type(value).__name__} has no name that a worker could import; write a function of "
            "a module"
        )
    if "<lambda>" in name:
        raise ValueError(
            "a lambda has no name that a worker could import; write a function of a module"
        )
    if "<locals>" in name:
        outer = name.split(".<locals>", 1)[0]
        raise ValueError(
            f"it is defined inside of {outer!r}, where no worker can import it; move it to the top "
            "level of a module"
        )
    if module == "__main__":
        raise ValueError(_main_error(name))
    if module.startswith(FOLDER_PACKAGE):
        return f"{sys.modules[module].__file__}:{name}"
    if find_module(module) is None:
        raise ValueError(
            f"its module {module!r} is not on the import path, where a worker would look for it; "
            "install it, or name its folder in PYTHONPATH"
        )
    if _attribute(sys.modules.get(module), name) is not value:
        raise ValueError(
            f"'{module}:{name}' is not it, but something else of that name, or nothing; give it a "
            "name of its own at the top level of its module"
        )
    return f"{module}:{name}"


def load_by_name(name: str) -> Any:
    """Import an object by a name from :func:`import_name` or :func:`portable_transform`.

    Raises:
        ValueError: it cannot be imported here; states the reason.
    """
    module, colon, path = name.rpartition(":")
    if not colon:
        return resolve_transform(name)
    if module.endswith(".py"):
        return load_custom(name, what="the stage's code")
    try:
        imported = importlib.import_module(module)
    except Exception as error:  # a user's module may raise anything; report it for this name
        raise ValueError(f"{name!r} cannot be imported in a worker: {described(error)}") from error
    found = _attribute(imported, path)
    if found is None:
        raise ValueError(f"{name!r} cannot be imported in a worker: {module!r} has no {path!r}")
    return found


def _attribute(value: Any, path: str) -> Any:
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


def _main_error(name: str) -> str:
    return (
        f"{name!r} is defined in the main script, which a worker does not run; move it into a "
        "module of its own, and import it from there"
    )

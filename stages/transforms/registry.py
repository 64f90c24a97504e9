"""Registry and requirements of transforms, which make a stage's prompt from earlier outputs.

A transform is a plain function ``(TransformContext) -> Prompt``. Pipelines reference it by its
registered name, or, without registration, as ``"package.module:function"``.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from engine import Prompt
from engine.interface.arguments import check_argument, check_names
from stages.stage import Transform, TransformContext
from stages.stage_output import StageOutput
from stages.transforms.user_code import load_custom, locate_custom

_TransformT = TypeVar("_TransformT", bound=Transform)

_REGISTRY: dict[str, Transform] = {}
_REQUIREMENTS = "_requirements"


@dataclass(frozen=True, slots=True)
class Requirements:
    """Requirements of a transform on the edges that use it.

    Attributes:
        tensors: names of tensors that each source must output.
        same_width: True if the source's ``hidden_size`` must equal that of the stage.
        num_sources: number of stages that feed it; None for any number.
        chunkable: True if it supports chunks.
    """

    tensors: tuple[str, ...] = ()
    same_width: bool = False
    num_sources: int | None = None
    chunkable: bool = False


def requirements_of(transform: Transform) -> Requirements:
    """Return the declared requirements of a transform; the default has none."""
    return getattr(transform, _REQUIREMENTS, Requirements())


def requires(
    *tensors: str, same_width: bool = False, num_sources: int | None = None
) -> Callable[[_TransformT], _TransformT]:
    """Decorator that declares requirements of a transform.

    They are checked twice: when a pipeline is built, as far as its stages declare their outputs;
    and before each call of the transform, where missing tensors fail the request. ::

        @requires("hidden_states", "codes", num_sources=1)
        def codes_with_states(context: TransformContext) -> EmbedsPrompt: ...

    Args:
        tensors: names of tensors that each source must output.
        same_width: True if the source's hidden states are the stage's embeddings, and so must have
            the same width.
        num_sources: number of stages that may feed it; None for any number.

    Returns:
        A decorator. The decorated transform raises ``ValueError`` for unsuitable sources.
    """
    check_names("what a transform requires", tensors)

    def declare(function: _TransformT) -> _TransformT:
        @wraps(function)
        def checked(context: TransformContext) -> Prompt:
            check_sources(requirements_of(checked), context.sources)
            return function(context)

        _declare(checked, tensors=tensors, same_width=same_width, num_sources=num_sources)
        return cast("_TransformT", checked)  # same argument and result

    return declare


def check_sources(needs: Requirements, sources: Sequence[StageOutput]) -> None:
    """Check outputs of sources against the requirements of a transform.

    Raises:
        ValueError: the number of sources is wrong, or a tensor is missing.
    """
    wanted = needs.num_sources
    if wanted not in (None, len(sources)):
        names = ", ".join(repr(source.stage) for source in sources)
        count = "one source" if wanted == 1 else f"{wanted} sources"
        raise ValueError(f"this transform takes {count}, got {len(sources)}: {names}")
    for source in sources:
        missing = [repr(name) for name in needs.tensors if name not in source.tensors]
        if missing:
            raise ValueError(
                f"stage {source.stage!r} handed on no {', '.join(missing)} (it handed on "
                f"{sorted(source.tensors)}); add {', '.join(missing)} to its outputs"
            )


def chunkable(function: _TransformT) -> _TransformT:
    """Decorator that marks a transform as suitable for edges with a ``chunk_size``.

    Such a transform is called once per chunk. It makes the first chunk's prompt and its extensions,
    according to ``first_row`` and ``is_last`` of its context, and is stateless::

        @chunkable
        def codes(context: TransformContext) -> CodecPrompt:
            (source,) = context.sources
            return CodecPrompt(
                source.token_ids,
                is_last=context.is_last,
                is_cut_off=source.finish_reason is FinishReason.LENGTH,
            )
    """
    if not callable(function):
        raise ValueError(f"a chunkable transform must be a function, got {function!r}")
    return _declare(function, chunkable=True)


def takes_chunks(transform: Transform) -> bool:
    """Return True if a transform was marked as :func:`chunkable`."""
    return requirements_of(transform).chunkable


def _declare(function: _TransformT, **changes: Any) -> _TransformT:
    setattr(function, _REQUIREMENTS, replace(requirements_of(function), **changes))
    return function


def register_transform(name: str) -> Callable[[_TransformT], _TransformT]:
    """Decorator that registers a transform under a name for pipelines.

    Raises:
        ValueError: the name is taken or contains a colon, or the function cannot be called with
            one ``TransformContext``.
    """
    check_argument("a transform's name", name, str, "a str")
    if not name or ":" in name:
        raise ValueError(
            f"transform name {name!r} must not be empty or have a ':' in it, "
            "which marks 'package.module:function'"
        )

    def register(function: _TransformT) -> _TransformT:
        if name in _REGISTRY and _REGISTRY[name] is not function:
            raise ValueError(f"a transform named {name!r} is registered already")
        _check_signature(function, name)
        _REGISTRY[name] = function
        return function

    return register


def registered_transforms() -> tuple[str, ...]:
    """Return all registered names, sorted."""
    return tuple(sorted(_REGISTRY))


def locate_transform(spec: str, folder: Path | None = None) -> str:
    """Check a transform's name without running any user code.

    Args:
        spec: a registered name, ``"package.module:function"``, or ``"file.py:function"``.
        folder: folder of the file that contains the name; searched first for modules.

    Returns:
        A name that :func:`resolve_transform` resolves to the same transform in any folder.

    Raises:
        ValueError: there is no such name, module, file or function, as far as can be determined
            without importing it.
    """
    if is_custom(spec):
        return locate_custom(spec, folder)
    _get_registered(spec)
    return spec


def is_custom(spec: str | Transform) -> bool:
    """Return True if a transform is named by its location, and must be imported."""
    return isinstance(spec, str) and ":" in spec


def resolve_transform(spec: str | Transform) -> Transform:
    """Find a transform; a user's module is imported, which runs it.

    A function that a file names must be recognizable as a transform before it is called: declared
    by :func:`requires`, :func:`chunkable` or :func:`register_transform`, or with one argument that
    is named ``context`` or annotated as a ``TransformContext``.

    Args:
        spec: a registered name, ``"package.module:function"`` of an installed module,
            ``"file.py:function"``, or the function itself.

    Raises:
        ValueError: there is no such name, module or function, or it is no transform.
    """
    if not isinstance(spec, str):
        _check_signature(spec, getattr(spec, "__qualname__", repr(spec)))
        return spec
    if not is_custom(spec):
        return _get_registered(spec)
    function: Any = load_custom(spec)
    _check_is_transform(function, spec)
    return function


def _get_registered(name: str) -> Transform:
    if name not in _REGISTRY:
        close = difflib.get_close_matches(name, _REGISTRY, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(
            f"unknown transform {name!r}; {hint}registered are "
            f"{', '.join(registered_transforms())}; "
            "your own are named as 'package.module:function'"
        )
    return _REGISTRY[name]


def _check_signature(function: object, name: str) -> None:
    if not callable(function):
        raise ValueError(f"transform {name!r} is a {type(function).__name__}, not a function")
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"transform {name!r} is a coroutine function; it must be a plain one")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"transform {name!r} must take exactly one argument, a TransformContext, and does not "
            f"say what it takes: {error}"
        ) from error
    try:
        signature.bind(None)
    except TypeError as error:
        raise ValueError(
            f"transform {name!r} must take exactly one argument, a TransformContext: {error}"
        ) from error


def _check_is_transform(function: Any, name: str) -> None:
    """Reject functions that are not recognizable as transforms, such as ``os:system``."""
    _check_signature(function, name)
    if hasattr(function, _REQUIREMENTS) or function in _REGISTRY.values():
        return
    argument = next(iter(inspect.signature(function).parameters.values()))
    annotation = argument.annotation
    named = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    if argument.name != "context" and named.rpartition(".")[2] != TransformContext.__name__:
        raise ValueError(
            f"{name!r} is no transform: the argument of one is named 'context' or annotated as a "
            f"TransformContext, or it is declared by @omni.requires(); this one takes {argument}"
        )

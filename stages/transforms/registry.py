"""Transforms: how a stage's prompt is made from what earlier stages put out.

A transform is a plain function ``(TransformContext) -> Prompt``. Pipelines name it by its
registered name, or as ``"package.module:function"``, so that a user's own needs no registration.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from stages.stage import Transform

__all__ = [
    "Requirements",
    "chunkable",
    "register_transform",
    "registered_transforms",
    "requirements_of",
    "requires",
    "resolve_transform",
    "takes_chunks",
]

_TransformT = TypeVar("_TransformT", bound=Transform)

_REGISTRY: dict[str, Transform] = {}
_REQUIREMENTS = "_requirements"


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a transform needs of the edges that it is put on.

    Attributes:
        tensors: names of what each source has to hand on.
        same_width: whether the source's ``hidden_size`` must be that of the stage.
        num_sources: how many stages feed it; None for any number.
        chunkable: whether it works chunk by chunk.
    """

    tensors: tuple[str, ...] = ()
    same_width: bool = False
    num_sources: int | None = None
    chunkable: bool = False


def requirements_of(transform: Transform) -> Requirements:
    """What a transform was declared to need; nothing if it declares nothing."""
    declared: Requirements = getattr(transform, _REQUIREMENTS, Requirements())
    return declared


def requires(
    *tensors: str, same_width: bool = False, num_sources: int | None = None
) -> Callable[[_TransformT], _TransformT]:
    """Decorator that declares what a transform needs, for pipelines to check when they are made.

    ::

        @requires("hidden_states", "codes", num_sources=1)
        def codes_with_states(context: TransformContext) -> EmbedsPrompt: ...

    Args:
        tensors: names of what each source has to hand on.
        same_width: whether the source's hidden states become the stage's embeddings, and so must
            be as wide.
        num_sources: how many stages may feed it; None for any number.
    """

    def declare(function: _TransformT) -> _TransformT:
        return _declare(function, tensors=tensors, same_width=same_width, num_sources=num_sources)

    return declare


def chunkable(function: _TransformT) -> _TransformT:
    """Decorator that marks a transform as fit for edges with a ``chunk_size``.

    Such a transform is called once per chunk. It makes the first chunk's prompt and those that
    extend it, by ``first_row`` and ``is_last`` of its context, and keeps nothing between calls::

        @chunkable
        def codes(context: TransformContext) -> CodecPrompt:
            (talker,) = context.sources
            return CodecPrompt(
                talker.token_ids,
                is_last=context.is_last,
                is_cut_off=talker.finish_reason is FinishReason.LENGTH,
            )
    """
    return _declare(function, chunkable=True)


def takes_chunks(transform: Transform) -> bool:
    """Whether a transform was marked as :func:`chunkable`."""
    return requirements_of(transform).chunkable


def _declare(function: _TransformT, **changes: Any) -> _TransformT:
    setattr(function, _REQUIREMENTS, replace(requirements_of(function), **changes))
    return function


def register_transform(name: str) -> Callable[[_TransformT], _TransformT]:
    """Decorator that gives a transform a name that pipelines can use.

    Raises:
        ValueError: the name is taken or has a colon in it, or the function cannot be called with
            one ``TransformContext``.
    """
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
    """All names that :func:`resolve_transform` knows, sorted."""
    return tuple(sorted(_REGISTRY))


def resolve_transform(spec: str | Transform) -> Transform:
    """Find a transform.

    Args:
        spec: a registered name, ``"package.module:function"``, or the function itself.

    Raises:
        ValueError: there is no such name, module or function, or it cannot be called with one
            ``TransformContext``.
    """
    if not isinstance(spec, str):
        _check_signature(spec, getattr(spec, "__qualname__", repr(spec)))
        return spec
    if ":" in spec:
        return _import_transform(spec)
    if spec not in _REGISTRY:
        close = difflib.get_close_matches(spec, _REGISTRY, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(
            f"unknown transform {spec!r}; {hint}registered are "
            f"{', '.join(registered_transforms())}; "
            "your own are named as 'package.module:function'"
        )
    return _REGISTRY[spec]


def _import_transform(spec: str) -> Transform:
    module_name, _, function_name = spec.partition(":")
    if not module_name or not function_name:
        raise ValueError(f"transform {spec!r} must have the form 'package.module:function'")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a user's module raises is this transform's error
        raise ValueError(
            f"transform {spec!r}: module {module_name!r} cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error
    function = getattr(module, function_name, None)
    if function is None:
        close = difflib.get_close_matches(function_name, dir(module), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"transform {spec!r}: module {module_name!r} has no {function_name!r}{hint}"
        )
    _check_signature(function, spec)
    resolved: Transform = function
    return resolved


def _check_signature(function: object, name: str) -> None:
    if not callable(function):
        raise ValueError(f"transform {name!r} is a {type(function).__name__}, not a function")
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"transform {name!r} is a coroutine function; it must be a plain one")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ValueError(
            f"transform {name!r} must take exactly one argument, a TransformContext: {error}"
        ) from error

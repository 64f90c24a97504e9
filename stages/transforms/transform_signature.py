"""What shows that a function is a transform, before it is ever called: its signature."""

from __future__ import annotations

import ast
import builtins
import inspect
from inspect import Parameter

from stages.stage import TransformContext
from stages.transforms.module_text import FunctionText

__all__ = ["check_looks_like_one", "check_takes_context", "check_written"]


def check_takes_context(signature: inspect.Signature, name: str) -> None:
    """Refuse what cannot be called with one argument.

    Raises:
        ValueError: it takes none, or wants more.
    """
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


def check_written(function: FunctionText, name: str) -> None:
    """Refuse, by its text alone, a function that would be refused once it is loaded.

    Args:
        function: one that nothing declares as a transform.
        name: as whom the file names it.

    Raises:
        ValueError: it is no transform, whatever the names in its annotations stand for.
    """
    if isinstance(function, ast.AsyncFunctionDef):
        raise ValueError(f"transform {name!r} is a coroutine function; it must be a plain one")
    signature = _signature_of(function.args)
    check_takes_context(signature, name)
    check_looks_like_one(signature, name)


def _signature_of(args: ast.arguments) -> inspect.Signature:
    plain = [*args.posonlyargs, *args.args]
    num_required = len(plain) - len(args.defaults)
    parameters = [
        _parameter(
            arg,
            Parameter.POSITIONAL_ONLY
            if number < len(args.posonlyargs)
            else Parameter.POSITIONAL_OR_KEYWORD,
            has_default=number >= num_required,
        )
        for number, arg in enumerate(plain)
    ]
    if args.vararg is not None:
        parameters.append(_parameter(args.vararg, Parameter.VAR_POSITIONAL))
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        parameters.append(_parameter(arg, Parameter.KEYWORD_ONLY, has_default=default is not None))
    if args.kwarg is not None:
        parameters.append(_parameter(args.kwarg, Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _parameter(
    arg: ast.arg, kind: inspect._ParameterKind, *, has_default: bool = False
) -> Parameter:
    annotation: object
    match arg.annotation:
        case None:
            annotation = Parameter.empty
        case ast.Name(id=written) if hasattr(builtins, written):
            annotation = getattr(builtins, written)
        case _:  # it may stand for anything
            annotation = TransformContext
    default = ... if has_default else Parameter.empty
    return Parameter(arg.arg, kind, default=default, annotation=annotation)

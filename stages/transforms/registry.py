"""Transforms: how a stage's prompt is made from what earlier stages put out.

A transform is a plain function ``(TransformContext) -> Prompt``. Pipelines name it by its
registered name, or as ``"package.module:function"``, so that a user's own needs no registration.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from typing import TypeVar

from engine import EmbedsPrompt, TextPrompt, TokensPrompt
from stages.stage import Transform, TransformContext

__all__ = [
    "chunkable",
    "hidden_states_as_prompt_embeds",
    "register_transform",
    "registered_transforms",
    "resolve_transform",
    "takes_chunks",
    "text_as_prompt",
    "token_ids_as_prompt",
]

_TransformT = TypeVar("_TransformT", bound=Transform)

_REGISTRY: dict[str, Transform] = {}
_CHUNKABLE = "_takes_chunks"


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
    setattr(function, _CHUNKABLE, True)
    return function


def takes_chunks(transform: Transform) -> bool:
    """Whether a transform was marked as :func:`chunkable`."""
    return getattr(transform, _CHUNKABLE, False) is True


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


@register_transform("hidden_states_as_prompt_embeds")
def hidden_states_as_prompt_embeds(context: TransformContext) -> EmbedsPrompt:
    """Feed the sources' hidden states in the place of token embeddings.

    Several sources' rows follow one another in the order of the sources: ``(n0 + n1 + ..., D)``.

    Raises:
        ValueError: a source handed on no hidden states, or their widths differ.
    """
    rows = []
    for source in context.sources:
        if "hidden_states" not in source.tensors:
            raise ValueError(
                f"stage {source.stage!r} handed on no 'hidden_states' (it handed on "
                f"{sorted(source.tensors)}); add 'hidden_states' to its outputs"
            )
        rows.append(source.tensors["hidden_states"])
    widths = {
        source.stage: part.shape[-1] for source, part in zip(context.sources, rows, strict=True)
    }
    if len(set(widths.values())) > 1:
        raise ValueError(
            f"hidden states of different widths cannot be one prompt: {_listed(widths)}"
        )
    import torch  # only here: names of transforms are checked without it

    return EmbedsPrompt(torch.cat(rows) if len(rows) > 1 else rows[0])


@register_transform("text_as_prompt")
def text_as_prompt(context: TransformContext) -> TextPrompt:
    """Feed the sources' generated texts, joined as they are, to this stage's tokenizer.

    Raises:
        ValueError: a source makes no text, or all texts are empty.
    """
    texts = []
    for source in context.sources:
        if source.text is None:
            raise ValueError(f"stage {source.stage!r} makes no text to use as a prompt")
        texts.append(source.text)
    text = "".join(texts)
    if not text:
        raise ValueError(f"the text of {_names(context)} is empty and cannot be a prompt")
    return TextPrompt(text)


@register_transform("token_ids_as_prompt")
def token_ids_as_prompt(context: TransformContext) -> TokensPrompt:
    """Feed the token ids that the sources generated, one source after the other.

    Raises:
        ValueError: no source generated a token.
    """
    token_ids = tuple(token for source in context.sources for token in source.token_ids)
    if not token_ids:
        raise ValueError(f"{_names(context)} generated no token ids to use as a prompt")
    return TokensPrompt(token_ids)


def _names(context: TransformContext) -> str:
    return " and ".join(f"stage {source.stage!r}" for source in context.sources)


def _listed(widths: dict[str, int]) -> str:
    return ", ".join(f"stage {name!r} has {width}" for name, width in widths.items())

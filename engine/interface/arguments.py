"""Manual type checks of arguments that nothing else validates."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import UnionType
from typing import TYPE_CHECKING

from engine.interface.placed_error import shortened
from engine.interface.sampling_params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor


def check_argument(
    name: str, value: object, kind: type | UnionType, wanted: str, fix: str | None = None
) -> None:
    """Refuse a value of another type.

    Args:
        kind: the required type or union.
        wanted: the same in words: "a str or None".
        fix: the suggested code; ``{}`` in it stands for a value that is a str.

    Raises:
        ValueError: the value is of another type.
    """
    if isinstance(value, kind):
        return
    inserted = repr(value) if isinstance(value, str) else "..."
    hint = "" if fix is None else f"; write {fix.replace('{}', inserted)}"
    raise ValueError(
        f"{name} must be {wanted}, got {shortened(value)} ({type(value).__name__}){hint}"
    )


def check_dense(name: str, tensor: Tensor) -> None:
    """Refuse a tensor whose values cannot be read: sparse or on the device meta."""
    if str(tensor.layout) != "torch.strided":
        raise ValueError(f"{name} must be a dense tensor, got {tensor.layout}")
    if tensor.is_meta:
        raise ValueError(f"{name} must be a tensor with values, got one on the device meta")


def check_names(name: str, value: object, *, or_none: bool = False) -> None:
    """Refuse anything but a list of names; above all a single name, which iterates over letters."""
    if or_none and value is None:
        return
    wanted = "a list of names" + (" or None" if or_none else "")
    if isinstance(value, str):
        check_argument(name, value, list, wanted, "[{}]")
    check_argument(name, value, Collection, wanted)
    assert isinstance(value, Collection)
    for each in value:
        check_argument(f"each of {name}", each, str, "a str")


def check_sampling_argument(sampling: object) -> None:
    """Refuse sampling parameters of another type, such as a mapping of them."""
    fix = None
    if isinstance(sampling, Mapping):
        fields = ", ".join(f"{name}={value!r}" for name, value in sampling.items())
        fix = f"SamplingParams({fields})"
    check_argument("sampling", sampling, SamplingParams | None, "SamplingParams or None", fix)

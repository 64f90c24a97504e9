"""Whether tensors hold NaN or infinity, at the cost of reading them once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import reduce

import torch
from torch import Tensor

__all__ = ["are_finite", "require_finite", "total"]


def total(tensors: Iterable[Tensor]) -> Tensor:
    """The sum of all numbers, a float32 scalar on the device of the first; integers are left out.

    It is finite only if each of them is. It may overflow where all are finite, so that it rules a
    doubt out and confirms none.
    """
    sums = [each.sum(dtype=torch.float32) for each in tensors if each.is_floating_point()]
    return reduce(torch.add, sums) if sums else torch.zeros(())


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether there is no NaN and no infinity in any of them; integers are finite."""
    tensors = list(tensors)
    return math.isfinite(total(tensors).item()) or all(bool(x.isfinite().all()) for x in tensors)


def require_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise ``ValueError`` that names the tensors that hold NaN or infinity, if any do."""
    if not are_finite(tensors.values()):
        names = [name for name, tensor in tensors.items() if not are_finite([tensor])]
        raise ValueError(f"its {' and '.join(sorted(names))} are NaN or infinite")

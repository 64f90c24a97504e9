"""Devices and dtypes of an engine, uploads, and checks for finite values."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache, reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16  # bytes, of each array packed into one copy


def upload(
    arrays: Mapping[str, NDArray[Any]],
    device: torch.device,
    place: Callable[[int], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Copy arrays to a device as tensors, by one asynchronous copy through pinned memory.

    On a CPU, the tensors share the arrays' memory unless ``place`` is given.

    Args:
        place: returns a device buffer of a given number of bytes; None: allocate a new one.
    """
    if device.type == "cpu" and place is None:
        return dict(zip(arrays, map(torch.from_numpy, arrays.values()), strict=True))
    places: dict[str, slice] = {}
    end = 0
    for name, array in arrays.items():
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = begin + array.nbytes
        places[name] = slice(begin, end)
    packed = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for name, array in arrays.items():
        packed.numpy()[places[name]] = array.reshape(-1).view(np.uint8)
    if place is None:
        there = packed.to(device, non_blocking=True)
    else:
        there = place(end).copy_(packed, non_blocking=True)
    return {
        name: there[places[name]].view(torch.from_numpy(array).dtype).view(array.shape)
        for name, array in arrays.items()
    }


def upload_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device, asynchronously through pinned memory."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def total(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of all floating-point elements, a float32 scalar on the first one's device.

    It is finite only if all elements are. It may overflow although all elements are finite, so a
    non-finite sum proves nothing.
    """
    sums = [each.sum(dtype=torch.float32) for each in tensors if each.is_floating_point()]
    return reduce(torch.add, sums) if sums else torch.zeros(())


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Return True if no tensor contains NaN or infinity; integers are finite."""
    tensors = list(tensors)
    return math.isfinite(total(tensors).item()) or all(bool(x.isfinite().all()) for x in tensors)


def require_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise ``ValueError`` with the names of tensors that contain NaN or infinity, if any do."""
    if not are_finite(tensors.values()):
        names = [name for name, tensor in tensors.items() if not are_finite([tensor])]
        raise ValueError(f"its {' and '.join(sorted(names))} are NaN or infinite")


@cache
def keep_freed_memory() -> None:
    """Keep large freed tensors in the process, on Linux with glibc; once per process.

    A step's activations are tens of megabytes that are freed and soon allocated again. glibc
    returns blocks of this size to the operating system, which must map and zero every page of the
    next one: 4 to 6 % more CPU time for prefills on CPUs. The thresholds apply to the whole
    process, so memory freed by other code is kept too.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, the maximum that glibc accepts
        mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def resolve_device(name: str) -> torch.device:
    """Return a device by name; ``auto`` prefers CUDA. ``ValueError`` if it is not available."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device {name!r} is not known: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is none that models run on here: take 'cpu' or 'cuda'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device {name!r} was asked for, but torch sees no CUDA device; take 'cpu', or 'auto'"
        )
    return device


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the current one, because Triton launches its kernels there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def resolve_dtype(
    name: str, checkpoint_dtype: torch.dtype | None, device: torch.device
) -> torch.dtype:
    """Return a dtype by name; ``auto`` is the checkpoint's on CUDA, float32 on a CPU."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cpu" or checkpoint_dtype is None:
        return torch.float32
    return checkpoint_dtype

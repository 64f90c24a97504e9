"""Where an engine computes, and in which type of numbers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["on_device", "resolve_device", "resolve_dtype"]


def resolve_device(name: str) -> torch.device:
    """``auto`` takes CUDA when there is one.

    Raises:
        ValueError: the device is not known or not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device {name!r} is not known: {error}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device {name!r} was asked for, but torch sees no CUDA device; take 'cpu', or 'auto'"
        )
    return device


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the current one, on which Triton launches its kernels."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def resolve_dtype(
    name: str, checkpoint_dtype: torch.dtype | None, device: torch.device
) -> torch.dtype:
    """``auto`` is the checkpoint's type on CUDA, float32 on a CPU, where half types are slow."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type == "cpu" or checkpoint_dtype is None:
        return torch.float32
    return checkpoint_dtype

"""From a backend's name to a backend."""

from __future__ import annotations

import torch

from engine.attention.backend import AttentionBackend
from engine.attention.native_backend import NativeBackend
from engine.attention.reference import ReferenceBackend
from engine.attention.torch_backend import TorchBackend
from engine.attention.xformers_backend import XformersBackend

__all__ = ["BACKEND_NAMES", "get_backend", "resolve_backend_name"]

BACKEND_NAMES = ("auto", "native", "torch", "xformers", "reference")


def resolve_backend_name(
    name: str, device: torch.device | str, dtype: torch.dtype, block_size: int
) -> str:
    """The backend that a name stands for: ``"auto"`` takes the fastest that can run.

    That is xformers on CUDA, native on a CPU, and torch where those cannot run.

    Raises:
        ValueError: there is no such backend, or its kernels cannot be had.
    """
    if name not in BACKEND_NAMES:
        raise ValueError(
            f"unknown attention backend {name!r}; known are {', '.join(BACKEND_NAMES)}"
        )
    if name == "native":
        # Its kernels are the layers' as well, which are made before any backend.
        NativeBackend.check_support(torch.device(device), dtype, block_size)
    if name != "auto":
        return name
    device = torch.device(device)
    preferred = XformersBackend if device.type == "cuda" else NativeBackend
    try:
        preferred.check_support(device, dtype, block_size)
    except ValueError:
        return TorchBackend.name
    return preferred.name


def get_backend(
    name: str, device: torch.device | str, dtype: torch.dtype, block_size: int
) -> AttentionBackend:
    """Make a backend; every KV-cache group needs one of its own.

    Args:
        name: one of :data:`BACKEND_NAMES`; see :func:`resolve_backend_name`.
        device: where the model runs.
        dtype: of queries, keys and values.
        block_size: tokens per block.

    Raises:
        ValueError: there is no such backend, or it cannot run this combination.
    """
    device = torch.device(device)
    name = resolve_backend_name(name, device, dtype, block_size)
    if name == "reference":
        return ReferenceBackend()
    if name == "xformers":
        XformersBackend.check_support(device, dtype, block_size)
        return XformersBackend(device, dtype, block_size)
    if name == "native":
        NativeBackend.check_support(device, dtype, block_size)
        return NativeBackend(device, dtype)
    TorchBackend.check_support(device, dtype, block_size)
    return TorchBackend(device, dtype)

"""From a backend's name to a backend."""

from __future__ import annotations

import torch

from engine.attention.backend import AttentionBackend
from engine.attention.reference import ReferenceBackend
from engine.attention.torch_backend import TorchBackend
from engine.attention.xformers_backend import XformersBackend

__all__ = ["BACKEND_NAMES", "get_backend"]

BACKEND_NAMES = ("auto", "torch", "xformers", "reference")


def get_backend(
    name: str, device: torch.device | str, dtype: torch.dtype, block_size: int
) -> AttentionBackend:
    """Make a backend; every KV-cache group needs one of its own.

    Args:
        name: one of :data:`BACKEND_NAMES`. ``"auto"`` takes xformers where it can run, and torch
            elsewhere.
        device: where the model runs.
        dtype: of queries, keys and values.
        block_size: tokens per block.

    Raises:
        ValueError: there is no such backend, or it cannot run this combination.
    """
    device = torch.device(device)
    if name not in BACKEND_NAMES:
        raise ValueError(
            f"unknown attention backend {name!r}; known are {', '.join(BACKEND_NAMES)}"
        )
    if name == "auto":
        name = _best_backend(device, dtype, block_size)
    if name == "xformers":
        XformersBackend.check_support(device, dtype, block_size)
        return XformersBackend(device, block_size)
    if name == "reference":
        return ReferenceBackend()
    TorchBackend.check_support(device, dtype, block_size)
    return TorchBackend(device, dtype)


def _best_backend(device: torch.device, dtype: torch.dtype, block_size: int) -> str:
    if device.type != "cuda":
        return "torch"
    try:
        XformersBackend.check_support(device, dtype, block_size)
    except ValueError:
        return "torch"
    return "xformers"

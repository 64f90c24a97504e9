"""Lookup and construction of attention backends by name."""

from __future__ import annotations

from collections.abc import Collection

import torch

from engine.attention.kernel_backend import KernelBackend
from engine.attention.metadata import AttentionBackend
from engine.attention.native_backend import NativeBackend
from engine.attention.torch_backend import TorchBackend
from engine.attention.triton_backend import TritonBackend
from engine.attention.xformers_backend import XformersBackend
from engine.interface.log_fields import package_logger

_BACKENDS: dict[str, type[AttentionBackend]] = {
    backend.name: backend
    for backend in (NativeBackend, TorchBackend, TritonBackend, XformersBackend)
}
BACKEND_NAMES = ("auto", *_BACKENDS)

logger = package_logger(__name__)


def resolve_backend_name(
    name: str,
    device: torch.device | str,
    dtype: torch.dtype,
    block_size: int,
    head_dims: Collection[int] = (64,),
) -> str:
    """Resolve a backend name; ``"auto"`` selects the fastest backend that can run.

    That is triton on CUDA, native on a CPU, and torch if these cannot run; on CUDA a warning gives
    the reason.

    Args:
        name: one of :data:`BACKEND_NAMES`.
        head_dims: widths of the model's heads; a common one before the model is loaded.

    Raises:
        ValueError: there is no such backend, or it cannot run this combination.
    """
    if name not in BACKEND_NAMES:
        raise ValueError(
            f"unknown attention backend {name!r}; known are {', '.join(BACKEND_NAMES)}"
        )
    device = torch.device(device)
    best = "triton" if device.type == "cuda" else "native"
    chosen = _BACKENDS[best if name == "auto" else name]
    try:
        chosen.check_support(device, dtype, block_size)
        if issubclass(chosen, KernelBackend):
            for head_dim in head_dims:
                chosen.probe(device, dtype, block_size, head_dim)
    except ValueError as error:
        if name != "auto":
            raise
        if device.type == "cuda":
            logger.warning("attention runs in torch, which is slower: %s", error)
        return TorchBackend.name
    return chosen.name


def get_backend(
    name: str,
    device: torch.device | str,
    dtype: torch.dtype,
    block_size: int,
    *,
    deterministic: bool = False,
) -> AttentionBackend:
    """Create the backend of one KV-cache group; see :func:`resolve_backend_name`.

    Args:
        deterministic: see :class:`NativeBackend`; other backends ignore it.
    """
    device = torch.device(device)
    name = resolve_backend_name(name, device, dtype, block_size)
    backend = _BACKENDS[name]
    if issubclass(backend, KernelBackend):
        return backend(device, dtype, block_size)
    if name == "native":
        return NativeBackend(device, dtype, deterministic=deterministic)
    return TorchBackend(device, dtype)

"""How much memory a device has left, asked before it is taken."""

from __future__ import annotations

from collections.abc import Iterable

import psutil
import torch
from torch import Tensor

from engine.resources.byte_sizes import format_bytes

__all__ = ["free_bytes", "require_memory"]


def free_bytes(device: torch.device) -> int:
    """Bytes that can be taken now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return int(psutil.virtual_memory().available)


def require_memory(tensors: Iterable[Tensor], device: torch.device, owner: str) -> None:
    """See to it that there is room for tensors before any is made.

    Args:
        tensors: of the sizes and types that will be made; on ``meta``, for they need no memory.
        device: where.
        owner: whose they are, for the message.

    Raises:
        ValueError: there is not enough.
    """
    needed = sum(tensor.nbytes for tensor in tensors)
    free = free_bytes(device)
    if needed > free:
        raise ValueError(
            f"the weights of {owner} take {format_bytes(needed)}, but {device.type} has "
            f"{format_bytes(free)} free"
        )

"""Brings a step's tensors to the host without making the device wait."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["HostCopy"]


class HostCopy:
    """Copies named tensors to the host, through pinned memory when they come from CUDA.

    ``start`` queues the copies on the current stream; ``finish`` waits for them. Between the two
    the caller queues the sampler, whose own read-back waits for the same stream, so the copies cost
    no wait of their own. What ``finish`` returns is valid until the next ``start``.

    Args:
        device: where the tensors come from.
        max_rows: longest first dimension that is ever copied.
    """

    def __init__(self, device: torch.device, max_rows: int) -> None:
        self._device = device
        self._max_rows = max_rows
        self._pinned: dict[str, Tensor] = {}
        self._pending: dict[str, Tensor] = {}

    def start(self, tensors: Mapping[str, Tensor]) -> None:
        """Queue copies of ``name -> (rows, ...)``; on a CPU the tensors are taken as they are."""
        if self._device.type != "cuda":
            self._pending = dict(tensors)
            return
        self._pending = {name: self._copy(name, tensor) for name, tensor in tensors.items()}

    def finish(self) -> dict[str, Tensor]:
        """Wait for the copies and return them."""
        if self._device.type == "cuda" and self._pending:
            torch.cuda.current_stream(self._device).synchronize()
        done, self._pending = self._pending, {}
        return done

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        staging = self._pinned.get(name)
        if staging is None or staging.shape[1:] != tensor.shape[1:]:
            shape = (self._max_rows, *tensor.shape[1:])
            staging = torch.empty(shape, dtype=tensor.dtype, pin_memory=True)
            self._pinned[name] = staging
        view = staging[: tensor.shape[0]]
        view.copy_(tensor, non_blocking=True)
        return view

"""Data-parallel training: each process has its own batch, and gradients are averaged."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import Tensor, distributed


class Workers:
    """The group of processes defined by ``WORLD_SIZE`` and ``RANK`` in the environment.

    With neither set there is only this process.
    """

    def __init__(self) -> None:
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        if self.count > 1:
            distributed.init_process_group("gloo")

    def average(self, parameters: Iterable[Tensor]) -> None:
        """Replace the gradients of all parameters by the mean over all processes.

        Args:
            parameters: the same on all processes.
        """
        if self.count == 1:
            return
        grads = [each.grad for each in parameters if each.grad is not None]
        flat = torch.cat([each.flatten() for each in grads])
        distributed.all_reduce(flat)
        flat /= self.count
        sizes = [each.numel() for each in grads]
        for grad, mean in zip(grads, flat.split(sizes), strict=True):
            grad.copy_(mean.view_as(grad))

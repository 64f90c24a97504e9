"""Several processes that train one model: each its own batch, all the mean of their gradients."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import Tensor, distributed


class Workers:
    """This process among those that ``WORLD_SIZE`` and ``RANK`` of its environment tell of.

    With neither set it is alone.
    """

    def __init__(self) -> None:
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        if self.count > 1:
            distributed.init_process_group("gloo")

    def average(self, parameters: Iterable[Tensor]) -> None:
        """Put the mean gradient into every parameter that has one, on all alike.

        Args:
            parameters: the same on all.
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

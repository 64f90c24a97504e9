"""The recurrence of a decode step as one fused kernel, where the ``mamba_ssm`` package has it.

Optional, on CUDA only, and not run yet: no machine with a GPU was to be had. Everywhere else, and
for prompts, the torch code beside this file does the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

__all__ = ["StateUpdate", "fused_state_update"]

StateUpdate = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""``update(state, x, dt, A, B, C) -> y``, one token per sequence; ``state`` is changed in place.

Mamba-1: state ``(batch, channels, size)``, x and dt ``(batch, channels)``, A ``(channels, size)``,
B and C ``(batch, size)``. Mamba-2: state ``(batch, heads, dim, size)``, x and dt ``(batch, heads,
dim)``, A ``(heads, dim, size)``, B and C ``(batch, groups, size)``; dt and A may be expanded.
"""


def fused_state_update(device: torch.device) -> StateUpdate | None:
    """The kernel for tensors on ``device``, or None where there is none."""
    return _load() if device.type == "cuda" else None


@cache
def _load() -> StateUpdate | None:
    if find_spec("mamba_ssm") is None:
        return None
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    kernel: StateUpdate = selective_state_update
    return kernel

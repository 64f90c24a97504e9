"""From one row per token to one row per input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

from torch import Tensor, nn

from engine.resources.device import on_device
from engine.resources.finite_numbers import require_finite

__all__ = ["Pooling", "normalized", "pool", "resolve_pooling"]

Pooling: TypeAlias = Literal["auto", "mean", "cls", "last", "pooler"]
"""``mean`` of all rows, the first (``cls``), the ``last``, or the checkpoint's own ``pooler``;
``auto`` is the pooler of a checkpoint that has one, else the mean."""

_BY_NAME: dict[str, Callable[[Tensor], Tensor]] = {
    # In fp32: a bf16 sum of hundreds of rows loses what tells them apart.
    "mean": lambda rows: rows.float().mean(dim=0).to(rows.dtype),
    "cls": lambda rows: rows[0].clone(),
    "last": lambda rows: rows[-1].clone(),
}


def resolve_pooling(pooling: Pooling, pooler: nn.Module | None) -> Pooling:
    """Turn ``auto`` into what it stands for.

    Raises:
        ValueError: unknown name, or ``pooler`` without one that works on hidden states.
    """
    if pooling not in get_args(Pooling):
        known = ", ".join(get_args(Pooling))
        raise ValueError(f"unknown pooling {pooling!r}; known are {known}")
    if pooling == "pooler" and pooler is None:
        raise ValueError(
            "pooling 'pooler' needs a checkpoint with pooler weights that work on its hidden "
            "states; this one has none: take 'mean', 'cls' or 'last'"
        )
    if pooling == "auto":
        return "mean" if pooler is None else "pooler"
    return pooling


def pool(pooling: Pooling, rows: Tensor, pooler: nn.Module | None) -> Tensor:
    """Pool the rows of one input.

    Args:
        pooling: what :func:`resolve_pooling` gave.
        rows: ``(n, hidden)`` on the CPU.
        pooler: ``(1, n, hidden) -> (1, D)``, on any device.

    Returns:
        ``(D,)`` on the CPU.

    Raises:
        ValueError: what was pooled is not finite.
    """
    pooled = _pool(pooling, rows, pooler)
    require_finite({"pooled": pooled})
    return pooled


def _pool(pooling: Pooling, rows: Tensor, pooler: nn.Module | None) -> Tensor:
    if pooling == "pooler":
        if pooler is None:
            raise ValueError("pooling 'pooler' was not resolved: there is no pooler")
        device = next(pooler.parameters()).device
        with on_device(device):
            pooled: Tensor = pooler(rows[None].to(device))[0].cpu()
        return pooled
    return _BY_NAME[pooling](rows)


def normalized(row: Tensor) -> Tensor:
    """``(D,)`` of length 1, its direction kept; in fp32, and back in the type that came."""
    return nn.functional.normalize(row.float(), dim=-1).to(row.dtype)

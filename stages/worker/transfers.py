"""How much goes from stage to stage."""

from __future__ import annotations

from collections.abc import Iterable

from stages.stage import StageOutput

__all__ = ["num_tensor_bytes"]


def num_tensor_bytes(outputs: Iterable[StageOutput]) -> int:
    """Bytes of the outputs' tensors, without looking into those that lie in shared memory."""
    return sum(_num_bytes(output) for output in outputs)


def _num_bytes(output: StageOutput) -> int:
    tensors = output.tensors
    told = getattr(tensors, "nbytes", None)
    return told if isinstance(told, int) else sum(each.nbytes for each in tensors.values())

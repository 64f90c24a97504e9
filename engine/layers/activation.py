"""Activation functions by the names that configs use."""

from __future__ import annotations

from torch import nn
from transformers.activations import ACT2FN

__all__ = ["activation_of"]


def activation_of(name: str) -> nn.Module:
    """The activation of transformers' name.

    Raises:
        ValueError: transformers knows no such activation.
    """
    if name not in ACT2FN:
        raise ValueError(f"unknown activation {name!r}; known are {sorted(ACT2FN)}")
    activation: nn.Module = ACT2FN[name]
    return activation

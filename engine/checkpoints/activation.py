"""Activations by the names that configs of transformers give them.

Importing transformers' own module of them takes a second; the usual ones are torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import nn

__all__ = ["activation_of", "check_activation"]

# transformers computes each of these by the same function of torch.
_OF_TORCH: Mapping[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_pytorch_tanh": partial(nn.GELU, approximate="tanh"),
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "swish": nn.SiLU,
}


def check_activation(where: str, name: str) -> None:
    """Check that transformers knows an activation.

    Args:
        where: what to call the place of the name in a message.

    Raises:
        ValueError: it does not; says which it knows.
    """
    if name in _OF_TORCH:
        return
    from transformers.activations import ACT2FN

    if name not in ACT2FN:
        raise ValueError(f"{where} must be one of {', '.join(ACT2FN)}, got {name!r}")


def activation_of(name: str) -> nn.Module:
    """The activation of transformers' name.

    Raises:
        ValueError: transformers knows no such activation.
    """
    check_activation("activation", name)
    if name in _OF_TORCH:
        return _OF_TORCH[name]()
    from transformers.activations import ACT2FN

    activation: nn.Module = ACT2FN[name]
    return activation

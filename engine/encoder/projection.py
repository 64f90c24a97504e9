"""The dense layers that an embedding model in the layout of sentence-transformers ends in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from engine.files.folder_bounds import file_inside

__all__ = ["Projection", "load_projection"]

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "torch.nn.modules.activation.Tanh": torch.tanh,
    "torch.nn.modules.activation.ReLU": torch.relu,
    "torch.nn.modules.activation.Sigmoid": torch.sigmoid,
    "torch.nn.modules.activation.GELU": nn.functional.gelu,
    "torch.nn.modules.linear.Identity": lambda rows: rows,
}
_WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """A linear layer and an activation, in fp32 on the CPU.

    Attributes:
        weight: ``(out_features, in_features)``.
        bias: ``(out_features,)``, or None.
        activation: what comes behind it.
    """

    weight: Tensor
    bias: Tensor | None
    activation: Callable[[Tensor], Tensor]

    def apply(self, row: Tensor) -> Tensor:
        """``(in_features,)`` to ``(out_features,)``, in the type that came."""
        out = nn.functional.linear(row.float(), self.weight, self.bias)
        return self.activation(out).to(row.dtype)


def load_projection(folder: Path, path: str, config: Mapping[str, Any]) -> Projection:
    """Load one.

    Args:
        folder: of the checkpoint.
        path: of its weights, in the folder.
        config: its ``config.json``.

    Raises:
        ValueError: a key or a weight is missing, of another kind or shape, or not supported.
    """
    file = folder / path / "config.json"
    name = config.get("activation_function")
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ValueError(
            f"{file}: activation_function is {name!r}, and what is supported is "
            f"{', '.join(_ACTIVATIONS)}"
        )
    if not (folder / path / _WEIGHTS).is_file():
        raise ValueError(f"{folder / path} has no {_WEIGHTS}; pickled weights are not read")
    weights = file_inside(folder, str(Path(path, _WEIGHTS)))
    try:
        tensors = load_file(weights)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{weights} cannot be read: {error}") from error
    sides = [config.get(key) for key in ("out_features", "in_features")]
    wanted = {"linear.weight": sides}
    if config.get("bias", True):
        wanted["linear.bias"] = sides[:1]
    for key, shape in wanted.items():
        if key not in tensors or list(tensors[key].shape) != shape:
            found = list(tensors[key].shape) if key in tensors else "nothing"
            raise ValueError(f"{weights}: {key} must be {shape} by {file}, got {found}")
        if not tensors[key].is_floating_point():
            raise ValueError(f"{weights}: {key} must be floating point, got {tensors[key].dtype}")
    bias = tensors["linear.bias"].float() if "linear.bias" in wanted else None
    return Projection(tensors["linear.weight"].float(), bias, _ACTIVATIONS[name])

"""The safetensors weights of a checkpoint, one tensor at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.checkpoints.quantized_weight import Stored, Target
from engine.files.json_file import file_inside, read_json_object

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
# Floating-point types of safetensors that torch supports. All others are integers.
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_MAX_LISTED = 8


@dataclass(frozen=True)
class WeightFiles:
    """The weights of a checkpoint, in one file or in several files listed in an index."""

    folder: Path

    @property
    def files(self) -> Mapping[str, str]:
        """File name of each weight."""
        return self.stored

    @cached_property
    def stored(self) -> Mapping[str, str]:
        """File name of each stored tensor; reads at most one header.

        Raises:
            ValueError: there are no safetensors weights, the index is malformed, or a file in it
                does not exist or is outside the folder.
        """
        if (self.folder / _INDEX_FILE).is_file():
            return self._read_index()
        if not (self.folder / _SINGLE_FILE).is_file():
            raise ValueError(self._no_weights_message())
        with self._opened(_SINGLE_FILE) as file:
            return dict.fromkeys(file.keys(), _SINGLE_FILE)

    def tensors(self, names: Collection[str]) -> Iterator[tuple[str, Stored]]:
        """Read weights one by one, on the CPU, in their stored type; raise if one is missing."""
        for file, members in self._by_file(names):
            for name in members:
                yield name, file.get_tensor(name)

    def check(self, expected: Mapping[str, Target]) -> None:
        """Compare headers with the targets of the weights; reads no weights.

        Args:
            expected: target of each tensor by name. Its dtype may differ.

        Raises:
            ValueError: a tensor is missing, differs in shape, or is not floating point; or a file
                is damaged.
        """
        for name, (shape, kind) in self.headers(expected):
            target = expected[name]
            # Some targets accept either of two shapes.
            if shape not in getattr(target, "shapes", (tuple(target.shape),)):
                raise ValueError(
                    f"{name} in {self.folder} has shape {shape}; "
                    f"its config asks for {tuple(target.shape)}"
                )
            if target.is_floating_point() and kind not in _FLOATS:
                raise ValueError(
                    f"{name} in {self.folder / self.stored[name]} is of the type {kind}; weights "
                    f"must be of {', '.join(sorted(_FLOATS))}, or have a quantization_config"
                )

    def headers(self, names: Collection[str]) -> Iterator[tuple[str, tuple[tuple[int, ...], str]]]:
        """Yield name, shape and type of stored tensors."""
        for file, members in self._by_file(names):
            for name in members:
                stored = file.get_slice(name)
                yield name, (tuple(stored.get_shape()), stored.get_dtype())

    def rows(self, name: str, indices: Sequence[int]) -> Tensor:
        """Read only the given rows of a matrix.

        Returns:
            ``(len(indices), width)`` on the CPU, in the stored type.

        Raises:
            ValueError: there is no such matrix, or it has no such row.
        """
        for file, _ in self._by_file([name]):
            matrix = file.get_slice(name)
            shape = matrix.get_shape()
            if len(shape) != 2:
                raise ValueError(f"{name} in {self.folder} must be a matrix, its shape is {shape}")
            wrong = [index for index in indices if not 0 <= index < shape[0]]
            if wrong:
                raise ValueError(
                    f"{name} in {self.folder} has rows 0 to {shape[0] - 1}, asked for {wrong}"
                )
            rows = torch.cat([matrix[index : index + 1] for index in indices])
        return rows

    def _by_file(self, names: Collection[str]) -> Iterator[tuple[Any, list[str]]]:
        """Yield each open file with the names of the requested tensors in it."""
        missing = [name for name in names if name not in self.stored]
        if missing:
            raise ValueError(f"{self.folder} lacks the weights {listed(missing)}")
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self.stored[name], []).append(name)
        for file_name, members in by_file.items():
            with self._opened(file_name) as file:
                held = set(file.keys())
                lacking = [name for name in members if name not in held]
                if lacking:
                    raise ValueError(
                        f"{self.folder / _INDEX_FILE} says that {file_name} holds "
                        f"{listed(lacking)}, which it does not"
                    )
                yield file, members

    @contextmanager
    def _opened(self, name: str) -> Iterator[Any]:
        path = file_inside(self.folder, name)
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                yield file
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is no readable safetensors file: {error}") from error

    def _read_index(self) -> dict[str, str]:
        index = self.folder / _INDEX_FILE
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index} is no index of shards: weight_map must be an object")
        for name, file in weight_map.items():
            if not isinstance(file, str):
                raise ValueError(
                    f"{index} is no index of shards: {name} must be in a file, got {file!r}"
                )
        for name in sorted(set(weight_map.values())):
            try:
                file_inside(self.folder, name)
            except ValueError as error:
                raise ValueError(f"{index} names the shard {name!r}: {error}") from error
        return weight_map

    def _no_weights_message(self) -> str:
        pickled = sorted(f.name for f in self.folder.iterdir() if f.suffix in _PICKLED_SUFFIXES)
        message = f"{self.folder} has neither {_SINGLE_FILE} nor {_INDEX_FILE}"
        if pickled:
            message += f"; its weights are pickled ({listed(pickled)}), convert them to safetensors"
        return message


def listed(names: Sequence[str]) -> str:
    """Join the first names, followed by the number of further ones."""
    shown = ", ".join(names[:_MAX_LISTED])
    more = len(names) - _MAX_LISTED
    return f"{shown} and {more} more" if more > 0 else shown

"""Writes quantized checkpoints bit by bit, in the formats of GPTQ, AWQ and compressed-tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Packed:
    """A quantization format.

    Attributes:
        group_size: None for a whole row.
        is_sorted: true if groups consist of inputs in arbitrary order.
        has_zeros: False where the middle code is zero.
    """

    method: str
    bits: int = 4
    group_size: int | None = 32
    is_sorted: bool = False
    has_zeros: bool = True
    version: str = "gptq"

    def config(self) -> Mapping[str, Any]:
        """Return the ``quantization_config``."""
        size = self.group_size or -1
        if self.method == "gptq":
            order = {"desc_act": self.is_sorted, "checkpoint_format": self.version}
            return {"quant_method": "gptq", "bits": self.bits, "group_size": size, **order}
        if self.method == "awq":
            return {"quant_method": "awq", "bits": 4, "group_size": size, "version": "GEMM"}
        weights = {"num_bits": self.bits, "type": "int", "symmetric": not self.has_zeros}
        weights |= {"strategy": "group" if self.group_size else "channel", "dynamic": False}
        weights |= {"group_size": self.group_size, "actorder": "group" if self.is_sorted else None}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        }


PACKED = {
    "GPTQ": Packed("gptq"),
    "GPTQ of 8 bits": Packed("gptq", 8, None),
    "GPTQ with sorted inputs": Packed("gptq", is_sorted=True),
    "GPTQ 2": Packed("gptq", version="gptq_v2"),
    "AWQ": Packed("awq"),
    "W4A16": Packed("compressed-tensors", has_zeros=False),
    "W4A16 with zeros": Packed("compressed-tensors"),
    "W4A16 with sorted inputs": Packed("compressed-tensors", is_sorted=True),
    "W8A16": Packed("compressed-tensors", 8, None, has_zeros=False),
}


def write_packed(
    source: str | Path, folder: Path, packed: Packed, plain: Path, prefix: str = ""
) -> Path:
    """Write a checkpoint with quantized matrices in its layers.

    Args:
        plain: a folder that gets the same checkpoint with the values that the codes stand for.
        prefix: prefix of the names of the quantized matrices.
    """
    shutil.copytree(source, folder)
    shutil.copytree(source, plain)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": packed.config()})
    )
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    rng = np.random.default_rng(0)
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.startswith(prefix) and name.endswith("_proj.weight"):
            parts, value = _quantized(tensor.double().numpy(), packed, rng)
            stored |= {name.removesuffix("weight") + part: each for part, each in parts.items()}
            values[name] = torch.from_numpy(value).float()
        else:
            stored[name] = values[name] = tensor
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    return folder


def _quantized(
    weight: NDArray[Any], packed: Packed, rng: np.random.Generator
) -> tuple[dict[str, Tensor], NDArray[Any]]:
    """Return the stored parts of a matrix ``(out, in)``, and the values that they stand for."""
    (out, width), most = weight.shape, 2**packed.bits - 1
    size = packed.group_size or width
    of_input = np.arange(width) // size
    if packed.is_sorted:
        of_input = rng.permutation(of_input)
    groups = int(of_input.max()) + 1
    scales, zeros = np.zeros((out, groups), np.float16), np.zeros((out, groups), np.int64)
    codes, values = np.zeros((out, width), np.int64), np.zeros((out, width))
    for row in range(out):
        for group in range(groups):
            members = weight[row, of_input == group]
            low, high = min(members.min(), 0), max(members.max(), 0)
            scale = np.float16((high - low) / most)
            zero = round(-low / float(scale))
            if not packed.has_zeros:
                scale = np.float16(np.abs(members).max() / (most // 2))
                zero = most // 2 + 1
            scales[row, group], zeros[row, group] = scale, zero
        for column in range(width):
            group = of_input[column]
            step, zero = float(scales[row, group]), zeros[row, group]
            codes[row, column] = min(max(round(weight[row, column] / step) + zero, 0), most)
            values[row, column] = (codes[row, column] - zero) * step
    index = torch.from_numpy(of_input.astype(np.int32))
    if packed.method == "compressed-tensors":
        parts = {
            "weight_packed": _in_int32(codes, 1, packed.bits),
            "weight_scale": torch.from_numpy(scales),
            "weight_shape": torch.tensor([out, width]),
        }
        parts |= {"weight_zero_point": _in_int32(zeros, 0, packed.bits)} if packed.has_zeros else {}
        return parts | ({"weight_g_idx": index} if packed.is_sorted else {}), values
    order = _AWQ_ORDER if packed.method == "awq" else tuple(range(32 // packed.bits))
    shift = int(packed.method == "gptq" and packed.version == "gptq")
    parts = {
        "qweight": _in_int32(codes.T, int(packed.method == "awq"), packed.bits, order),
        "qzeros": _in_int32((zeros.T - shift) % (most + 1), 1, packed.bits, order),
        "scales": torch.from_numpy(scales.T.copy()),
    }
    return parts | ({"g_idx": index} if packed.method == "gptq" else {}), values


def _in_int32(
    numbers: NDArray[Any], axis: int, bits: int, order: tuple[int, ...] | None = None
) -> Tensor:
    """Pack numbers along an axis: each int32 holds those of an order, the first one lowest."""
    moved = np.moveaxis(numbers, axis, 0)
    count = 32 // bits
    packed = np.zeros((-(-len(moved) // count), *moved.shape[1:]), np.uint32)
    for place, one in np.ndenumerate(moved):
        within = (order or tuple(range(count))).index(place[0] % count)
        packed[(place[0] // count, *place[1:])] |= np.uint32(int(one) << within * bits)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(packed, 0, axis)).view(np.int32))

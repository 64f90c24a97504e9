"""Quantized weights in safetensors files: GPTQ, AWQ and compressed-tensors.

A matrix ``(out, in)`` is stored as several tensors under its module's name. Integers of 4 or 8 bits
are packed into int32, ``n`` in each, least significant first (AWQ: in another order)::

              GPTQ                       AWQ                        compressed-tensors
    codes     qweight (in / n, out)      qweight (in, out / n)      weight_packed (out, in / n)
    scales    scales (groups, out)       scales (groups, out)       weight_scale (out, groups)
    zeros     qzeros (groups, out / n)   qzeros (groups, out / n)   weight_zero_point (out / n,
              minus 1, unless the format                            groups); none: the middle
              is gptq_v2
    groups    g_idx (in), if inputs were sorted first               weight_g_idx (in), likewise

A weight is ``(code - zero) * scale``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from engine.checkpoints.config_file import CONFIG_FILE
from engine.checkpoints.quantized_weight import QuantizedWeight, Stored, Target
from engine.checkpoints.weight_files import WeightFiles

_METHODS = {"gptq": "GPTQ", "awq": "AWQ", "compressed-tensors": "compressed-tensors"}
# The only supported value of further keys.
_REQUIRED_VALUES = {
    "awq": {"version": "gemm"},
    "compressed-tensors": {"format": "pack-quantized", "type": "int", "dynamic": "false"},
}
_GPTQ_SUFFIXES = {"codes": "qweight", "scales": "scales", "zeros": "qzeros", "groups": "g_idx"}
_COMPRESSED = {"codes": "weight_packed", "scales": "weight_scale", "zeros": "weight_zero_point"}
_COMPRESSED |= {"groups": "weight_g_idx", "shape": "weight_shape"}
_INTEGERS = ("I32", "I64")
_TYPES = {"codes": ("I32",), "zeros": ("I32",), "groups": _INTEGERS, "shape": _INTEGERS}
_TYPES |= {"scales": ("F16", "BF16", "F32")}
# Position in an int32 of each of eight columns in AWQ.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """A parsed ``quantization_config``.

    Attributes:
        group_size: number of inputs that share a scale; None: all.
        zero_shift: offset that is added to stored zeros.
    """

    method: str
    bits: Literal[4, 8]
    group_size: int | None
    zero_shift: int = 0

    @classmethod
    def of(cls, file: Path, config: Mapping[str, Any]) -> PackedFormat | None:
        """Parse the content of a ``config.json``; None if its weights are plain.

        Raises:
            ValueError: the format is not supported; names the file and the key.
        """
        stated = config.get("quantization_config")
        if stated is None:
            return None
        method = stated.get("quant_method") if isinstance(stated, dict) else stated
        place = f"{file}: quantization_config"
        if not isinstance(stated, dict) or not isinstance(method, str) or method not in _METHODS:
            raise ValueError(
                f"{place}.quant_method must be one of {', '.join(_METHODS)}, got {method!r:.80}"
            )
        weights: Mapping[str, Any] = stated
        if method == "compressed-tensors":
            weights = {"format": stated.get("format"), **_single_group(place, stated)}
            place = f"{place}.config_groups"
        for key, required in _REQUIRED_VALUES.get(method, {}).items():
            given = weights.get(key, required)
            if str(given).lower() != required:
                raise ValueError(f"{place}: {key} must be {required!r}, got {given!r:.80}")
        bits: Any = weights.get("num_bits", weights.get("bits", weights.get("w_bit", 4)))
        size = weights.get("group_size", weights.get("q_group_size", -1))
        size = None if size in (None, -1) else size
        if not isinstance(bits, int) or bits not in ((4,) if method == "awq" else (4, 8)):
            raise ValueError(f"{place}: weights must have 4 or 8 bits (AWQ: 4), got {bits!r:.80}")
        if size is not None and not (isinstance(size, int) and 1 <= size <= 2**16):
            raise ValueError(f"{place}: group_size must be -1 or 1 to 65536, got {size!r:.80}")
        is_shifted = method == "gptq" and stated.get("checkpoint_format", "gptq") != "gptq_v2"
        return cls(method, 4 if bits == 4 else 8, size, int(is_shifted))

    def __str__(self) -> str:
        groups = "a scale a row" if self.group_size is None else f"groups of {self.group_size}"
        return f"{_METHODS[self.method]} of {self.bits} bits, {groups}"

    @property
    def suffixes(self) -> Mapping[str, str]:
        """Suffixes of the tensors' names by their content."""
        return _COMPRESSED if self.method == "compressed-tensors" else _GPTQ_SUFFIXES

    def used_by(self, folder: Path, prefix: str) -> PackedFormat | None:
        """Return the format if weights with this prefix have it; None for a part stored plain.

        Published checkpoints of several models quantize one of them. Without quantized weights, as
        before the download, the config counts for every part.
        """
        if not any(folder.glob("model*.safetensors")):
            return self
        codes = f".{self.suffixes['codes']}"
        packed = [name for name in WeightFiles(folder).stored if name.endswith(codes)]
        return self if not packed or any(name.startswith(prefix) for name in packed) else None

    def shapes(self, out: int, width: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the tensors of a matrix by their content."""
        n = 32 // self.bits
        shapes: dict[str, tuple[int, ...]] = {"groups": (width,), "shape": (2,)}
        groups = -(-width // (self.group_size or width))
        if self.method == "compressed-tensors":
            shapes |= {"zeros": (-(-out // n), groups), "scales": (out, groups)}
            return {**shapes, "codes": (out, -(-width // n))}
        codes = (width // n, out) if self.method == "gptq" else (width, out // n)
        return {**shapes, "codes": codes, "zeros": (groups, out // n), "scales": (groups, out)}

    def unpack(self, packed: Tensor, axis: int, size: int) -> Tensor:
        """Unpack integers from int32; ``size`` is their number along the axis."""
        n = 32 // self.bits
        places = _AWQ_ORDER if self.method == "awq" else range(n)
        parts = [(packed >> place * self.bits) & (2**self.bits - 1) for place in places]
        stacked = torch.stack([part.to(torch.uint8) for part in parts], axis + 1)
        return stacked.flatten(axis, axis + 1).narrow(axis, 0, size)


def _single_group(place: str, stated: Mapping[str, Any]) -> Mapping[str, Any]:
    groups = stated.get("config_groups")
    values = list(groups.values()) if isinstance(groups, dict) else []
    weights = values[0].get("weights") if values and isinstance(values[0], dict) else None
    if len(values) != 1 or not isinstance(weights, dict):
        raise ValueError(f"{place}.config_groups must hold one group with its weights")
    if any(values[0].get(key) is not None for key in ("input_activations", "output_activations")):
        raise ValueError(
            f"{place}.config_groups: models whose activations are quantized are not supported"
        )
    return weights


@dataclass(frozen=True)
class PackedFiles(WeightFiles):
    """Packed weights of a checkpoint; the parts of a matrix appear as one tensor of its name."""

    format: PackedFormat = field(kw_only=True)

    @cached_property
    def files(self) -> Mapping[str, str]:
        """See :class:`WeightFiles`."""
        suffixes = tuple(f".{suffix}" for suffix in self.format.suffixes.values())
        return {
            f"{name.rpartition('.')[0]}.weight" if name.endswith(suffixes) else name: file
            for name, file in self.stored.items()
        }

    def _parts(self, name: str) -> dict[str, str]:
        """Return names of a matrix's tensors by their content; empty if it is stored plain."""
        stem = name.removesuffix("weight")
        names = {part: f"{stem}{suffix}" for part, suffix in self.format.suffixes.items()}
        return {part: each for part, each in names.items() if each in self.stored}

    def check(self, expected: Mapping[str, Target]) -> None:
        """See :class:`WeightFiles`."""
        plain = {name: place for name, place in expected.items() if not self._parts(name)}
        super().check(plain)
        names = expected.keys() - plain.keys()
        if not names:
            raise ValueError(
                f"{self.folder / CONFIG_FILE} has a quantization_config ({self.format}), but no "
                "weights are stored so; leave it out"
            )
        headers = dict(self.headers([n for name in names for n in self._parts(name).values()]))
        for name in sorted(names):
            shape, parts = tuple(expected[name].shape), self._parts(name)
            if len(shape) != 2:
                raise ValueError(f"{name} in {self.folder} is packed, but of shape {shape}")
            needed = {"codes", "scales", "shape" if "shape" in self.format.suffixes else "zeros"}
            if lacking := needed - parts.keys():
                raise ValueError(f"{name} in {self.folder} lacks its {', '.join(sorted(lacking))}")
            shapes = self.format.shapes(*shape)
            for part, stored in parts.items():
                found, kind = headers[stored]
                kinds = _TYPES[part]
                if found != shapes[part] or kind not in kinds:
                    raise ValueError(
                        f"{stored} in {self.folder} must be {shapes[part]} of {' or '.join(kinds)} "
                        f"({self.format}, for a matrix of {shape}), got {found} of {kind}"
                    )

    def tensors(self, names: Collection[str]) -> Iterator[tuple[str, Stored]]:
        """See :class:`WeightFiles`."""
        for name in names:
            parts = self._parts(name)
            if not parts:
                yield from super().tensors([name])
                continue
            read: dict[str, Any] = dict(super().tensors(list(parts.values())))
            yield name, self._unpack(name, {part: read[each] for part, each in parts.items()})

    def _unpack(self, name: str, parts: Mapping[str, Tensor]) -> Stored:
        scheme, packed, scales = self.format, parts["codes"], parts["scales"].float()
        if scheme.method == "compressed-tensors":
            out, width = (int(size) for size in parts["shape"])
            if scheme.shapes(out, width)["codes"] != tuple(packed.shape):
                raise ValueError(f"{name} in {self.folder} says that its shape is {(out, width)}")
            codes = scheme.unpack(packed, 1, width)
        elif scheme.method == "gptq":
            out, width = packed.shape[1], packed.shape[0] * (32 // scheme.bits)
            codes, scales = scheme.unpack(packed, 0, width).T.contiguous(), scales.T
        else:
            out, width = scales.shape[1], packed.shape[0]
            codes, scales = scheme.unpack(packed, 1, out).T.contiguous(), scales.T
        zeros = torch.full_like(scales, 2 ** (scheme.bits - 1))
        if "zeros" in parts:
            axis = 0 if scheme.method == "compressed-tensors" else 1
            zeros = scheme.unpack(parts["zeros"], axis, out) + scheme.zero_shift
            zeros = (zeros if axis == 0 else zeros.T).float() % 2**scheme.bits
        size, offsets = scheme.group_size or width, (-zeros * scales).contiguous()
        groups = parts.get("groups")
        if groups is None or torch.equal(groups.long(), torch.arange(width) // size):
            return QuantizedWeight(codes, scales.contiguous(), offsets, size, scheme.bits)
        if groups.min() < 0 or groups.max() >= scales.shape[1]:
            raise ValueError(f"{name} in {self.folder} has inputs of groups that are not there")
        at = groups.long()
        return torch.addcmul(offsets[:, at], codes.float(), scales[:, at])

"""Matrices of integer codes in groups, the common representation of all quantized weights.

Along a row of ``(out_features, in_features)``, each group of ``group_size`` codes shares a scale
and an offset, and a weight is ``code * scale + offset``. Published formats are converted to this:

    ========  ====  ==========  ==========================================
    format    bits  group_size  offset
    ========  ====  ==========  ==========================================
    int8      8     a row       -128 scale (a code is the stored one + 128)
    int4      4     32          the group's smallest weight
    Q8_0      8     32          -128 scale (stored + 128)
    Q4_0      4     32          -8 scale
    Q4_1      4     32          the stored minimum
    Q4_K      4     32          -(dmin * min of the group); scale: d * scale of the group
    Q6_K      8     16          -32 scale
    GPTQ/AWQ  4, 8  32 to 128   -zero scale
    ========  ====  ==========  ==========================================

A reader of such files passes each matrix as a :class:`QuantizedWeight` to its :class:`Target`, as a
reader of plain files passes a tensor; ``engine.layers.Linear`` multiplies with it directly.
``int8`` and ``int4`` are computed here from plain tensors while they are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

# Number of weights that are quantized at once.
_CHUNK_SIZE = 1 << 22


class Target(Protocol):
    """Destination of a checkpoint tensor: a tensor, or a part of a product's weight."""

    @property
    def shape(self) -> torch.Size:
        """Shape in the checkpoint."""

    @property
    def nbytes(self) -> int:
        """Size in bytes once it is loaded."""

    def is_floating_point(self) -> bool:
        """Return True if it accepts floating-point numbers."""

    def copy_(self, source: Tensor, /) -> object:
        """Copy the stored tensor into this target."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantized matrix; see the module docstring.

    Attributes:
        codes: ``(out_features, in_features)`` uint8, below ``2**bits``.
        scales: ``(out_features, groups)`` float32; the last group may be shorter than the others.
        offsets: like ``scales``.
        group_size: number of codes in a group.
        bits: 4 or 8.

    Raises:
        ValueError: shapes or types do not match.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor
    group_size: int
    bits: Literal[4, 8]

    def __post_init__(self) -> None:
        rows, width = self.codes.shape
        groups = (rows, -(-width // self.group_size))
        if self.codes.dtype != torch.uint8 or self.bits not in (4, 8):
            raise ValueError(f"expected uint8 codes of 4 or 8 bits, got {self.codes.dtype}")
        for name, tensor in (("scales", self.scales), ("offsets", self.offsets)):
            if tuple(tensor.shape) != groups or tensor.dtype != torch.float32:
                raise ValueError(
                    f"codes {(rows, width)} in groups of {self.group_size} take float32 {name} "
                    f"{groups}, got {tensor.dtype} {tuple(tensor.shape)}"
                )

    @property
    def shape(self) -> torch.Size:
        """``(out_features, in_features)``."""
        return self.codes.shape

    @property
    def layout(self) -> tuple[int, Literal[4, 8]]:
        """Group size and bits; weights with the same layout can be stacked."""
        return self.group_size, self.bits

    def to(self, device: torch.device) -> QuantizedWeight:
        """Return a copy on a device."""
        codes, scales, offsets = self.codes.to(device), self.scales.to(device), self.offsets
        return QuantizedWeight(codes, scales, offsets.to(device), self.group_size, self.bits)

    @classmethod
    def stacked(cls, parts: list[QuantizedWeight]) -> QuantizedWeight:
        """Concatenate the rows of matrices of one layout and width."""
        if len(parts) == 1:
            return parts[0]
        codes, scales, offsets = (
            torch.cat([getattr(part, name) for part in parts])
            for name in ("codes", "scales", "offsets")
        )
        return cls(codes, scales, offsets, parts[0].group_size, parts[0].bits)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Compute the plain matrix."""
        width, size = self.codes.shape[1], self.group_size
        scales = self.scales.repeat_interleave(size, dim=1)[:, :width]
        offsets = self.offsets.repeat_interleave(size, dim=1)[:, :width]
        return torch.addcmul(offsets, self.codes.float(), scales).to(dtype)


Stored: TypeAlias = Tensor | QuantizedWeight
"""A weight as read from a checkpoint."""


@dataclass(frozen=True, slots=True)
class QuantizationScheme:
    """Parameters for quantizing plain weights while they are loaded.

    Attributes:
        group_size: None: one group per row, symmetric around 0. Otherwise a group's codes span the
            range from its smallest to its largest weight.
    """

    bits: Literal[4, 8]
    group_size: int | None

    def nbytes(self, rows: int, width: int) -> int:
        """Return the size of a matrix, with scales and offsets of 16 bits (per row: 32 bits)."""
        groups, entry = (1, 8) if self.group_size is None else (-(-width // self.group_size), 4)
        return rows * (-(-width * self.bits // 8) + groups * entry)

    def quantize(self, weight: Tensor) -> QuantizedWeight:
        """Round a matrix to the nearest codes."""
        rows, width = weight.shape
        size = self.group_size or width
        groups, max_code = -(-width // size), 2**self.bits - 1
        codes = torch.empty(rows, groups * size, dtype=torch.uint8, device=weight.device)
        scales, offsets = torch.empty(2, rows, groups, device=weight.device)
        if weight.is_meta:
            return QuantizedWeight(codes[:, :width], scales, offsets, size, self.bits)
        step = max(_CHUNK_SIZE // width, 1)
        for start in range(0, rows, step):
            at = slice(start, start + step)
            # Padding repeats the last value, so that it changes no group's minimum or maximum.
            part = weight[at].float()
            part = torch.nn.functional.pad(part[None], (0, groups * size - width), "replicate")[0]
            part = part.unflatten(1, (groups, size))
            if self.group_size is None:
                scale = part.abs().amax(-1).div_(max_code // 2)
                offset = scale * -(max_code // 2 + 1)
            else:
                low, high = part.aminmax(dim=-1)
                scale, offset = _round_to_half((high - low).div_(max_code)), _round_to_half(low)
            scales[at], offsets[at] = scale, offset
            safe = torch.where(scale == 0, 1.0, scale)[..., None]
            rounded = part.sub(offset[..., None]).div_(safe).round_().clamp_(0, max_code)
            codes[at] = rounded.nan_to_num_(0.0).flatten(1).to(torch.uint8)
        return QuantizedWeight(codes[:, :width], scales, offsets, size, self.bits)


def _round_to_half(values: Tensor) -> Tensor:
    """Round to the eleven significant bits of float16, with unlimited exponents."""
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp(mantissa.mul_(2**11).round_(), exponent - 11)


SCHEMES = {"int8": QuantizationScheme(8, None), "int4": QuantizationScheme(4, 32)}
"""Values of ``engine.quantization``."""

"""A linear layer that fuses several checkpoint matrices, in plain, packed or quantized form."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.checkpoints.config_file import activation_of
from engine.checkpoints.quantized_weight import QuantizationScheme, QuantizedWeight, Target
from engine.layers.layer_ops import LayerOps, PackedWeight, TensorOptions, empty_parameter
from engine.layers.shards import COLUMNS, ROWS, WHOLE, Shards, ShardTarget


class Linear(nn.Module):
    """``y = x W^T + b`` where W stacks one or several matrices of the checkpoint.

    One product for Q, K and V (or gate and up) reads the activations once::

        W  ┌ q_proj ┐   (out_features, in_features), C-contiguous: each part is a slice of rows,
           ├ k_proj ┤   so that a checkpoint tensor is copied directly into it
           └ v_proj ┘

    W is held in one of these forms, and only this class knows which:

    * plain, the parameter ``weight``;
    * packed by :meth:`pack` after loading;
    * quantized: after :meth:`hold_quantized`, each part accepts what the checkpoint has, a plain
      matrix or a :class:`QuantizedWeight`, and packs it immediately. Parts in different layouts
      (as in GGUF files) are multiplied one after the other.

    ``LayerOps`` builds a :class:`PackedWeight` from any of them: a new file format only needs a
    reader that produces quantized weights, and no change here.

    Args:
        parts: checkpoint name of each matrix to its number of rows, in order.
        bias: True if all parts have biases, or the names of the parts that have one.
        weight: use this matrix instead of a new one (a head tied to the embedding).
        split: the shards that this layer belongs to, and the dimension along which the matrices
            are cut, ``ROWS`` or ``COLUMNS``; sizes are the share's. None: not sharded.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool | Collection[str] = False,
        weight: nn.Parameter | None = None,
        split: tuple[Shards, int] | None = None,
        **options: Unpack[TensorOptions],
    ) -> None:
        super().__init__()
        self._split = None if split is None or split[0].size == 1 else split
        self.parts = dict(parts)
        self.in_features = in_features
        self.out_features = sum(self.parts.values())
        self._is_shared = weight is not None
        self.weight: nn.Parameter | None = weight
        if weight is None:
            self.weight = empty_parameter(self.out_features, in_features, **options)
        self.biased_parts = (self.parts if bias else ()) if isinstance(bias, bool) else bias
        self.bias: nn.Parameter | None = None
        if self.biased_parts:
            # Parts without a bias keep zeros.
            self.bias = empty_parameter(self.out_features, **options)
            self.bias.zero_()
        self._packed: list[PackedWeight] = []
        self._quantized: _QuantizedParts | None = None

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Yield checkpoint names under ``prefix``, each with the target of its tensor."""
        if self.weight is None and self._quantized is None:
            raise RuntimeError("the weight is packed already; load before packing")
        start = 0
        for part, rows in self.parts.items():
            plain = None if self.weight is None else self.weight.data[start : start + rows]
            shape = torch.Size((rows, self.in_features))
            place: Target = _PartTarget(self, part, shape, plain)
            if plain is not None and self._quantized is None:
                place = plain
            yield f"{prefix}{part}.weight", self._shard(place)
            if self.bias is not None and part in self.biased_parts:
                yield f"{prefix}{part}.bias", self._shard(self.bias.data[start : start + rows])
            start += rows

    def _shard(self, place: Target) -> Target:
        return place if self._split is None else ShardTarget(place, *self._split)

    def hold_quantized(
        self, scheme: QuantizationScheme | None, ops: LayerOps, dtype: torch.dtype | None = None
    ) -> None:
        """Hold the weight in quantized form; call before loading.

        A matrix is packed as soon as it is loaded: only one at a time is in memory in its stored
        form. A shared matrix stays plain for its other users. If it is stored quantized, its codes
        are kept in addition; otherwise it is quantized in :meth:`pack`.

        Args:
            scheme: how to quantize plain matrices; None leaves them plain. Matrices that are
                stored quantized keep their codes.
            dtype: type of matrices that stay plain; None: the current one.
        """
        assert self.weight is not None
        self._quantized = _QuantizedParts(
            scheme, ops, self.weight.device, dtype or self.weight.dtype, {}
        )
        if not self._is_shared:
            self.weight = None

    def hold(self, part: str, weight: Tensor | QuantizedWeight) -> None:
        """Accept one of the matrices; all are packed once the last one is there."""
        assert self._quantized is not None
        self._packed += self._quantized.add(part, weight, tuple(self.parts))

    def pack(self, ops: LayerOps | None = None) -> None:
        """Replace the weight by a layout that a CPU multiplies faster; see :func:`can_pack`.

        Results differ from the plain product only by rounding.
        """
        if self.weight is not None and not self._packed:
            if self._quantized is None:
                self._packed = [(ops or LayerOps()).pack_weight(self.weight.data)]
            else:  # a shared matrix, which was loaded plain for its other users
                self._packed = self._quantized.add("", self.weight.data, ("",))
        self.weight = None

    @property
    def is_quantized(self) -> bool:
        """True if :meth:`hold_quantized` was called."""
        return self._quantized is not None

    @property
    def scheme(self) -> QuantizationScheme | None:
        """Scheme by which plain matrices are quantized, if any."""
        return None if self._quantized is None else self._quantized.scheme

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias."""
        plain = sum(t.nbytes for t in (self.weight, self.bias) if t is not None)
        return plain + sum(packed.nbytes for packed in self._packed)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(rows, in_features)`` to ``(rows, out_features)``."""
        if not self._packed:
            # weight is None only if packed
            return F.linear(x, self.weight, self.bias)  # type: ignore[arg-type]
        if len(self._packed) == 1:
            return self._packed[0].multiply(x, self.bias)
        biases: Sequence[Tensor | None] = [None] * len(self._packed)
        if self.bias is not None:
            biases = self.bias.split([packed.out_features for packed in self._packed])
        pairs = zip(self._packed, biases, strict=True)
        return torch.cat([packed.multiply(x, bias) for packed, bias in pairs], dim=-1)


@dataclass(slots=True)
class _QuantizedParts:
    """The parts of a quantized weight that are loaded so far.

    Attributes:
        received: matrices that wait for their siblings.
    """

    scheme: QuantizationScheme | None
    ops: LayerOps
    device: torch.device
    dtype: torch.dtype
    received: dict[str, Tensor | QuantizedWeight]

    def add(
        self, part: str, weight: Tensor | QuantizedWeight, parts: Sequence[str]
    ) -> list[PackedWeight]:
        """Add a part; after the last one, return the packed weights of all parts, in order."""
        weight = weight.to(self.device)
        if isinstance(weight, Tensor):
            plain = weight.to(self.dtype)
            weight = plain if self.scheme is None else self.scheme.quantize(plain)
        self.received[part] = weight
        if self.received.keys() != set(parts):
            return []
        items = [self.received.pop(name) for name in parts]
        packed = []
        for layout, group in groupby(items, lambda x: isinstance(x, QuantizedWeight) and x.layout):
            if layout:
                stack = QuantizedWeight.stacked(list(group))  # type: ignore[arg-type]
                packed.append(self.ops.pack_quantized(stack))
            else:
                packed.append(self.ops.pack_weight(torch.cat(list(group))))  # type: ignore[arg-type]
        return packed


@dataclass(frozen=True, slots=True)
class _PartTarget:
    """Load target of one matrix of a :class:`Linear` that holds its weight quantized.

    Attributes:
        plain: the plain matrix that other users read, if it is shared.
    """

    linear: Linear
    part: str
    shape: torch.Size
    plain: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes in the form in which it will be held."""
        scheme, shared = self.linear.scheme, 0 if self.plain is None else self.plain.nbytes
        held = scheme.nbytes(*self.shape) if scheme is not None else self.shape.numel() // 2
        return held + shared

    def is_floating_point(self) -> bool:
        """See :class:`Target`."""
        return True

    def copy_(self, source: Tensor | QuantizedWeight, /) -> None:
        """Pass the matrix to the layer, and copy its values for other users."""
        if self.plain is None or isinstance(source, QuantizedWeight):
            self.linear.hold(self.part, source)
        if self.plain is not None:
            self.plain.copy_(source if isinstance(source, Tensor) else source.dequantize())


def multiply_groups(linears: Sequence[Linear], x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Map the first ``sizes[0]`` rows by the first layer, the following by the next, and so on.

    Args:
        linears: at least one, all of one shape ``(out_features, in_features)``, without biases.
        x: ``(sum of sizes, in_features)``.
    """
    packed = [each._packed[0] for each in linears if len(each._packed) == 1]
    panels = [each.panels for each in packed if each.panels is not None]
    multiply = packed[0].multiply_groups if len(panels) == len(linears) else None
    if multiply is None:
        rows = x.split(list(sizes))
        return torch.cat([each(own) for each, own in zip(linears, rows, strict=True)])
    return multiply(panels, x.contiguous(), sizes)


GATED_NAMES = ("gate_proj", "up_proj", "down_proj")
"""Usual checkpoint names of the matrices of a gated MLP."""


class MLP(nn.Module):
    """``down(act(gate(x)) * up(x))``, gate and up in one product; or ``down(act(up(x)))``.

    Args:
        intermediate_size: width between the two products, of each matrix of the first.
        output_size: width of the result; None: ``hidden_size``.
        names: checkpoint names of gate, up and down projection; without a gate, of the other two.
        ops: computes the activation; None: plain torch.
        shards: this process's share of the width between the products.

    Raises:
        ValueError: transformers does not know the activation, or the width cannot be divided.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        *,
        names: tuple[str, ...] = GATED_NAMES,
        bias: bool = False,
        output_size: int | None = None,
        ops: LayerOps | None = None,
        shards: Shards = WHOLE,
        **options: Unpack[TensorOptions],
    ) -> None:
        super().__init__()
        self.ops, self.shards = ops or LayerOps(), shards
        width = shards.share(intermediate_size, "the MLP's width")
        down = {names[-1]: output_size or hidden_size}
        up = dict.fromkeys(names[:-1], width)
        self.is_gated = len(up) == 2
        self.up = Linear(hidden_size, up, bias=bias, split=(shards, ROWS), **options)
        self.down = Linear(width, down, bias=bias, split=(shards, COLUMNS), **options)
        self.activation = activation_of(activation)

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Yield checkpoint names under ``prefix``, each with the slice to load its tensor into."""
        yield from self.up.targets(prefix)
        yield from self.down.targets(prefix)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(rows, hidden_size)`` to ``(rows, output_size)``."""
        return self.shards.add_up(self.part(x))

    def part(self, x: Tensor) -> Tensor:
        """Compute the partial result of this process's share of the width."""
        if self.is_gated:
            return self.down(self.ops.gate(self.up(x), self.activation))
        return self.down(self.ops.each(self.activation, self.up(x)))

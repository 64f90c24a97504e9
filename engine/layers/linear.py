"""A linear layer that fuses several checkpoint matrices, whatever form they are held in."""

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
           ├ k_proj ┤   so that a checkpoint tensor is copied straight to its place
           └ v_proj ┘

    W is held in one of these forms, and this class is the only place that knows which:

    * plain, the parameter ``weight``;
    * packed by :meth:`pack`, once it is loaded;
    * quantized: after :meth:`hold_quantized`, each part takes what a checkpoint has of it, a plain
      matrix or a :class:`QuantizedWeight`, and packs it at once. Parts that come in different
      layouts (as in GGUF files) are multiplied one after the other.

    Whatever it is, ``LayerOps`` makes a :class:`PackedWeight` of it: a new format of files needs
    a reader that makes quantized weights, and nothing here.

    Args:
        parts: checkpoint name of each matrix to its number of rows, in order.
        bias: whether the parts have biases, or the names of those that have one.
        weight: use this matrix instead of a new one (a head tied to the embedding).
        split: of which share of the checkpoint's matrices this is, and by which dimension they are
            cut, ``ROWS`` or ``COLUMNS``; sizes are the share's. None: it is all of them.
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
            # Zeros stay where a part has no bias.
            self.bias = empty_parameter(self.out_features, **options)
            self.bias.zero_()
        self._packed: list[PackedWeight] = []
        self._quantized: _QuantizedParts | None = None

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Checkpoint names under ``prefix``, each with the place that its tensor is copied to."""
        if self.weight is None and self._quantized is None:
            raise RuntimeError("the weight is packed already; load before packing")
        start = 0
        for part, rows in self.parts.items():
            plain = None if self.weight is None else self.weight.data[start : start + rows]
            shape = torch.Size((rows, self.in_features))
            place: Target = _PartTarget(self, part, shape, plain)
            if plain is not None and self._quantized is None:
                place = plain
            yield f"{prefix}{part}.weight", self._cut(place)
            if self.bias is not None and part in self.biased_parts:
                yield f"{prefix}{part}.bias", self._cut(self.bias.data[start : start + rows])
            start += rows

    def _cut(self, place: Target) -> Target:
        return place if self._split is None else ShardTarget(place, *self._split)

    def hold_quantized(
        self,
        scheme: QuantizationScheme | None,
        ops: LayerOps,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Take the weight in a quantized form; call before it is loaded.

        A matrix is packed as soon as it has come: one at a time is in memory as it is stored.
        A shared matrix stays for its other users, beside its codes where it comes quantized; else
        it is quantized when it is packed.

        Args:
            scheme: for matrices that come plain; None leaves those as they are. Matrices that come
                quantized keep their codes.
            dtype: of matrices that stay plain; None: the one that they have here.
        """
        assert self.weight is not None
        self._quantized = _QuantizedParts(
            scheme, ops, self.weight.device, dtype or self.weight.dtype, {}
        )
        if not self._is_shared:
            self.weight = None

    def hold(self, part: str, weight: Tensor | QuantizedWeight) -> None:
        """Take one of the matrices, which is packed once its last sibling is there."""
        assert self._quantized is not None
        self._packed += self._quantized.take(part, weight, tuple(self.parts))

    def pack(self, ops: LayerOps | None = None) -> None:
        """Replace the weight by a layout that a CPU multiplies faster; see :func:`can_pack`.

        Results differ from the plain product by rounding only.
        """
        if self.weight is None or self._packed:
            self.weight = None
            return
        if self._quantized is None:
            self._packed = [(ops or LayerOps()).pack_weight(self.weight.data)]
        else:
            self._packed = self._quantized.pack(self.weight.data)
        self.weight = None

    @property
    def is_quantized(self) -> bool:
        """Whether :meth:`hold_quantized` was called."""
        return self._quantized is not None

    @property
    def scheme(self) -> QuantizationScheme | None:
        """By which plain matrices are quantized, if they are."""
        return None if self._quantized is None else self._quantized.scheme

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias."""
        plain = sum(t.nbytes for t in (self.weight, self.bias) if t is not None)
        return plain + sum(packed.nbytes for packed in self._packed)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(rows, in_features)`` to ``(rows, out_features)``."""
        if not self._packed:
            # weight is only None once packed
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
    """What has come so far of a weight that is held quantized.

    Attributes:
        came: matrices that wait for their siblings.
    """

    scheme: QuantizationScheme | None
    ops: LayerOps
    device: torch.device
    dtype: torch.dtype
    came: dict[str, Tensor | QuantizedWeight]

    def take(
        self, part: str, weight: Tensor | QuantizedWeight, parts: Sequence[str]
    ) -> list[PackedWeight]:
        """Packed weights of all parts, in their order, once the last one has come."""
        weight = weight.to(self.device)
        if isinstance(weight, Tensor):
            plain = weight.to(self.dtype)
            weight = plain if self.scheme is None else self.scheme.quantize(plain)
        self.came[part] = weight
        if self.came.keys() != set(parts):
            return []
        came = [self.came[name] for name in parts]
        self.came = {}
        packed = []
        for layout, group in groupby(came, lambda x: isinstance(x, QuantizedWeight) and x.layout):
            if layout:
                stack = QuantizedWeight.stacked(list(group))  # type: ignore[arg-type]
                packed.append(self.ops.pack_quantized(stack))
            else:
                packed.append(self.ops.pack_weight(torch.cat(list(group))))  # type: ignore[arg-type]
        return packed

    def pack(self, weight: Tensor) -> list[PackedWeight]:
        """Of a matrix that was loaded plain, for others need it so."""
        return self.take("", weight, ("",))


@dataclass(frozen=True, slots=True)
class _PartTarget:
    """The place of one matrix of a :class:`Linear` that holds its weight quantized.

    Attributes:
        plain: where others look for the matrix, if it is shared.
    """

    linear: Linear
    part: str
    shape: torch.Size
    plain: Tensor | None

    @property
    def nbytes(self) -> int:
        """As it will be held."""
        scheme, shared = self.linear.scheme, 0 if self.plain is None else self.plain.nbytes
        held = scheme.nbytes(*self.shape) if scheme is not None else self.shape.numel() // 2
        return held + shared

    def is_floating_point(self) -> bool:
        """See :class:`Target`."""
        return True

    def copy_(self, source: Tensor | QuantizedWeight, /) -> None:
        """Give it to the product, and its values to others."""
        if self.plain is None or isinstance(source, QuantizedWeight):
            self.linear.hold(self.part, source)
        if self.plain is not None:
            self.plain.copy_(source if isinstance(source, Tensor) else source.dequantize())


def multiply_groups(linears: Sequence[Linear], x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Map the first ``sizes[0]`` rows by the first layer, those that follow by the next, and so on.

    Args:
        linears: at least one, of one shape ``(out_features, in_features)``, without biases.
        x: ``(sum of sizes, in_features)``.
    """
    packed = [each._packed[0] for each in linears if len(each._packed) == 1]
    panels = [each.panels for each in packed if each.panels is not None]
    together = packed[0].multiply_groups if len(panels) == len(linears) else None
    if together is None:
        rows = x.split(list(sizes))
        return torch.cat([each(mine) for each, mine in zip(linears, rows, strict=True)])
    return together(panels, x.contiguous(), sizes)


class PlainMLP(nn.Module):
    """``down(act(up(x)))``.

    Args:
        intermediate_size: width between the two products, of each matrix of the first.
        output_size: width of the result; None: ``hidden_size``.
        names: what checkpoints call the matrices of the first product, and last the second's.
        ops: what computes the activation; None: torch alone.
        shards: this process's share of the width between the products.

    Raises:
        ValueError: transformers knows no such activation, or the width cannot be divided.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        *,
        names: tuple[str, ...],
        bias: bool,
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
        self.up = Linear(hidden_size, up, bias=bias, split=(shards, ROWS), **options)
        self.down = Linear(width, down, bias=bias, split=(shards, COLUMNS), **options)
        self.activation = activation_of(activation)

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Checkpoint names under ``prefix``, each with the slice that its tensor is copied to."""
        yield from self.up.targets(prefix)
        yield from self.down.targets(prefix)

    def forward(self, x: Tensor) -> Tensor:
        """``(rows, hidden_size)`` to ``(rows, output_size)``."""
        return self.shards.add_up(self.part(x))

    def part(self, x: Tensor) -> Tensor:
        """What this process's share of the width adds to the result."""
        return self.down(self.ops.each(self.activation, self.up(x)))


class GatedMLP(PlainMLP):
    """``down(act(gate(x)) * up(x))``, gate and up in one product.

    Its arguments are those of :class:`PlainMLP`, ``names`` being the gate's, the up and the down
    projection's.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        *,
        bias: bool = False,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        ops: LayerOps | None = None,
        shards: Shards = WHOLE,
        **options: Unpack[TensorOptions],
    ) -> None:
        sizes = (hidden_size, intermediate_size, activation)
        super().__init__(*sizes, names=names, bias=bias, ops=ops, shards=shards, **options)

    def part(self, x: Tensor) -> Tensor:
        """See :meth:`PlainMLP.part`."""
        return self.down(self.ops.gate(self.up(x), self.activation))

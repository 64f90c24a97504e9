"""A linear layer that fuses several checkpoint matrices and can pack its weight for the CPU."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.checkpoints.config_file import activation_of
from engine.layers.layer_ops import LayerOps, PackedWeight

__all__ = ["GatedMLP", "Linear", "PlainMLP", "SparseMoE", "can_pack"]


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether :meth:`Linear.pack` is possible, and worth it, for weights of this kind.

    Plain products of 4 to 64 rows (the decode of a batch) reach a fraction of the memory bound
    on CPUs; a packed layout makes them 1.5 to 2 times faster. It replaces the plain matrix, since
    a second copy of every weight would cost more than it brings.
    """
    return device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available()


class Linear(nn.Module):
    """``y = x W^T + b`` where W stacks one or several matrices of the checkpoint.

    One product for Q, K and V (or gate and up) reads the activations once::

        W  ┌ q_proj ┐   (out_features, in_features), C-contiguous: each part is a slice of rows,
           ├ k_proj ┤   so that a checkpoint tensor is copied straight to its place
           └ v_proj ┘

    Args:
        parts: checkpoint name of each matrix to its number of rows, in order.
        bias: whether the parts have biases, or the names of those that have one.
        weight: use this matrix instead of a new one (a head tied to the embedding).
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool | Collection[str] = False,
        dtype: torch.dtype,
        device: torch.device,
        weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.parts = dict(parts)
        self.in_features = in_features
        self.out_features = sum(self.parts.values())
        if weight is None:
            values = torch.empty(self.out_features, in_features, dtype=dtype, device=device)
            weight = nn.Parameter(values, requires_grad=False)
        self.weight: nn.Parameter | None = weight
        self.biased_parts = (self.parts if bias else ()) if isinstance(bias, bool) else bias
        self.bias: nn.Parameter | None = None
        if self.biased_parts:
            # Zeros stay where a part has no bias.
            values = torch.zeros(self.out_features, dtype=dtype, device=device)
            self.bias = nn.Parameter(values, requires_grad=False)
        self._packed: PackedWeight | None = None

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names under ``prefix``, each with the slice that its tensor is copied to."""
        if self.weight is None:
            raise RuntimeError("the weight is packed already; load before packing")
        start = 0
        for part, rows in self.parts.items():
            yield f"{prefix}{part}.weight", self.weight.data[start : start + rows]
            if self.bias is not None and part in self.biased_parts:
                yield f"{prefix}{part}.bias", self.bias.data[start : start + rows]
            start += rows

    def pack(self, ops: LayerOps | None = None) -> None:
        """Replace the weight by a layout that a CPU multiplies faster; see :func:`can_pack`.

        Results differ from the plain product by rounding only.
        """
        if self.weight is None:
            return
        self._packed = (ops or LayerOps()).pack_weight(self.weight.data)
        self.weight = None

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias."""
        return sum(t.nbytes for t in (self.weight, self._packed, self.bias) if t is not None)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(rows, in_features)`` to ``(rows, out_features)``."""
        if self._packed is None:
            # weight is only None once packed
            return F.linear(x, self.weight, self.bias)  # type: ignore[arg-type]
        return self._packed.multiply(x, self.bias)


class PlainMLP(nn.Module):
    """``down(act(up(x)))``.

    Args:
        intermediate_size: width between the two products, of each matrix of the first.
        names: what checkpoints call the matrices of the first product, and last the second's.

    Raises:
        ValueError: transformers knows no such activation.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        *,
        names: tuple[str, ...],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        up, down = dict.fromkeys(names[:-1], intermediate_size), {names[-1]: hidden_size}
        self.up = Linear(hidden_size, up, bias=bias, dtype=dtype, device=device)
        self.down = Linear(intermediate_size, down, bias=bias, dtype=dtype, device=device)
        self.activation = activation_of(activation)

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names under ``prefix``, each with the slice that its tensor is copied to."""
        yield from self.up.targets(prefix)
        yield from self.down.targets(prefix)

    def forward(self, x: Tensor) -> Tensor:
        """``(rows, hidden_size)`` to the same shape."""
        output: Tensor = self.down(self.activation(self.up(x)))
        return output


class GatedMLP(PlainMLP):
    """``down(act(gate(x)) * up(x))``, gate and up in one product.

    Its arguments are those of :class:`PlainMLP`, ``names`` being the gate's, the up and the down
    projection's; ``ops`` is what computes the gating.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        *,
        bias: bool = False,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        dtype: torch.dtype,
        device: torch.device,
        ops: LayerOps | None = None,
    ) -> None:
        sizes = (hidden_size, intermediate_size, activation)
        super().__init__(*sizes, names=names, bias=bias, dtype=dtype, device=device)
        self.ops = ops or LayerOps()

    def forward(self, x: Tensor) -> Tensor:
        """``(rows, hidden_size)`` to the same shape."""
        output: Tensor = self.down(self.ops.gate(self.up(x), self.activation))
        return output


class SparseMoE(nn.Module):
    """``sum over the top k experts e of softmax(router(x))[e] * e(x)``.

    The weights are those of the softmax over all experts, not made to add up to one again.
    Source: Jiang et al., "Mixtral of Experts", 2024, but for that.

    Raises:
        ValueError: more experts per token than there are, or an unknown activation.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        num_experts_per_token: int,
        activation: str,
        dtype: torch.dtype,
        device: torch.device,
        ops: LayerOps | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= num_experts_per_token <= num_experts:
            raise ValueError(
                f"a token takes 1 to {num_experts} experts, as many as there are; "
                f"num_experts_per_tok is {num_experts_per_token}"
            )
        self.num_experts_per_token = num_experts_per_token
        self.router = Linear(hidden_size, {"router": num_experts}, dtype=dtype, device=device)
        self.experts = nn.ModuleList(
            GatedMLP(
                hidden_size, intermediate_size, activation, dtype=dtype, device=device, ops=ops
            )
            for _ in range(num_experts)
        )

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names under ``prefix``, each with the slice that its tensor is copied to."""
        yield from self.router.targets(prefix)
        for index, expert in enumerate(self.experts):
            if isinstance(expert, GatedMLP):
                yield from expert.targets(f"{prefix}experts.{index}.")

    def forward(self, x: Tensor) -> Tensor:
        """``(rows, hidden_size)`` to the same shape; each expert runs once, over its rows."""
        scores = self.router(x).softmax(dim=-1, dtype=torch.float32)
        weights, chosen = scores.topk(self.num_experts_per_token, dim=-1)
        # Choices sorted by expert: those of one expert lie side by side.
        choices = chosen.flatten().argsort(stable=True)
        rows = choices // self.num_experts_per_token
        weights = weights.flatten()[choices].to(x.dtype).unsqueeze(1)
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        output = torch.zeros_like(x)
        for expert, mine, share in zip(
            self.experts, rows.split(counts), weights.split(counts), strict=True
        ):
            if len(mine):
                output.index_add_(0, mine, expert(x.index_select(0, mine)) * share)
        return output

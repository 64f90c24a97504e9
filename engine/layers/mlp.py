"""MLPs: the plain one of the first transformers, and the gated one of later decoders."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from engine.checkpoints.activation import activation_of
from engine.layers.layer_ops import LayerOps
from engine.layers.linear import Linear

__all__ = ["GatedMLP", "PlainMLP", "SparseMoE"]


class PlainMLP(nn.Module):
    """``down(act(up(x)))``.

    Args:
        hidden_size: width of input and output.
        intermediate_size: width between the two products, of each matrix of the first.
        activation: transformers' name of the activation.
        names: what checkpoints call the matrices of the first product, and last the second's.
        bias: whether they have biases.
        dtype: of the weights.
        device: of the weights.

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

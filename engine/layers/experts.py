"""A mixture of experts: of many gated MLPs, each token runs through the few that a router chooses.

Tokens are grouped by expert, so that an expert reads its weights once, for its own rows alone, and
one that nobody chose is not read at all::

    tokens     0 1 2                    two experts to a token: six choices
    choices    0:a,c  1:c,d  2:a,b
    grouped    a: 0 2 | b: 2 | c: 0 1 | d: 1      a product of each expert over its own rows
    summed     0: a + c    1: c + d    2: a + b   each by its weight

Source: Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts
Layer", 2017.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.checkpoints.config_file import activation_of
from engine.checkpoints.quantized_weight import Target
from engine.layers.layer_ops import LayerOps
from engine.layers.linear import GatedMLP, Linear, multiply_groups

__all__ = ["ExpertsConfig", "SparseMoE"]


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """What a mixture of experts is made of.

    Attributes:
        num_experts: how many there are.
        num_experts_per_token: how many a token runs through.
        intermediate_size: width inside each.
        normalize: whether the weights of a token's experts are made to add up to one.
        shared_size: width inside an expert that all tokens run through, weighed by a sigmoid of
            its own; 0: there is none.
        router: what checkpoints call the router.
        names: what they call an expert's gate, up and down projection.

    Raises:
        ValueError: more experts per token than there are.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    normalize: bool = False
    shared_size: int = 0
    router: str = "gate"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    def __post_init__(self) -> None:
        if not 1 <= self.num_experts_per_token <= self.num_experts:
            raise ValueError(
                f"a token takes 1 to {self.num_experts} experts, as many as there are; "
                f"num_experts_per_tok is {self.num_experts_per_token}"
            )


class SparseMoE(nn.Module):
    """``sum over the top k experts e of softmax(router(x))[e] * e(x)``; see the module's note.

    Attributes:
        routers: products whose results choose or weigh experts.

    Raises:
        ValueError: an unknown activation.
    """

    def __init__(
        self,
        hidden_size: int,
        config: ExpertsConfig,
        activation: str,
        *,
        dtype: torch.dtype,
        device: torch.device,
        ops: LayerOps | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.ops = ops or LayerOps()
        self.activation = activation_of(activation)

        def mlp(intermediate_size: int, names: tuple[str, str, str]) -> GatedMLP:
            sizes = (hidden_size, intermediate_size, activation)
            return GatedMLP(*sizes, names=names, dtype=dtype, device=device, ops=self.ops)

        def scores(name: str, rows: int) -> Linear:
            return Linear(hidden_size, {name: rows}, dtype=dtype, device=device)

        self.router = scores(config.router, config.num_experts)
        self.routers = [self.router]
        self.experts = [
            mlp(config.intermediate_size, config.names) for _ in range(config.num_experts)
        ]
        self.expert_modules = nn.ModuleList(self.experts)
        self.shared: GatedMLP | None = None
        if config.shared_size:
            self.shared = mlp(config.shared_size, ("gate_proj", "up_proj", "down_proj"))
            self.shared_gate = scores("shared_expert_gate", 1)
            self.routers.append(self.shared_gate)

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Checkpoint names under ``prefix``, each with the slice that its tensor is copied to."""
        yield from self.router.targets(prefix)
        for index, expert in enumerate(self.experts):
            yield from expert.targets(f"{prefix}experts.{index}.")
        if self.shared is not None:
            yield from self.shared.targets(f"{prefix}shared_expert.")
            yield from self.shared_gate.targets(prefix)

    def forward(self, x: Tensor) -> Tensor:
        """``(rows, hidden_size)`` to the same shape; each expert runs once, over its rows."""
        weights, chosen = self._route(x)
        per_token = chosen.shape[1]
        of_choice = chosen.flatten()
        # Choices sorted by expert: those of one expert lie side by side.
        order = of_choice.argsort(stable=True)
        counts = of_choice.bincount(minlength=len(self.experts)).tolist()
        experts = [self.experts[index] for index, count in enumerate(counts) if count]
        sizes = [count for count in counts if count]
        rows = x.index_select(0, order // per_token)
        opened = multiply_groups([expert.up for expert in experts], rows, sizes)
        gated = self.ops.gate(opened, self.activation)
        closed = multiply_groups([expert.down for expert in experts], gated, sizes)
        output = torch.empty_like(closed).index_copy_(0, order, closed)
        mixed = output.view(len(x), per_token, -1).mul_(weights.unsqueeze(2)).sum(dim=1)
        if self.shared is not None:
            mixed += self.shared(x).mul_(self.shared_gate(x).sigmoid())
        return mixed

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of each row's experts, ``(rows, num_experts_per_token)`` both."""
        scores = self.router(x).softmax(dim=-1, dtype=torch.float32)
        weights, chosen = scores.topk(self.config.num_experts_per_token, dim=-1)
        if self.config.normalize:
            weights /= weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), chosen

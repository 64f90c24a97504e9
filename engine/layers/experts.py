"""Mixture of experts: a router selects a few of many gated MLPs for each token.

Tokens are grouped by expert: each expert reads its weights once, for its own rows only, and an
expert that no token selected is not read at all::

    tokens     0 1 2                    two experts to a token: six choices
    choices    0:a,c  1:c,d  2:a,b
    grouped    a: 0 2 | b: 2 | c: 0 1 | d: 1      one product per expert over its own rows
    summed     0: a + c    1: c + d    2: a + b   weighted

Source: Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts
Layer", 2017.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.checkpoints.config_file import activation_of
from engine.checkpoints.quantized_weight import Target
from engine.layers.layer_ops import LayerOps, TensorOptions
from engine.layers.linear import GATED_NAMES, MLP, Linear, multiply_groups
from engine.layers.shards import WHOLE, Shards


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Sizes and checkpoint names of a mixture of experts.

    Attributes:
        num_experts: number of experts.
        num_experts_per_token: number of experts that each token runs through.
        intermediate_size: width inside each expert.
        normalize: True if the weights of a token's experts are scaled to sum to one.
        shared_size: width inside an expert that all tokens run through, weighted by a separate
            sigmoid gate; 0: no shared expert.
        router: name of the router in checkpoints.
        names: names of an expert's gate, up and down projection in checkpoints.
        stacked: True if checkpoints store the matrices of all experts in one tensor, gate above
            up, transposed or not; otherwise each matrix is a separate tensor.

    Raises:
        ValueError: more experts per token than experts.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    normalize: bool = False
    shared_size: int = 0
    router: str = "gate"
    names: tuple[str, str, str] = GATED_NAMES
    stacked: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.num_experts_per_token <= self.num_experts:
            raise ValueError(
                f"a token takes 1 to {self.num_experts} experts, as many as there are; "
                f"num_experts_per_tok is {self.num_experts_per_token}"
            )


class SparseMoE(nn.Module):
    """``sum over the top k experts e of softmax(router(x))[e] * e(x)``; see the module docstring.

    Args:
        shards: this process's share of every expert's width.

    Attributes:
        routers: linear layers whose outputs select or weight experts.

    Raises:
        ValueError: the activation is unknown, or the width cannot be divided.
    """

    def __init__(
        self,
        hidden_size: int,
        config: ExpertsConfig,
        activation: str,
        *,
        ops: LayerOps | None = None,
        shards: Shards = WHOLE,
        **options: Unpack[TensorOptions],
    ) -> None:
        super().__init__()
        self.config, self.shards = config, shards
        self.ops = ops or LayerOps()
        self.activation = activation_of(activation)

        def mlp(intermediate_size: int, names: tuple[str, str, str]) -> MLP:
            sizes = (hidden_size, intermediate_size, activation)
            return MLP(*sizes, names=names, ops=self.ops, shards=shards, **options)

        def scores(name: str, rows: int) -> Linear:
            return Linear(hidden_size, {name: rows}, **options)

        self.router = scores(config.router, config.num_experts)
        self.routers = [self.router]
        self.experts = [
            mlp(config.intermediate_size, config.names) for _ in range(config.num_experts)
        ]
        self.expert_modules = nn.ModuleList(self.experts)
        # Stacked weights of the experts' up and down products; built on first use on a GPU.
        self._stacks: tuple[Tensor | None, ...] | None = None
        self.shared: MLP | None = None
        if config.shared_size:
            self.shared = mlp(config.shared_size, GATED_NAMES)
            self.shared_gate = scores("shared_expert_gate", 1)
            self.routers.append(self.shared_gate)

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Yield checkpoint names under ``prefix``, each with the slice to load its tensor into."""
        yield from self.router.targets(prefix)
        if self.config.stacked:
            up, down = ([getattr(each, side) for each in self.experts] for side in ("up", "down"))
            yield f"{prefix}experts.gate_up_proj", _StackTarget(up)
            yield f"{prefix}experts.down_proj", _StackTarget(down)
        else:
            for index, expert in enumerate(self.experts):
                yield from expert.targets(f"{prefix}experts.{index}.")
        if self.shared is not None:
            yield from self.shared.targets(f"{prefix}shared_expert.")
            yield from self.shared_gate.targets(prefix)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(rows, hidden_size)`` to the same shape; each expert runs once, over its rows."""
        weights, chosen = self._route(x)
        per_token = chosen.shape[1]
        expert_of_choice = chosen.flatten()
        # Sorted by expert, so that the choices of one expert are adjacent.
        order = expert_of_choice.argsort(stable=True)
        rows = x.index_select(0, order // per_token)
        outputs = self._run_on_device(rows, expert_of_choice) if x.is_cuda else None
        if outputs is None:
            outputs = self._run_by_counts(rows, expert_of_choice)
        output = torch.empty_like(outputs).index_copy_(0, order, outputs)
        mixed = output.view(len(x), per_token, -1).mul_(weights.unsqueeze(2)).sum(dim=1)
        if self.shared is not None:
            share = self.ops.each(torch.sigmoid, self.shared_gate(x))
            mixed += self.shared.part(x).mul_(share)
        return self.shards.add_up(mixed)

    def _run_by_counts(self, rows: Tensor, expert_of_choice: Tensor) -> Tensor:
        """Run each expert over its rows, which are sorted by expert; reads counts on the host."""
        counts = expert_of_choice.bincount(minlength=len(self.experts)).tolist()
        experts = [self.experts[index] for index, count in enumerate(counts) if count]
        sizes = [count for count in counts if count]
        hidden = multiply_groups([expert.up for expert in experts], rows, sizes)
        gated = self.ops.gate(hidden, self.activation)
        return multiply_groups([expert.down for expert in experts], gated, sizes)

    def _run_on_device(self, rows: Tensor, expert_of_choice: Tensor) -> Tensor | None:
        """Do the same without reading the counts on the host; None if no kernel supports it.

        CUDA's grouped products need bfloat16 and rows that are a multiple of 16 bytes long.
        """
        if self._stacks is None:
            ups, downs = zip(*((expert.up, expert.down) for expert in self.experts), strict=True)
            self._stacks = _stack_weights(ups), _stack_weights(downs)
        up, down = self._stacks
        if up is None or down is None or rows.dtype != torch.bfloat16:
            return None
        counts = expert_of_choice.new_zeros(len(self.experts)).scatter_add_(
            0, expert_of_choice, torch.ones_like(expert_of_choice)
        )
        ends = counts.cumsum(0).to(torch.int32)
        hidden = F.grouped_mm(rows, up.transpose(1, 2), offs=ends)
        gated = self.ops.gate(hidden, self.activation)
        return F.grouped_mm(gated, down.transpose(1, 2), offs=ends)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and indices of each row's experts, both ``(rows, experts per token)``."""
        scores = self.router(x).softmax(dim=-1, dtype=torch.float32)
        weights, chosen = scores.topk(self.config.num_experts_per_token, dim=-1)
        if self.config.normalize:
            weights /= weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), chosen


class _StackTarget:
    """Target of one product of all experts as one tensor, ``(experts, outputs, inputs)``."""

    def __init__(self, products: Sequence[Linear]) -> None:
        self.places = [[place for _, place in each.targets("")] for each in products]
        rows, width = sum(place.shape[0] for place in self.places[0]), self.places[0][0].shape[1]
        self.shape = torch.Size((len(products), rows, width))
        self.shapes = (len(products), rows, width), (len(products), width, rows)
        self.nbytes = sum(place.nbytes for places in self.places for place in places)

    def is_floating_point(self) -> bool:
        """See :class:`Target`."""
        return True

    def copy_(self, source: Tensor, /) -> None:
        """Copy each expert's part; an ambiguous (square) shape is taken as not transposed."""
        if source.shape != self.shape:
            source = source.transpose(1, 2)
        for places, matrices in zip(self.places, source, strict=True):
            parts = matrices.split([place.shape[0] for place in places])
            for place, part in zip(places, parts, strict=True):
                place.copy_(part.contiguous())


def _stack_weights(linears: Sequence[Linear]) -> Tensor | None:
    """Stack all weights, which become views of the result; None if some are packed or unaligned."""
    weights = [linear.weight for linear in linears if linear.weight is not None]
    first = weights[0] if len(weights) == len(linears) else None
    if first is None or any(size * first.element_size() % 16 for size in first.shape):
        return None
    stack = torch.stack([weight.data for weight in weights])
    for weight, view in zip(weights, stack, strict=True):
        weight.data = view
    return stack

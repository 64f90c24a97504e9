"""Tensor parallelism: the shard of a model's weights that one process holds.

Two consecutive products need one all-reduce. The first is sharded by its outputs, whole heads or
channels of the MLP, and the second by its inputs (Shoeybi et al., "Megatron-LM", 2019)::

              process 0    process 1
    x ──►  ┌ q k v, gate up: rows ┐
           │  0 .. n/2  │ n/2 .. n │        each for its own heads or channels
           └────────────┴──────────┘
    y = o[:, 0 .. n/2] h0 + o[:, n/2 .. n] h1       o, down: columns; add_up
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from engine.checkpoints.quantized_weight import Target

ROWS: Final = 0
COLUMNS: Final = 1


class ShardError(ValueError):
    """A model cannot be divided among this number of processes."""


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """The rank of this process and the group it communicates in.

    Attributes:
        rank: index of this process, from 0.
        size: number of processes.
        group: group of all processes; None if there is only one, or if nothing is computed.
    """

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None

    def share(self, number: int, name: str) -> int:
        """Return this process's share of ``number`` heads or channels.

        Raises:
            ShardError: ``number`` cannot be divided evenly.
        """
        if number % self.size:
            raise ShardError(
                f"tensor_parallel {self.size} does not divide {name} {number}; set it to a divisor"
            )
        return number // self.size

    def add_up(self, part: Tensor) -> Tensor:
        """All-reduce ``part`` in place by summation; the result has the same bits everywhere."""
        if self.group is not None:
            self.group.allreduce([part]).wait()
        return part

    def broadcast(self, tensor: Tensor) -> None:
        """Broadcast the first process's tensor into the ``tensor`` of all others."""
        if self.group is not None:
            self.group.broadcast(tensor, 0).wait()


WHOLE: Final = Shards()


@dataclass(frozen=True, slots=True)
class ShardTarget:
    """Load target that keeps this process's share of a checkpoint's matrix or bias.

    Attributes:
        place: target of the share.
        dim: ``ROWS`` or ``COLUMNS``, the dimension along which the matrix is cut. The bias of a
            product cut by columns belongs to the first process, because it is added only once.
    """

    place: Target
    shards: Shards
    dim: int

    @property
    def shape(self) -> torch.Size:
        """Full shape, as in the checkpoint."""
        sizes = list(self.place.shape)
        if self.dim < len(sizes):
            sizes[self.dim] *= self.shards.size
        return torch.Size(sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of the share."""
        return self.place.nbytes

    def is_floating_point(self) -> bool:
        """See :class:`Target`."""
        return self.place.is_floating_point()

    def copy_(self, source: Tensor, /) -> None:
        """Copy the share of ``source``."""
        if self.dim < source.ndim:
            length = self.place.shape[self.dim]
            source = source.narrow(self.dim, self.shards.rank * length, length).contiguous()
        elif self.shards.rank:
            return
        self.place.copy_(source)

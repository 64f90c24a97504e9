"""The share of a model's products that one of several processes holds (tensor parallelism).

Two products in a row need one sum over the processes. The first is cut by its outputs, whole heads
or channels of the MLP, and the second by its inputs (Shoeybi et al., "Megatron-LM", 2019)::

              process 0    process 1
    x ──►  ┌ q k v, gate up: rows ┐
           │  0 .. n/2  │ n/2 .. n │        each over its own heads or channels
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
    """A model cannot be divided among so many processes."""


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """Which share this process has, and how it meets the others.

    Attributes:
        rank: of this process, from 0.
        size: how many there are.
        group: of all of them; None where there is one, or nothing is to be computed.
    """

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None

    def share(self, number: int, name: str) -> int:
        """This process's part of so many heads or channels.

        Raises:
            ShardError: they cannot be divided evenly.
        """
        if number % self.size:
            raise ShardError(
                f"tensor_parallel {self.size} does not divide {name} {number}; set it to a divisor"
            )
        return number // self.size

    def add_up(self, part: Tensor) -> Tensor:
        """The sum of all processes' parts, in the place of this one's; the same bits in each."""
        if self.group is not None:
            self.group.allreduce([part]).wait()
        return part

    def broadcast(self, tensor: Tensor) -> None:
        """Give the first process's tensor to all others, which bring one to be filled."""
        if self.group is not None:
            self.group.broadcast(tensor, 0).wait()


WHOLE: Final = Shards()


@dataclass(frozen=True, slots=True)
class ShardTarget:
    """Takes this process's share of a checkpoint's matrix or bias.

    Attributes:
        place: of the share.
        dim: ``ROWS`` or ``COLUMNS``, by which the matrix is cut. A bias behind a product that is
            cut by columns belongs to the first process: it is to be added once.
    """

    place: Target
    shards: Shards
    dim: int

    @property
    def shape(self) -> torch.Size:
        """As the checkpoint has it."""
        sizes = list(self.place.shape)
        if self.dim < len(sizes):
            sizes[self.dim] *= self.shards.size
        return torch.Size(sizes)

    @property
    def nbytes(self) -> int:
        """Of the share."""
        return self.place.nbytes

    def is_floating_point(self) -> bool:
        """See :class:`Target`."""
        return self.place.is_floating_point()

    def copy_(self, source: Tensor, /) -> None:
        """Take the share out of the whole."""
        if self.dim < source.ndim:
            length = self.place.shape[self.dim]
            source = source.narrow(self.dim, self.shards.rank * length, length).contiguous()
        elif self.shards.rank:
            return
        self.place.copy_(source)

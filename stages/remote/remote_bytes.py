"""Bytes that lie somewhere else: in another process's memory, in an object store."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["RemoteBytes"]


class RemoteBytes(ABC):
    """A handle on bytes, which can be passed on without looking at them.

    Attributes:
        nbytes: how many there are.
    """

    __slots__ = ()

    nbytes: int

    @abstractmethod
    def array(self) -> NDArray[np.uint8]:
        """The bytes, ``(nbytes,)``, on the host; nobody may change them.

        Raises:
            MemoryError: there is no room for them.
            RuntimeError: they are lost.
        """

    def tensor(self) -> Tensor:
        """The same, ``(nbytes,)`` uint8, on the device where this process has them."""
        return torch.from_numpy(self.array())

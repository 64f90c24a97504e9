"""Makes the tensors of what a prompt shows, of one modality."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

__all__ = ["FeatureMaker"]


class FeatureMaker(ABC):
    """Makes the features of items of one modality."""

    @abstractmethod
    def make(self, item: Any) -> Mapping[str, Tensor]:
        """Make the features of one item, by the names of transformers' processors.

        Raises:
            ValueError: it is no such item, or cannot be read or processed.
        """

    def read(self, item: object, *, hears: bool, check_rows: Callable[[int], None]) -> object:
        """Open an item that comes with another one, as a video's file does with its sound.

        By default there is none such, and it stays as it is.

        Args:
            item: as the user gave it.
            hears: whether the model takes a video with its sound.
            check_rows: raises if the model cannot take so many rows.

        Raises:
            ValueError: it cannot be read, or is beyond a limit.
        """
        return item

"""An encoder's input that is longer than what the encoder takes at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.requests.encoder_input import EncoderInput

__all__ = ["InputWindows"]


@dataclass(frozen=True, slots=True)
class InputWindows:
    """Features of the whole input, cut into windows where its reader wants one to begin.

    Attributes:
        features: ``(rows, frames)``.
        window: frames that the encoder takes.
        make: from ``(rows, window)`` to an input.
    """

    features: Tensor
    window: int
    make: Callable[[Tensor], EncoderInput]

    @property
    def num_frames(self) -> int:
        """Of the whole input."""
        return int(self.features.shape[-1])

    def at(self, begin: int) -> EncoderInput:
        """The window that begins at a frame, filled up with zeros where the input ends in it."""
        part = self.features[:, begin : begin + self.window]
        filled = torch.nn.functional.pad(part, (0, self.window - part.shape[-1]))
        return self.make(filled.contiguous())

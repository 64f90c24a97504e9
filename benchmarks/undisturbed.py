"""Reference outputs of requests without faults, and comparison with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from omni import OmniOutput
from stages import StageOutput


class Undisturbed:
    """Reference outputs of prompts that ran without faults.

    Token ids, texts, finish reasons, and shapes and lengths of tensors and audio must be equal;
    their values only nearly, since a retried request has other requests in its batches and cache
    entries, and floating point sums depend on the order.

    Args:
        outputs: reference outputs by prompt.
        allowed: maximum difference of values; 0 for equal bits.

    Attributes:
        largest: maximum difference seen so far.
    """

    def __init__(self, outputs: Mapping[str, OmniOutput], allowed: float) -> None:
        self._outputs, self._allowed = outputs, allowed
        self.largest = 0.0

    def difference(self, prompt: str, found: Sequence[OmniOutput]) -> str | None:
        """Return where a request's outputs, in order, differ from the reference; None if equal."""
        for name, theirs in self._outputs[prompt].stages.items():
            ours = found[-1].stages[name]
            for told in ("token_ids", "text", "finish_reason"):
                if getattr(ours, told) != getattr(theirs, told):
                    return f"{name}.{told}"
            pieces = [output.stages[name] for output in found if name in output.stages]
            if ours.text is not None and "".join(piece.delta for piece in pieces) != ours.text:
                return f"{name}: pieces of text"
            if ours.tensors.keys() != theirs.tensors.keys():
                return f"{name}: names of tensors"
            if (ours.audio is None) != (theirs.audio is None):
                return f"{name}: whether there is sound"
            for what, one, other in _numbers(ours, theirs, pieces):
                if not self._is_same(one, other):
                    return f"{name}: {what}"
        return None

    def _is_same(self, one: Tensor, other: Tensor) -> bool:
        if one.shape != other.shape:
            return False
        if one.numel() == 0:
            return True
        apart = (one - other).abs().max().item()
        self.largest = max(self.largest, apart)
        return bool(apart <= self._allowed)  # False for NaN


def _numbers(
    ours: StageOutput, theirs: StageOutput, pieces: Sequence[StageOutput]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name and both values of everything that must be equal up to rounding."""
    for name, rows in theirs.tensors.items():
        yield name, ours.tensors[name], rows
    if theirs.audio is not None:
        assert ours.audio is not None
        heard = [each.audio_delta.samples for each in pieces if each.audio_delta is not None]
        yield "sound", ours.audio.samples, theirs.audio.samples
        yield "pieces of sound", torch.cat(heard), ours.audio.samples

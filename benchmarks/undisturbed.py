"""What requests say undisturbed, and whether others say the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from omni import OmniOutput
from stages import StageOutput


class Undisturbed:
    """Outputs of prompts that nothing has happened to.

    Token ids, texts, finish reasons, and shapes and lengths of tensors and sound have to be equal;
    their numbers nearly, since a run again meets others in its batches and its cache, and floating
    point sums come out differently in another order.

    Args:
        outputs: by prompt.
        allowed: by how much a number may differ; 0 for equal bits.

    Attributes:
        largest: by how much one has differed.
    """

    def __init__(self, outputs: Mapping[str, OmniOutput], allowed: float) -> None:
        self._outputs, self._allowed = outputs, allowed
        self.largest = 0.0

    def difference(self, prompt: str, found: Sequence[OmniOutput]) -> str | None:
        """Where the outputs of a request, in order, differ from what it should say; None if not."""
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
        return bool(apart <= self._allowed)  # not if it is no number


def _numbers(
    ours: StageOutput, theirs: StageOutput, pieces: Sequence[StageOutput]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What has to be the same but for rounding, each with its name."""
    for name, rows in theirs.tensors.items():
        yield name, ours.tensors[name], rows
    if theirs.audio is not None:
        assert ours.audio is not None
        heard = [each.audio_delta.samples for each in pieces if each.audio_delta is not None]
        yield "sound", ours.audio.samples, theirs.audio.samples
        yield "pieces of sound", torch.cat(heard), ours.audio.samples

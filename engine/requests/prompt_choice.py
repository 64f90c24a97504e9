"""A prompt whose next token the model itself chooses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.interface.sampling_params import SamplingParams
from engine.sampling.sampling_state import SamplingState

__all__ = ["PromptChoice"]


class PromptChoice:
    """How a prompt goes on: by the likeliest of some tokens, and then by given ones.

    So a speech model finds out which language is spoken. The prompt begins with what is known, the
    first step chooses, and what follows then is prompt as well::

        <|startoftranscript|> | ?                | <|transcribe|> <|notimestamps|> | generated ...
         known                  of ``candidates``  ``then``
        |<- the first step --------------------->|<- the next goes on from here

    Args:
        candidates: ids to choose from.
        then: ids behind the chosen one.

    Attributes:
        sampling: makes the sampler take the likeliest, whatever the request's own parameters say.
    """

    def __init__(self, candidates: Sequence[int], then: Sequence[int]) -> None:
        self.candidates = tuple(candidates)
        self.then = tuple(then)
        self.sampling = SamplingState(
            SamplingParams(temperature=0.0),
            (),
            0,
            (),
            max(self.candidates) + 1,
            logits_processor=self,
        )

    @property
    def num_tokens(self) -> int:
        """How much longer the prompt gets."""
        return 1 + len(self.then)

    def apply(self, logits: Tensor, generated: Sequence[int]) -> None:
        """Mask all but the candidates; see ``LogitsProcessor``."""
        kept = torch.tensor(self.candidates, device=logits.device)
        values = logits[kept]
        logits.fill_(-torch.inf)
        logits[kept] = values

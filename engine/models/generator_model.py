"""What the generator engine asks of a model that makes sound of codec tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.interface.generator_config import GenerationParams

__all__ = ["CodeChunk", "GeneratorModel"]


@dataclass(frozen=True, slots=True, eq=False)
class CodeChunk:
    """Codes of one utterance that one pass turns into sound.

    Attributes:
        codes: ``(n,)`` int64, or ``(n, num_codebooks)`` where there are several codebooks.
        start: place of the first in its utterance.
        speaker: whose voice, by name; None of a model without voices.
        state: what the pass before handed on for this utterance; of the first, and of models that
            keep nothing, what :meth:`GeneratorModel.new_state` gives.
    """

    codes: Tensor
    start: int
    speaker: str | None
    state: Any


class GeneratorModel(nn.Module):
    """Turns codes into sound, either way:

    ::

        windowed    codes around a chunk are computed with it and thrown away; nothing is kept
        causal      sound depends on earlier codes alone; a state goes from chunk to chunk

    Attributes:
        device: where it runs.
        sampling_rate: samples per second.
        samples_per_code: of sound, for each place (a row of codes, where codebooks are several).
        max_codes: places of the longest utterance.
        num_codes: codes are below this.
        num_codebooks: codes at one place.
        codes_per_block: places after which a windowed model's arithmetic begins anew; windows
            are made of such blocks.
        speakers: names of the voices; none if there is nothing to choose.
    """

    device: torch.device
    sampling_rate: int
    samples_per_code: int
    max_codes: int
    num_codes: int
    num_codebooks: int = 1
    codes_per_block: int = 1
    speakers: tuple[str, ...] = ()

    def choose_speaker(self, name: str | None) -> str | None:
        """The voice of that name; None takes the model's first choice.

        Raises:
            ValueError: there is no such voice.
        """
        if name is not None:
            raise ValueError(f"unknown speaker {name!r}; this model has no voices to choose from")
        return None

    def new_state(self) -> Any:
        """What a causal model knows before an utterance begins; None of one that keeps nothing.

        States are never changed: a pass that failed is run again from the same one.
        """
        return None

    @abstractmethod
    def generate(
        self, chunks: Sequence[CodeChunk], params: GenerationParams
    ) -> tuple[Tensor, Sequence[Any]]:
        """Make sound of chunks of one length, each of another utterance.

        Args:
            chunks: at least one.
            params: how.

        Returns:
            ``(len(chunks), n * samples_per_code)`` float32 on the CPU, in -1 to 1, and for each
            chunk the state with which its utterance goes on.
        """

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(p.numel() * p.element_size() for p in self.parameters())

"""What the engine asks of a model whose decoder also attends to an encoder's output."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.models.base import CausalModel
from engine.models.encoder_module import EncoderModule
from engine.requests.encoder_input import EncoderInput, EncoderView

__all__ = ["EncoderDecoderModel"]


class EncoderDecoderModel(CausalModel):
    """A decoder over packed tokens that attends to what its encoder made of another input.

    Attributes:
        encoder: makes the rows.
    """

    encoder: EncoderModule

    @property
    def max_encoder_len(self) -> int:
        """Most rows of one input."""
        return self.encoder.max_len

    def encoder_view(self, entry: EncoderInput | None, decoder_ids: Sequence[int]) -> EncoderView:
        """Check a request, and say what its decoder sees of its encoder's output.

        Args:
            entry: the encoder's input, if there is one.
            decoder_ids: the decoder's prompt.

        Raises:
            ValueError: the input cannot be encoded, or does not go with the prompt.
        """
        if entry is None:
            raise ValueError("an encoder-decoder model needs an input for its encoder")
        self.encoder.check_input(entry)
        return EncoderView(0, entry.num_tokens, entry.num_tokens)

    def encode(self, inputs: Sequence[EncoderInput]) -> Tensor:
        """Run the encoder; see :meth:`CausalModel.encode`."""
        for entry in inputs:
            self.encoder.check_input(entry)
        rows: Tensor = self.encoder(inputs)
        return rows

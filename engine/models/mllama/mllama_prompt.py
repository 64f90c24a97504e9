"""What Mllama's decoder begins with: text, in which a token stands where the image is."""

from __future__ import annotations

from engine.inputs.decoder_prompt import DecoderPromptRule
from engine.interface.prompts import DecoderPrompt, EncoderPrompt

__all__ = ["MllamaPromptRule"]


class MllamaPromptRule(DecoderPromptRule):
    """Decoder prompts as they are: the model began as a text model, and has no start token.

    The image is seen from its token on. Alone, an image has ``<|image|> <BOS>`` for a prompt.
    """

    _names_of_start = ("bos_token_id",)

    def prompt_ids(self, encoder: EncoderPrompt | None, decoder: DecoderPrompt | None) -> list[int]:
        """Ids that the decoder goes on from; see :class:`DecoderPromptRule`."""
        if decoder is None:
            return [self._config.image_token_id, self.start_token_id]
        return self._given(decoder)

"""Text and token ids for text encoders."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

from engine.inputs.encoder_inputs import EncoderInputMaker, EncoderSide
from engine.inputs.prompt_tokens import check_token_ids, tokenize
from engine.interface.prompts import ChatPrompt, EncoderPrompt, TextPrompt, TokensPrompt
from engine.requests.encoder_input import EncoderInput
from prefix_cache import whole_input_hash

__all__ = ["TextEncoderInputs"]


class TextEncoderInputs(EncoderInputMaker):
    """Turns text or token ids into inputs of a text encoder.

    Args:
        encoder: of the model.
        tokenizer: of the checkpoint, or None.
    """

    takes = "text or token ids"

    def __init__(self, encoder: EncoderSide, tokenizer: PreTrainedTokenizerBase | None) -> None:
        super().__init__(encoder)
        self._tokenizer = tokenizer

    def make(self, prompt: EncoderPrompt | None, *, cache_salt: str | None) -> EncoderInput:
        """Tokenize text, with the special tokens that the checkpoint's tokenizer adds.

        Raises:
            ValueError: the prompt is of another kind, empty, too long, or has unknown ids.
        """
        text: str | None = None
        if isinstance(prompt, TokensPrompt):
            given: Iterable[int] = prompt.prompt_token_ids
        elif isinstance(prompt, str | TextPrompt | ChatPrompt):
            given = tokenize(prompt, self._tokenizer)
            if not isinstance(prompt, ChatPrompt):
                text = prompt if isinstance(prompt, str) else prompt.prompt
        else:
            raise self._refuse(prompt)
        token_ids = check_token_ids(given, self._encoder.input_vocab_size)
        self._check_length(len(token_ids))
        return EncoderInput(
            num_tokens=len(token_ids),
            content_hash=whole_input_hash(token_ids, salt=cache_salt),
            token_ids=tuple(token_ids),
            text=text,
        )

    def _check_length(self, num_tokens: int) -> None:
        longest = self._encoder.max_encoder_len
        if num_tokens > longest:
            raise ValueError(
                f"the encoder prompt has {num_tokens} tokens, but the model's encoder takes "
                f"{longest} at most; shorten it"
            )

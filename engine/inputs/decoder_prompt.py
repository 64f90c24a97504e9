"""What the decoder of an encoder-decoder model begins with."""

from __future__ import annotations

from collections.abc import Collection
from typing import SupportsIndex

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from engine.inputs.encoder_inputs import describe_prompt
from engine.inputs.fit_check import InputLimits
from engine.inputs.input_windows import InputWindows
from engine.inputs.prompt_tokens import WrittenPrompt, check_token_ids, first_ids, tokenize
from engine.interface.prompts import DecoderPrompt, EncoderPrompt, TokensPrompt
from engine.requests.continuation import Continuation
from engine.requests.prompt_choice import PromptChoice
from engine.sampling.sampling_state import LogitsProcessor

__all__ = ["DecoderPromptRule"]


class DecoderPromptRule:
    """How transformers' ``generate`` begins the decoder's sequence, for most models.

    ::

        no decoder prompt     <DEC> <BOS>
        51 178                <DEC> 51 178
        <DEC> 51 178          as it is

    ``generate`` forces ``<BOS>`` as the first generated token where the checkpoint asks for it;
    here it is a part of the prompt, and costs no step.

    Args:
        config: of the checkpoint, as are the next two.
        generation_config: names tokens that the config may lack.
        tokenizer: None where there is none.
        limits: what a prompt has to stay within.

    Attributes:
        start_token_id: ``<DEC>``.

    Raises:
        ValueError: the checkpoint names no start token.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        generation_config: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase | None,
        limits: InputLimits,
    ) -> None:
        self._config = config
        self._generation_config = generation_config
        self._tokenizer = tokenizer
        self._limits = limits
        self.start_token_id = self._first_named(*self._names_of_start)

    _names_of_start: tuple[str, ...] = ("decoder_start_token_id", "bos_token_id")

    def prompt_ids(self, encoder: EncoderPrompt | None, decoder: DecoderPrompt | None) -> list[int]:
        """Ids that the decoder goes on from.

        Args:
            encoder: what the encoder gets.
            decoder: what the user gave for the decoder; None means the default prompt.

        Raises:
            ValueError: the prompt is of a kind that this decoder does not take, empty, or has
                unknown ids.
        """
        if decoder is None:
            return self._default(encoder)
        ids = self._given(decoder)
        return ids if ids[0] in self._first_ids else [self.start_token_id, *ids]

    def prompt_choice(
        self, encoder: EncoderPrompt | None, decoder: DecoderPrompt | None
    ) -> PromptChoice | None:
        """How the prompt goes on behind :meth:`prompt_ids` by the model's own choice, or None."""
        return None

    def logits_processor(self, encoder: EncoderPrompt | None) -> LogitsProcessor | None:
        """What the kind of model asks of the output of a request, or None."""
        return None

    def across(
        self, windows: InputWindows, encoder: EncoderPrompt | None, decoder: DecoderPrompt | None
    ) -> tuple[EncoderPrompt | None, Continuation]:
        """How to go through an encoder's input that is longer than its window.

        Args:
            windows: of the input.
            encoder: what it was made from.
            decoder: what the user gave for the decoder.

        Returns:
            What the prompt of every window is made for, and how a request goes on after the first.

        Raises:
            ValueError: the kind of model cannot, or not with what is asked for.
        """
        raise ValueError("this model's encoder takes one window; cut the input into shorter pieces")

    @property
    def _first_ids(self) -> tuple[int, ...]:
        """Ids before which no start token belongs."""
        return (self.start_token_id,)

    def _default(self, encoder: EncoderPrompt | None) -> list[int]:
        for name in ("forced_bos_token_id", "bos_token_id"):
            bos = self._named(name)
            if bos is not None and bos != self.start_token_id:
                return [self.start_token_id, bos]
        return [self.start_token_id]

    def _given(self, decoder: DecoderPrompt) -> list[int]:
        if isinstance(decoder, TokensPrompt):
            return self._check(first_ids(decoder.prompt_token_ids, self._limits.max_model_len))
        if isinstance(decoder, WrittenPrompt):
            return self._check(self._tokenize(decoder))
        raise ValueError(
            f"this model's decoder takes text or token ids, but the decoder prompt is "
            f"{describe_prompt(decoder)}"
        )

    def _check(self, ids: Collection[SupportsIndex]) -> list[int]:
        self._limits.check_length(len(ids))
        return check_token_ids(ids, self._limits.vocab_size)

    def _tokenize(self, decoder: WrittenPrompt) -> list[int]:
        """Ids of a text that is to go on: an end that only the tokenizer put there is dropped."""
        ids = tokenize(decoder, self._tokenizer, self._limits)
        own = tokenize(decoder, self._tokenizer, self._limits, as_it_is=True)
        end = [self._tokenizer.eos_token_id] if self._tokenizer is not None else []
        return ids[:-1] if ids[-1:] == end and own[-1:] != end else ids

    def _first_named(self, *names: str) -> int:
        for name in names:
            token_id = self._named(name)
            if token_id is not None:
                return token_id
        raise ValueError(f"the checkpoint names no token to begin with: no {' or '.join(names)}")

    def _named(self, name: str) -> int | None:
        """A token id of the generation config, or else of the model's config or its text part."""
        for source in (self._generation_config, self._config, self._config.get_text_config()):
            token_id = getattr(source, name, None)
            if isinstance(token_id, int):
                return token_id
        return None

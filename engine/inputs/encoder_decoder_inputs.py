"""Turns a prompt into what the encoder gets and what the decoder begins with."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import SupportsIndex

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from engine.inputs.encoder_inputs import (
    EncoderInputMaker,
    EncoderSide,
    InputWindows,
    TextEncoderInputs,
    describe_prompt,
)
from engine.inputs.prompt_processor import (
    PromptContent,
    PromptProcessor,
    PromptSources,
    refuse_items,
)
from engine.inputs.prompt_tokens import (
    InputLimits,
    WrittenPrompt,
    check_token_ids,
    first_ids,
    tokenize,
)
from engine.interface.prompts import (
    ChatPrompt,
    CodecPrompt,
    DecoderPrompt,
    EncoderPrompt,
    ExplicitEncoderDecoderPrompt,
    Prompt,
    SpeechPrompt,
    TokensPrompt,
)
from engine.requests.encoder_input import Continuation, EncoderInput, PromptChoice, encoder_spans
from engine.sampling.sampler import LogitsProcessor

__all__ = ["DecoderPromptRule", "EncoderDecoderPromptProcessor"]


class DecoderPromptRule:
    """How transformers' ``generate`` begins the decoder's sequence, for most models.

    ::

        no decoder prompt     <DEC> <BOS>
        51 178                <DEC> 51 178
        <DEC> 51 178          as it is

    ``generate`` forces ``<BOS>`` as the first generated token where the checkpoint asks for it;
    here it is a part of the prompt, and costs no step.

    Args:
        config: of the checkpoint.
        generation_config: names tokens that the config may lack.
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


class EncoderDecoderPromptProcessor(PromptProcessor):
    """Splits prompts between the encoder and the decoder of one model.

    Args:
        encoder_inputs: makes what makes the encoder's inputs, from what a checkpoint brings.
        decoder_rule: says what the decoder begins with.
        text_is_for_decoder: whether a lone text or lone ids are the decoder's prompt, and the
            encoder is left out; else they are the encoder's.

    Raises:
        ValueError: a feature extractor, an image processor or a start token is missing.
    """

    is_encoder_decoder = True

    def __init__(
        self,
        sources: PromptSources,
        *,
        encoder_inputs: Callable[[PromptSources], EncoderInputMaker] = TextEncoderInputs,
        decoder_rule: type[DecoderPromptRule] = DecoderPromptRule,
        text_is_for_decoder: bool = False,
    ) -> None:
        checkpoint, encoder = sources.checkpoint, sources.model
        config = checkpoint.config
        # As transformers does for a checkpoint without one.
        generation = checkpoint.generation_config or GenerationConfig.from_model_config(config)
        self._encoder: EncoderSide = encoder
        self._encoder_inputs = encoder_inputs(sources)
        self.modalities = (*(["text"] * text_is_for_decoder), self._encoder_inputs.modality)
        self._decoder_rule = decoder_rule(config, generation, sources.tokenizer, sources.limits)
        self.suppress_token_ids = tuple(generation.suppress_tokens or ())
        self.begin_suppress_token_ids = tuple(generation.begin_suppress_tokens or ())
        self._text_is_for_decoder = text_is_for_decoder

    def process(self, prompt: Prompt, *, cache_salt: str | None = None) -> PromptContent:
        """Make both sequences of one request; see :meth:`PromptProcessor.process`."""
        if isinstance(prompt, ChatPrompt) and not self._text_is_for_decoder:
            prompt = self._encoder_inputs.of_chat(prompt)
        refuse_items(prompt)
        encoder, decoder = self._split(prompt)
        entry: EncoderInput | None = None
        continuation: Continuation | None = None
        if encoder is not None or not self._text_is_for_decoder:
            made = self._encoder_inputs.make_windows(encoder, cache_salt=cache_salt)
            if isinstance(made, InputWindows):
                encoder, continuation = self._decoder_rule.across(made, encoder, decoder)
                entry = made.at(0)
            else:
                entry = made
        token_ids = self._decoder_rule.prompt_ids(encoder, decoder)
        return PromptContent(
            token_ids,
            () if entry is None else encoder_spans(entry),
            encoder_input=entry,
            encoder_view=self._encoder.encoder_view(entry, token_ids),
            logits_processor=self._decoder_rule.logits_processor(encoder),
            continuation=continuation,
            prompt_choice=self._decoder_rule.prompt_choice(encoder, decoder),
        )

    def _split(self, prompt: Prompt) -> tuple[EncoderPrompt | None, DecoderPrompt | None]:
        if isinstance(prompt, ExplicitEncoderDecoderPrompt):
            return prompt.encoder_prompt, prompt.decoder_prompt
        if self._text_is_for_decoder and isinstance(prompt, WrittenPrompt | TokensPrompt):
            return None, prompt
        if isinstance(prompt, SpeechPrompt | CodecPrompt):
            raise ValueError(f"an encoder-decoder model takes no {type(prompt).__name__}")
        return prompt, None

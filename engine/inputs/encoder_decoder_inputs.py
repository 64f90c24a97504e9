"""Turns a prompt into what the encoder gets and what the decoder begins with."""

from __future__ import annotations

from collections.abc import Callable

from transformers import GenerationConfig

from engine.inputs.decoder_prompt import DecoderPromptRule
from engine.inputs.encoder_inputs import EncoderInputMaker, EncoderSide, TextEncoderInputs
from engine.inputs.input_windows import InputWindows
from engine.inputs.multimodal_data import refuse_items
from engine.inputs.prompt_processor import PromptContent, PromptProcessor, PromptSources
from engine.inputs.prompt_tokens import WrittenPrompt
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
from engine.requests.content_spans import encoder_spans
from engine.requests.continuation import Continuation
from engine.requests.encoder_input import EncoderInput

__all__ = ["EncoderDecoderPromptProcessor"]


class EncoderDecoderPromptProcessor(PromptProcessor):
    """Splits prompts between the encoder and the decoder of one model.

    Args:
        sources: of an encoder-decoder model.
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
        """Make both sequences of one request; see :meth:`PromptProcessor.process`.

        Raises:
            ValueError: as there, of either prompt; or they do not go together.
        """
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

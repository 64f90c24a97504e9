"""Turns a prompt into what the encoder gets and what the decoder begins with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import GenerationConfig, PreTrainedTokenizerBase

from engine.checkpoints.checkpoint import Checkpoint
from engine.inputs.audio_encoder_inputs import AudioEncoderInputs
from engine.inputs.decoder_prompt import DecoderPromptRule, T5PromptRule
from engine.inputs.encoder_inputs import EncoderInputMaker, EncoderSide
from engine.inputs.image_encoder_inputs import ImageEncoderInputs
from engine.inputs.text_encoder_inputs import TextEncoderInputs
from engine.interface.prompts import (
    ChatPrompt,
    CodecPrompt,
    DecoderPrompt,
    EncoderPrompt,
    ExplicitEncoderDecoderPrompt,
    Prompt,
    SpeechPrompt,
    TextPrompt,
    TokensPrompt,
)
from engine.models.mllama.mllama_prompt import MllamaPromptRule
from engine.models.whisper.whisper_prompt import WhisperPromptRule
from engine.requests.encoder_input import EncoderInput, EncoderView
from engine.requests.prompt_choice import PromptChoice
from engine.sampling.sampling_state import LogitsProcessor

__all__ = ["EncoderDecoderInputProcessor", "EncoderDecoderInputs"]


@dataclass(frozen=True, slots=True)
class EncoderDecoderInputs:
    """One request's two sequences.

    Attributes:
        encoder_input: what the encoder gets; None for a model that can do without.
        encoder_view: which rows of the encoder's output the decoder's tokens see.
        prompt_token_ids: what the decoder begins with.
        logits_processor: what its output has to keep to, or None.
        prompt_choice: how the decoder's prompt goes on, if the model itself chooses; else None.
    """

    encoder_input: EncoderInput | None
    encoder_view: EncoderView
    prompt_token_ids: list[int]
    logits_processor: LogitsProcessor | None = None
    prompt_choice: PromptChoice | None = None


class EncoderDecoderInputProcessor:
    """Splits prompts between the encoder and the decoder of one model.

    Args:
        encoder: the model, or whatever knows its encoder.
        encoder_inputs: makes the encoder's inputs.
        decoder_rule: makes the decoder's.
        suppress_token_ids: never to be generated, says the checkpoint.
        begin_suppress_token_ids: nor at the first place.
        text_is_for_decoder: whether a lone text or lone ids are the decoder's prompt, and the
            encoder is left out; else they are the encoder's.
    """

    def __init__(
        self,
        encoder: EncoderSide,
        encoder_inputs: EncoderInputMaker,
        decoder_rule: DecoderPromptRule,
        *,
        suppress_token_ids: tuple[int, ...] = (),
        begin_suppress_token_ids: tuple[int, ...] = (),
        text_is_for_decoder: bool = False,
    ) -> None:
        self._encoder = encoder
        self._encoder_inputs = encoder_inputs
        self._decoder_rule = decoder_rule
        self.suppress_token_ids = suppress_token_ids
        self.begin_suppress_token_ids = begin_suppress_token_ids
        self._text_is_for_decoder = text_is_for_decoder

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        tokenizer: PreTrainedTokenizerBase | None,
        encoder: EncoderSide,
    ) -> EncoderDecoderInputProcessor:
        """Load what the checkpoint brings for its prompts.

        Args:
            checkpoint: an encoder-decoder model's.
            tokenizer: of the checkpoint, or None.
            encoder: the model, or whatever knows its encoder.

        Raises:
            ValueError: a feature extractor, an image processor or a start token is missing.
        """
        config = checkpoint.config
        # As transformers does for a checkpoint without one.
        generation = checkpoint.generation_config or GenerationConfig.from_model_config(config)
        family = _FAMILIES.get(config.model_type, _Family(_text_inputs, DecoderPromptRule))
        return cls(
            encoder,
            family.encoder_inputs(checkpoint, tokenizer, encoder),
            family.decoder_rule(config, generation, tokenizer, encoder.input_vocab_size),
            suppress_token_ids=tuple(generation.suppress_tokens or ()),
            begin_suppress_token_ids=tuple(generation.begin_suppress_tokens or ()),
            text_is_for_decoder=family.text_is_for_decoder,
        )

    def process(self, prompt: Prompt, *, cache_salt: str | None = None) -> EncoderDecoderInputs:
        """Make both sequences of one request.

        Raises:
            ValueError: either prompt is of a kind that the model does not take, empty, too long
                for the encoder, or cannot be read; or they do not go together.
        """
        encoder, decoder = self._split(prompt)
        encoder_input = None
        if encoder is not None or not self._text_is_for_decoder:
            encoder_input = self._encoder_inputs.make(encoder, cache_salt=cache_salt)
        token_ids = self._decoder_rule.prompt_ids(encoder, decoder)
        view = self._encoder.encoder_view(encoder_input, token_ids)
        processor = self._decoder_rule.logits_processor(encoder)
        choice = self._decoder_rule.prompt_choice(encoder, decoder)
        return EncoderDecoderInputs(encoder_input, view, token_ids, processor, choice)

    def _split(self, prompt: Prompt) -> tuple[EncoderPrompt | None, DecoderPrompt | None]:
        if isinstance(prompt, ExplicitEncoderDecoderPrompt):
            return prompt.encoder_prompt, prompt.decoder_prompt
        if self._text_is_for_decoder and isinstance(
            prompt, str | TextPrompt | ChatPrompt | TokensPrompt
        ):
            return None, prompt
        if isinstance(prompt, SpeechPrompt | CodecPrompt):
            raise ValueError(f"an encoder-decoder model takes no {type(prompt).__name__}")
        return prompt, None


def _text_inputs(
    checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase | None, encoder: EncoderSide
) -> EncoderInputMaker:
    return TextEncoderInputs(encoder, tokenizer)


def _speech_inputs(
    checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase | None, encoder: EncoderSide
) -> EncoderInputMaker:
    return AudioEncoderInputs.from_checkpoint(checkpoint.path, encoder)


def _tiled_image_inputs(
    checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase | None, encoder: EncoderSide
) -> EncoderInputMaker:
    names = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
    return ImageEncoderInputs.from_checkpoint(checkpoint.path, encoder, names)


@dataclass(frozen=True, slots=True)
class _Family:
    """What differs between families of models."""

    encoder_inputs: Callable[
        [Checkpoint, PreTrainedTokenizerBase | None, EncoderSide], EncoderInputMaker
    ]
    decoder_rule: type[DecoderPromptRule]
    text_is_for_decoder: bool = False


_FAMILIES = {
    "mllama": _Family(_tiled_image_inputs, MllamaPromptRule, text_is_for_decoder=True),
    "t5": _Family(_text_inputs, T5PromptRule),
    "whisper": _Family(_speech_inputs, WhisperPromptRule),
}
"""By the config's ``model_type``; all others read text and begin as ``generate`` has them do."""

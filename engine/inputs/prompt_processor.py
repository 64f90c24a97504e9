"""The interface of prompt processors, which resolve a prompt into a model's input."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from engine.checkpoints.checkpoint import Checkpoint
from engine.inputs.prompt_tokens import InputLimits, resolve_prompt
from engine.interface.config import MediaLimits
from engine.interface.prompts import ExplicitEncoderDecoderPrompt, Prompt, TranscriptionOptions
from engine.requests.encoder_input import (
    EncoderInput,
    EncoderView,
    Modality,
    MultiModalInput,
    PromptChoice,
    PromptPositions,
    StreamedRows,
    embeds_spans,
)
from engine.requests.request import Continuation, Request
from engine.sampling.sampler import LogitsProcessor
from prefix_cache import ContentSpan

MODALITIES: tuple[Modality, ...] = get_args(Modality)
"""All modalities."""


def items_of(
    prompt: Prompt, modalities: Sequence[Modality] = MODALITIES
) -> Mapping[Modality, Sequence[object]]:
    """Return the items in a prompt's ``multi_modal_data``; each modality has a list, maybe empty.

    Raises:
        ValueError: ``multi_modal_data`` is not a mapping, or has another modality, or not a list of
            items.
    """
    # Only text, chat messages and token ids have this attribute.
    data: object = getattr(prompt, "multi_modal_data", {})
    if not isinstance(data, Mapping):
        raise ValueError(
            "multi_modal_data must be a mapping of modalities to lists of items, such as "
            f"{{'audio': ['question.wav']}}, got {type(data).__name__}"
        )
    unknown = sorted(set(data) - set(modalities))
    if unknown:
        raise ValueError(
            f"multi_modal_data has {', '.join(map(repr, unknown))}; "
            f"what can be shown is {', '.join(map(repr, modalities))}"
        )
    items: dict[Modality, Sequence[object]] = {}
    for modality in modalities:
        given = data.get(modality, ())
        if isinstance(given, str | bytes | Path | Tensor) or not isinstance(given, Sequence):
            raise ValueError(
                f"multi_modal_data[{modality!r}] must be a list of items, each {modality} one, "
                f"got {type(given).__name__}"
            )
        items[modality] = given
    return items


def refuse_items(prompt: Prompt) -> None:
    """Raise ``ValueError`` if a prompt, or either side of one, has multi-modal items."""
    if isinstance(prompt, ExplicitEncoderDecoderPrompt):
        refuse_items(prompt.encoder_prompt)
        if prompt.decoder_prompt is not None:
            refuse_items(prompt.decoder_prompt)
        return
    shown = [f"{len(items)} {name} items" for name, items in items_of(prompt).items() if items]
    if shown:
        raise ValueError(
            f"the prompt shows {' and '.join(shown)} in multi_modal_data, but this model takes "
            "none there; a model whose encoder reads images or speech takes one as its encoder "
            "prompt, beside a decoder prompt"
        )


@dataclass(frozen=True, slots=True)
class PromptContent:
    """A resolved prompt.

    Attributes:
        spans: content that block hashes cover in addition to the token ids.
        embeds: ``(num_tokens, hidden_size)`` instead of the token ids; or None.
        encoder_input: input of the encoder, if the model has one.
        encoder_view: rows of the encoder's output that the tokens see.
        logits_processor: rule that the output has to follow, or None.
        continuation: next sequence when this one has ended, or None.
        prompt_choice: continuation of the prompt that the model itself chooses, or None.
        multimodal_inputs: images, sounds and videos, in the order of their positions.
        positions: token positions on several axes; None if positions are indices.
        streamed_rows: rows in addition to the tokens, for models that need them.
    """

    token_ids: list[int]
    spans: tuple[ContentSpan, ...] = ()
    embeds: Tensor | None = None
    encoder_input: EncoderInput | None = None
    encoder_view: EncoderView | None = None
    logits_processor: LogitsProcessor | None = None
    continuation: Continuation | None = None
    prompt_choice: PromptChoice | None = None
    multimodal_inputs: tuple[MultiModalInput, ...] = ()
    positions: PromptPositions | None = None
    streamed_rows: StreamedRows | None = None


@dataclass(frozen=True, slots=True)
class PromptSources:
    """Constructor arguments of a prompt processor.

    Attributes:
        model: the loaded model, which a processor queries for its properties.
        encoder_cache_bytes: maximum bytes for rows of images, sounds and videos; None: no limit.
        media_limits: limits of images, sounds and videos.
        vad: True if a speech encoder receives only speech.
        transcription: options of a speech model for recordings.
    """

    checkpoint: Checkpoint
    model: Any
    tokenizer: PreTrainedTokenizerBase | None
    limits: InputLimits
    encoder_cache_bytes: int | None = None
    media_limits: MediaLimits = field(default_factory=MediaLimits)
    vad: bool = False
    transcription: TranscriptionOptions = field(default_factory=TranscriptionOptions)


class PromptProcessor(ABC):
    """Converts the prompts of one kind of model into the content of requests.

    Attributes:
        suppress_token_ids: ids that are never generated.
        begin_suppress_token_ids: ids that are not generated at the first position.
        stop_token_ids: ids that end the output; None uses those of the checkpoint's configs.
        takes_chunks: True if prompts may arrive in chunks, by :meth:`extend`.
        modalities: modalities of prompts: text, image, audio, video.
        speakers: voices that prompts choose from; None if the model does not speak.
    """

    suppress_token_ids: tuple[int, ...] = ()
    begin_suppress_token_ids: tuple[int, ...] = ()
    stop_token_ids: Collection[int] | None = None
    modalities: tuple[str, ...] = ()
    speakers: tuple[str, ...] | None = None
    takes_chunks: bool = False
    is_encoder_decoder: bool = False

    def as_message(self, prompt: Prompt) -> Prompt:
        """Convert a prompt to the form that the model reads; ``ValueError`` if there is none."""
        return prompt

    @abstractmethod
    def process(self, prompt: Prompt, *, cache_salt: str | None = None) -> PromptContent:
        """Resolve a prompt of :meth:`as_message`, or the first chunk of one.

        Args:
            cache_salt: part of the hashes of all but tokens: these are shared only within one salt.

        Raises:
            ValueError: the prompt is of a kind that the model does not accept, empty, too long, or
                unreadable.
        """

    def extend(self, request: Request, prompt: Prompt) -> None:
        """Add the next chunk to a request's prompt, which its other completions share.

        Raises:
            ValueError: the model takes no chunks, or not this one; nothing has changed.
        """
        raise ValueError("this model takes its prompts whole, not in chunks")


class PlainPromptProcessor(PromptProcessor):
    """Resolves prompts into token ids, or embeddings instead of them."""

    def __init__(self, sources: PromptSources) -> None:
        self._tokenizer = sources.tokenizer
        self.modalities = () if sources.tokenizer is None else ("text",)
        self._limits = sources.limits

    def process(self, prompt: Prompt, *, cache_salt: str | None = None) -> PromptContent:
        """See :meth:`PromptProcessor.process`."""
        refuse_items(prompt)
        return self._resolve(prompt)

    def _resolve(self, prompt: Prompt) -> PromptContent:
        token_ids, embeds = resolve_prompt(prompt, self._tokenizer, self._limits)
        spans = () if embeds is None else embeds_spans(embeds, self._limits.block_size)
        return PromptContent(token_ids, spans, embeds=embeds)

"""The contract between a request and what a kind of model reads: a prompt in, its content out."""

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
"""All of them."""


def items_of(
    prompt: Prompt, modalities: Sequence[Modality] = MODALITIES
) -> Mapping[Modality, Sequence[object]]:
    """The items in a prompt's ``multi_modal_data``; every modality has its list, if an empty one.

    Raises:
        ValueError: ``multi_modal_data`` is no mapping, or shows something else, or not a list of
            items.
    """
    # Text, chat messages and token ids have some; no other form of prompt does.
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
    """Raise ``ValueError`` if a prompt, or either side of one, shows anything."""
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
    """A prompt, resolved.

    Attributes:
        spans: what block hashes cover beside the token ids.
        embeds: ``(num_tokens, hidden_size)`` in the place of the token ids; or None.
        encoder_input: what the encoder gets, if the model has one.
        encoder_view: which rows of the encoder's output the tokens see.
        logits_processor: what the output has to keep to, or None.
        continuation: what follows when the sequence has ended, or None.
        prompt_choice: how the prompt goes on, if the model itself chooses; else None.
        multimodal_inputs: images and the like, in the order of their places.
        positions: where tokens lie on several axes; None where places are indices.
        streamed_rows: rows beside the tokens, in models that want them.
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
    """What a prompt processor is made from.

    Attributes:
        model: the loaded model, of which a processor asks what it needs to know.
        encoder_cache_bytes: what the rows of images and the like may take; None: no limit.
        media_limits: how much of a picture, a sound or a video is read.
        vad: whether an encoder of speech hears speech alone.
        transcription: how a speech model goes about recordings.
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
    """Turns the prompts of one kind of model into what requests hold.

    Attributes:
        suppress_token_ids: never to be generated.
        begin_suppress_token_ids: nor at the first place.
        stop_token_ids: what ends the output; None leaves it to the checkpoint's configs.
        takes_chunks: whether prompts may come in chunks, by :meth:`extend`.
        modalities: what prompts are made of: text, image, audio, video.
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
        """A prompt in the form in which the model reads it; ``ValueError`` if there is none."""
        return prompt

    @abstractmethod
    def process(self, prompt: Prompt, *, cache_salt: str | None = None) -> PromptContent:
        """Resolve a prompt of :meth:`as_message`, or the first chunk of one.

        Args:
            cache_salt: part of the hashes of what is no token: it is shared only within one salt.

        Raises:
            ValueError: the prompt is of a kind that the model does not take, empty, too long, or
                cannot be read.
        """

    def extend(self, request: Request, prompt: Prompt) -> None:
        """Take the next chunk of a request's prompt, which its other completions share.

        Raises:
            ValueError: the model takes prompts whole, or not this chunk; nothing has changed.
        """
        raise ValueError("this model takes its prompts whole, not in chunks")


class PlainPromptProcessor(PromptProcessor):
    """Makes token ids, or embeddings in their place."""

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

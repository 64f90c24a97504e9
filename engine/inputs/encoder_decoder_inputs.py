"""Converts a prompt into the encoder's input and the beginning of the decoder's sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig

from engine.inputs.prompt_processor import (
    PromptContent,
    PromptProcessor,
    PromptSources,
    items_of,
    refuse_items,
)
from engine.inputs.prompt_tokens import (
    WrittenPrompt,
    check_token_ids,
    first_ids,
    tokenize,
)
from engine.interface.ownership import turn_of
from engine.interface.prompts import (
    AudioPrompt,
    ChatPrompt,
    CodecPrompt,
    DecoderPrompt,
    EmbedsPrompt,
    EncoderPrompt,
    ExplicitEncoderDecoderPrompt,
    ImagePrompt,
    Prompt,
    SpeechPrompt,
    TextChunk,
    TextPrompt,
    TokensPrompt,
)
from engine.media.image_file import image_features, load_image_processor
from engine.media.sound_file import SampleReader, load_extractor
from engine.requests.encoder_input import (
    EncoderInput,
    PromptChoice,
    encoder_spans,
)
from engine.requests.request import Continuation
from engine.sampling.sampler import LogitsProcessor
from prefix_cache import BlockHash, ContentSpan, content_hash, whole_input_hash


@dataclass(frozen=True, slots=True)
class InputWindows:
    """Features of the whole input, cut into windows at positions that the reader chooses.

    Attributes:
        features: ``(rows, frames)``.
        make: converts ``(rows, window)`` to an input.
        end: frames of the input, without the padding to a window.
        spans: spans of frames with speech; None: all frames.
    """

    features: Tensor
    window: int
    make: Callable[[Tensor], EncoderInput]
    end: int
    spans: Sequence[tuple[int, int]] | None = None

    @property
    def num_frames(self) -> int:
        """Frames of the whole input."""
        return int(self.features.shape[-1])

    @property
    def is_silent(self) -> bool:
        """True if there is no speech."""
        return self.spans is not None and not self.spans

    def next_begin(self, frame: int) -> int:
        """Return the begin of the next window from a frame on; ``num_frames`` if there is none."""
        if self.spans is None:
            return frame
        ahead = (max(frame, begin) for begin, end in self.spans if end > frame)
        return next(ahead, self.num_frames)

    def at(self, begin: int) -> EncoderInput:
        """Return the window that begins at a frame, padded with zeros after the input's end."""
        part = self.features[:, begin : begin + self.window]
        filled = torch.nn.functional.pad(part, (0, self.window - part.shape[-1]))
        return self.make(filled.contiguous())


class EncoderInputMaker(ABC):
    """Converts prompts of one kind into encoder inputs."""

    modality: str
    takes: str

    def __init__(self, sources: PromptSources) -> None:
        # Maximum rows of the encoder's output for one request.
        self._max_len: int = sources.model.max_encoder_len

    @abstractmethod
    def make(
        self, prompt: EncoderPrompt | None, *, cache_salt: str | None
    ) -> EncoderInput | InputWindows:
        """Make the input of one request, or its windows if it is longer than one.

        Args:
            prompt: the user's encoder prompt; None is refused like any other kind.
            cache_salt: part of the hash, as requests share cached blocks only within one salt.

        Raises:
            ValueError: the prompt is of another kind, empty, too long, or unreadable.
        """

    def of_chat(self, chat: ChatPrompt) -> EncoderPrompt:
        """Return the encoder's prompt from a chat, by default its text; else ``ValueError``."""
        return chat

    def _refuse(self, prompt: object) -> ValueError:
        return ValueError(
            f"this model's encoder takes {self.takes}, but the encoder prompt is "
            f"{describe_prompt(prompt)}"
        )

    def _of_features(self, features: Mapping[str, Tensor], cache_salt: str | None) -> EncoderInput:
        """Build the input of a sound or image, padded to a window whose rows are all attended."""
        digest = features_hash(features, self._max_len, cache_salt)
        return EncoderInput(self._max_len, digest, features=features)


class TextEncoderInputs(EncoderInputMaker):
    """Converts text, which needs a tokenizer, or token ids into inputs of a text encoder."""

    modality = "text"
    takes = "text or token ids"

    def __init__(self, sources: PromptSources) -> None:
        super().__init__(sources)
        self._vocab_size: int = sources.model.input_vocab_size
        self._tokenizer = sources.tokenizer
        self._limits = sources.limits

    def make(self, prompt: EncoderPrompt | None, *, cache_salt: str | None) -> EncoderInput:
        """Tokenize text, with the special tokens that the checkpoint's tokenizer adds."""
        text: str | None = None
        longest = self._max_len
        if isinstance(prompt, TokensPrompt):
            given = first_ids(prompt.prompt_token_ids, longest)
        elif isinstance(prompt, WrittenPrompt):
            given = tokenize(prompt, self._tokenizer, self._limits)
            if not isinstance(prompt, ChatPrompt):
                text = prompt if isinstance(prompt, str) else prompt.prompt
        else:
            raise self._refuse(prompt)
        if len(given) > longest:
            raise ValueError(
                f"the encoder prompt has {len(given)} tokens, but the model's encoder takes "
                f"{longest} at most; shorten it"
            )
        token_ids = check_token_ids(given, self._vocab_size)
        return EncoderInput(
            num_tokens=len(token_ids),
            content_hash=whole_input_hash(token_ids, salt=cache_salt),
            token_ids=tuple(token_ids),
            text=text,
        )


class AudioEncoderInputs(EncoderInputMaker):
    """Converts speech into the log-mel features of a fixed window.

    ::

        file ─► mono samples ─► the extractor's rate ─► silence up to the window ─► log-mel

    For a recording longer than the window, features of the whole are computed and cut into windows.
    The loudest frame of the whole determines the level of silence, as in transformers.
    """

    modality = "audio"
    takes = "audio (a file or samples)"

    def __init__(self, sources: PromptSources) -> None:
        super().__init__(sources)
        self._vad = sources.vad
        checkpoint = sources.checkpoint
        trust = checkpoint.trust_remote_code
        self._extractor = load_extractor(checkpoint.path, trust_remote_code=trust)
        rate = int(self._extractor.sampling_rate)
        self._reader = SampleReader(rate, None, sources.media_limits)
        self._window = int(self._extractor.n_samples)

    def of_chat(self, chat: ChatPrompt) -> AudioPrompt:
        """Return the only sound of a chat without text."""
        counts = {modality: len(items) for modality, items in items_of(chat).items() if items}
        words = ["text"] * _has_words(chat) + ["tools"] * bool(chat.tools)
        if words or counts != {"audio": 1}:
            got = [*(f"{count} {modality}" for modality, count in counts.items()), *words]
            raise ValueError(
                f"this model's encoder takes {self.takes}, of a chat one sound without words: one "
                "message with that sound alone, no system message and no earlier turns; got "
                f"{' and '.join(got) or 'nothing'}"
            )
        (sound,) = chat.multi_modal_data["audio"]
        return sound if isinstance(sound, AudioPrompt) else AudioPrompt(sound)  # type: ignore[arg-type]

    def make(
        self, prompt: EncoderPrompt | None, *, cache_salt: str | None
    ) -> EncoderInput | InputWindows:
        """Read, resample and extract features, for a sound of any length."""
        if not isinstance(prompt, AudioPrompt):
            raise self._refuse(prompt)
        samples = self._reader.read(prompt.audio, prompt.sampling_rate)
        options, spans = prompt.transcription, None
        # Text without timestamps can be streamed, unless other options are requested.
        requested = options.given.values() if options is not None else ()
        needs_windows = prompt.timestamps or any(value is not False for value in requested)
        if self._vad if prompt.vad is None else prompt.vad:
            from engine.media.voice_detector import spoken_spans  # needs an optional package

            spans = spoken_spans(samples, self._reader.rate)
            speech = np.zeros_like(samples)
            for begin, end in spans:
                speech[begin:end] = samples[begin:end]
            samples = speech
        hop, fits = int(self._extractor.hop_length), len(samples) <= self._window
        if fits and not needs_windows and (spans is None or spans):
            return self._of_features({"input_features": self._extract(samples)}, cache_salt)
        padding = {} if fits else {"truncation": False, "padding": "longest"}
        whole = self._extract(samples, **padding)
        window = self._window // hop
        windows = InputWindows(
            whole,
            window,
            lambda part: self._of_features({"input_features": part}, cache_salt),
            min(-(-len(samples) // hop), whole.shape[-1]),
            spans and [(begin // hop, -(-end // hop)) for begin, end in spans],
        )
        # A few samples more than a window add no frame.
        is_whole = windows.num_frames <= window and not windows.is_silent and not needs_windows
        return windows.at(0) if is_whole else windows

    def _extract(self, samples: NDArray[np.float32], **options: Any) -> Tensor:
        with turn_of(self._extractor):
            made = self._extractor(
                samples, sampling_rate=self._reader.rate, return_tensors="pt", **options
            )
        return made["input_features"][0]


class ImageEncoderInputs(EncoderInputMaker):
    """Converts one image into the tiles and their arrangement for a vision encoder.

    Args:
        feature_names: the checkpoint's processor's tensors that the encoder takes.
    """

    modality = "image"
    takes = "an image"

    def __init__(self, sources: PromptSources, *, feature_names: tuple[str, ...]) -> None:
        super().__init__(sources)
        self._limits, checkpoint = sources.media_limits, sources.checkpoint
        trust = checkpoint.trust_remote_code
        self._processor = load_image_processor(checkpoint.path, trust_remote_code=trust)
        self._feature_names = feature_names

    def make(self, prompt: EncoderPrompt | None, *, cache_salt: str | None) -> EncoderInput:
        """Open the image and cut it into tiles."""
        if not isinstance(prompt, ImagePrompt):
            raise self._refuse(prompt)
        features = image_features(self._processor, prompt.image, self._limits)
        return self._of_features(
            {name: features[name][0] for name in self._feature_names}, cache_salt
        )


def _has_words(chat: ChatPrompt) -> bool:
    messages: Sequence[object] = chat.messages  # a user's, of any type
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else message
        parts = content if isinstance(content, list | tuple) else [content]
        texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
        if any(str(text).strip() for text in texts if text is not None):
            return True
    return False


def features_hash(
    features: Mapping[str, Tensor], num_tokens: int, cache_salt: str | None
) -> BlockHash:
    """Hash features as content of placeholder tokens, one per row of the encoder's output."""
    spans = [
        ContentSpan(kind=name, offset=0, length=num_tokens, content_hash=content_hash(tensor))
        for name, tensor in features.items()
    ]
    return whole_input_hash([0] * num_tokens, spans=spans, salt=cache_salt)


_PROMPT_KINDS = {
    **dict.fromkeys((str, TextPrompt, ChatPrompt), "text"),
    TokensPrompt: "token ids",
    EmbedsPrompt: "embeddings",
    AudioPrompt: "audio",
    ImagePrompt: "an image",
    ExplicitEncoderDecoderPrompt: "itself a pair of prompts",
    type(None): "missing",
}


def describe_prompt(prompt: object) -> str:
    """Name the kind of a prompt in a word or two."""
    return _PROMPT_KINDS.get(type(prompt), f"a {type(prompt).__name__}")


@dataclass(frozen=True, slots=True)
class _OnlyEnd:
    """Allows only the end token."""

    end_token_id: int

    def apply(self, logits: Tensor, generated: Sequence[int]) -> None:
        """See :class:`LogitsProcessor`."""
        logits.fill_(-torch.inf)
        logits[self.end_token_id] = 0


class DecoderPromptRule:
    """Beginning of the decoder's sequence, as by transformers' ``generate`` for most models.

    ::

        no decoder prompt     <DEC> <BOS>
        51 178                <DEC> 51 178
        <DEC> 51 178          unchanged

    ``generate`` forces ``<BOS>`` as the first generated token if the checkpoint requires it; here
    it is part of the prompt, and costs no step.

    Args:
        generation_config: names tokens that the config may lack.

    Attributes:
        start_token_id: ``<DEC>``.

    Raises:
        ValueError: the checkpoint names no start token.
    """

    def __init__(self, sources: PromptSources, generation_config: GenerationConfig) -> None:
        self._config = sources.checkpoint.config
        self._generation_config = generation_config
        self._tokenizer = sources.tokenizer
        self._limits = sources.limits
        self._options = sources.transcription
        self.start_token_id = self._first_named(*self._names_of_start)

    _names_of_start: tuple[str, ...] = ("decoder_start_token_id", "bos_token_id")

    def prompt_ids(self, encoder: EncoderPrompt | None, decoder: DecoderPrompt | None) -> list[int]:
        """Return the ids that the decoder continues.

        Args:
            decoder: the user's decoder prompt; None means the default prompt.

        Raises:
            ValueError: the prompt is of a kind that this decoder does not accept, empty, or has
                unknown ids.
        """
        if decoder is None:
            return self._default(encoder)
        ids = self._given(decoder)
        return ids if ids[0] in self._first_ids else [self.start_token_id, *ids]

    def prompt_choice(
        self, encoder: EncoderPrompt | None, decoder: DecoderPrompt | None
    ) -> PromptChoice | None:
        """Return the continuation of :meth:`prompt_ids` that the model chooses itself, or None."""
        return None

    def logits_processor(self, encoder: EncoderPrompt | None) -> LogitsProcessor | None:
        """Return the rule of this kind of model for a request's output, or None."""
        return None

    def resolved(
        self, encoder: EncoderPrompt | None, decoder: DecoderPrompt | None
    ) -> EncoderPrompt | None:
        """Return the encoder's prompt with the defaults of the engine and the checkpoint."""
        return encoder

    def end_at_once(self) -> LogitsProcessor:
        """Return a processor that makes the output empty."""
        return _OnlyEnd(self._first_named("eos_token_id", "bos_token_id"))

    def across(
        self, windows: InputWindows, encoder: EncoderPrompt | None, decoder: DecoderPrompt | None
    ) -> tuple[EncoderPrompt | None, Continuation]:
        """Return the encoder prompt for all windows, and their continuation; or ``ValueError``."""
        raise ValueError("this model's encoder takes one window; cut the input into shorter pieces")

    @property
    def _first_ids(self) -> tuple[int, ...]:
        """Ids that need no start token before them."""
        return (self.start_token_id,)

    def _default(self, encoder: EncoderPrompt | None) -> list[int]:
        for name in ("forced_bos_token_id", "bos_token_id"):
            bos = self._named(name)
            if bos is not None and bos != self.start_token_id:
                return [self.start_token_id, bos]
        return [self.start_token_id]

    def _given(self, decoder: DecoderPrompt) -> list[int]:
        if isinstance(decoder, TokensPrompt):
            ids = first_ids(decoder.prompt_token_ids, self._limits.max_model_len)
        elif isinstance(decoder, WrittenPrompt):
            ids = self._tokenize(decoder)
        else:
            raise ValueError(
                f"this model's decoder takes text or token ids, but the decoder prompt is "
                f"{describe_prompt(decoder)}"
            )
        self._limits.check_length(len(ids))
        return check_token_ids(ids, self._limits.vocab_size)

    def _tokenize(self, decoder: WrittenPrompt) -> list[int]:
        """Tokenize a text to be continued, without an end token that only the tokenizer added."""
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
        """Return a token id of the generation config, else of the model's config or text part."""
        for source in (self._generation_config, self._config, self._config.get_text_config()):
            token_id = getattr(source, name, None)
            if isinstance(token_id, int):
                return token_id
        return None


class EncoderDecoderPromptProcessor(PromptProcessor):
    """Splits prompts between the encoder and the decoder of one model.

    Args:
        encoder_inputs: factory of the maker of encoder inputs.
        text_is_for_decoder: True if a lone text or lone ids are the decoder's prompt, without any
            encoder input; else they are the encoder's.

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
        # As in transformers for a checkpoint without one.
        generation = sources.checkpoint.generation_config
        generation = generation or GenerationConfig.from_model_config(sources.checkpoint.config)
        self._model = sources.model
        self._encoder_inputs = encoder_inputs(sources)
        self.modalities = (*(["text"] * text_is_for_decoder), self._encoder_inputs.modality)
        self._decoder_rule = decoder_rule(sources, generation)
        self.suppress_token_ids = tuple(generation.suppress_tokens or ())
        self.begin_suppress_token_ids = tuple(generation.begin_suppress_tokens or ())
        self._text_is_for_decoder = text_is_for_decoder

    def process(self, prompt: Prompt, *, cache_salt: str | None = None) -> PromptContent:
        """Make both sequences of one request; see :meth:`PromptProcessor.process`."""
        if isinstance(prompt, ChatPrompt) and not self._text_is_for_decoder:
            prompt = self._encoder_inputs.of_chat(prompt)
        refuse_items(prompt)
        encoder, decoder = self._split(prompt)
        rule = self._decoder_rule
        encoder = rule.resolved(encoder, decoder)
        entry: EncoderInput | None = None
        continuation: Continuation | None = None
        is_silent = False
        if encoder is not None or not self._text_is_for_decoder:
            made = self._encoder_inputs.make(encoder, cache_salt=cache_salt)
            if isinstance(made, EncoderInput):
                entry = made
            elif made.is_silent:
                entry, is_silent = made.at(0), True
            else:
                encoder, continuation = rule.across(made, encoder, decoder)
                entry = made.at(made.next_begin(0))
        token_ids = rule.prompt_ids(encoder, decoder)
        choice = rule.prompt_choice(encoder, decoder)
        if continuation is not None:
            token_ids, choice = continuation.opening(token_ids, choice)
        return PromptContent(
            token_ids,
            () if entry is None else encoder_spans(entry),
            encoder_input=entry,
            encoder_view=self._model.encoder_view(entry, token_ids),
            logits_processor=rule.end_at_once() if is_silent else rule.logits_processor(encoder),
            continuation=continuation,
            prompt_choice=choice,
        )

    def _split(self, prompt: Prompt) -> tuple[EncoderPrompt | None, DecoderPrompt | None]:
        if isinstance(prompt, ExplicitEncoderDecoderPrompt):
            return prompt.encoder_prompt, prompt.decoder_prompt
        if self._text_is_for_decoder and isinstance(prompt, WrittenPrompt | TokensPrompt):
            return None, prompt
        if isinstance(prompt, SpeechPrompt | CodecPrompt | TextChunk):
            raise ValueError(f"an encoder-decoder model takes no {type(prompt).__name__}")
        return prompt, None

"""Forms of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from engine.interface.arguments import check_argument

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image
    from torch import Tensor


MultiModalData: TypeAlias = (
    "Mapping[str, Sequence[str | Path | bytes | Image | Tensor | NDArray[Any] | AudioPrompt | "
    "VideoFeatures | VideoPrompt]]"
)
"""Items of a prompt in addition to its text, by modality: one per placeholder, in their order.

- ``"image"``: files of PNG, JPEG, WebP, GIF, BMP or TIFF, images of Pillow, or pixels,
  ``(height, width, 3)`` uint8.
- ``"audio"``: files of WAV, FLAC, OGG or MP3, mono samples at the rate of the checkpoint's feature
  extractor, or an :class:`AudioPrompt` of either, for samples of another rate.
- ``"video"``: files of mp4 or webm, a :class:`VideoPrompt` of one, or :class:`VideoFeatures`.

A file can be given by its content instead, as bytes or as a data URL
(``data:audio/wav;base64,UklGR...``).

A placeholder is one token of the checkpoint (``<image>``, ``<|AUDIO|>``). It is replaced by one
token per row of the item; for a video with sound, by one per row of both, and two around them.
"""


@dataclass(frozen=True, slots=True, eq=False)
class VideoFeatures:
    """A video in the output format of the checkpoint's video processor.

    The tensors must not be changed until the request has finished.

    Attributes:
        pixel_values_videos: ``(patches, values of a patch)`` floating point.
        video_grid_thw: number of grids of patches, their height and width; may be a tensor.
        second_per_grid: seconds from one grid to the next.
        audio: the video's own sound, from its beginning, in any form of ``"audio"`` in
            :data:`MultiModalData`; the model receives both in sync. None for no sound.
        timestamps: time of each grid in seconds, for models that read times as text; None:
            ``second_per_grid`` apart from the beginning on.
    """

    pixel_values_videos: Tensor
    video_grid_thw: Sequence[int] | Tensor
    second_per_grid: float
    audio: str | Path | bytes | Tensor | NDArray[Any] | AudioPrompt | None = None
    timestamps: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class VideoPrompt:
    """A video file, whose frames are sampled and scaled as by the checkpoint's processor.

    Attributes:
        video: a file of mp4 or webm, or its content (as bytes, or as a data URL).
        use_audio: true if the model also receives its sound, in sync with the frames, provided that
            the video has sound and the model supports it.
    """

    video: str | Path | bytes
    use_audio: bool = True


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text for the checkpoint's tokenizer, which adds special tokens.

    Attributes:
        prompt: the text.
        add_special_tokens: true to add special tokens such as BOS; false for a rendered chat.
        multi_modal_data: see :data:`MultiModalData`.
    """

    prompt: str
    add_special_tokens: bool = True
    multi_modal_data: MultiModalData = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Chat messages that the checkpoint's chat template turns into text.

    A speech model treats a single sound without text as an :class:`AudioPrompt`.

    Attributes:
        messages: each with ``role`` and ``content``, oldest first. The content is text, or a list
            of parts, such as ``{"type": "image"}`` and ``{"type": "text", "text": ...}``, if the
            template supports them. An assistant's message may have ``tool_calls`` instead; a
            message of the role ``tool`` answers a call.
        multi_modal_data: see :data:`MultiModalData`.
        tools: functions that the model may call, in OpenAI's shape:
            ``{"type": "function", "function": {"name": ..., "parameters": {...}}}``.
        chat_template_kwargs: further variables for the template, such as ``enable_thinking``.
            With ``add_generation_prompt: False`` the text does not begin the assistant's next
            message; with ``continue_final_message: True`` it ends within the last message, which
            the model continues.
    """

    messages: tuple[Mapping[str, Any], ...]
    multi_modal_data: MultiModalData = field(default_factory=dict, hash=False)
    tools: tuple[Mapping[str, Any], ...] = ()
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class TokensPrompt:
    """Token ids, used unchanged except for the placeholders of multi-modal items.

    Attributes:
        prompt_token_ids: the ids, with one placeholder per item.
        multi_modal_data: see :data:`MultiModalData`.
    """

    prompt_token_ids: tuple[int, ...]
    multi_modal_data: MultiModalData = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, eq=False)
class EmbedsPrompt:
    """Embeddings instead of token ids.

    Attributes:
        prompt_embeds: ``(num_tokens, hidden_size)`` floating point. It must not be changed until
            the request has finished; the prefix cache identifies it by its content.
    """

    prompt_embeds: Tensor


AudioTask: TypeAlias = Literal["transcribe", "translate"]
"""Task of a speech model: transcribe speech, or translate it into English."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionOptions:
    """Transcription options of a speech model, with transformers' names.

    None uses the engine's setting, or the checkpoint's generation config, or no such option.

    Attributes:
        temperature: temperatures to try: the first for every window; a window with a poor text is
            sampled again at the next one. None: only that of the sampling parameters.
        compression_ratio_threshold: a text is poor if zlib shrinks its tokens by a larger factor.
        logprob_threshold: a text is poor if its tokens' mean log-probability is below this.
        no_speech_threshold: a window is silent, and gives no text, if its no-speech probability
            exceeds this and its text is below ``logprob_threshold``.
        condition_on_prev_tokens: true if a window sees the text before it, unless that was sampled
            at a temperature of 0.5 or more.
        prompt: text before that of the first window, such as the spelling of names; without
            ``condition_on_prev_tokens`` before every window's. Only its end is used if it is
            longer than half of the model's maximum.
        return_token_timestamps: true to return the times of tokens and words, by the model's
            cross-attention, in the output's ``windows``.

    Raises:
        ValueError: a value is invalid.
    """

    temperature: tuple[float, ...] | None = None
    compression_ratio_threshold: float | None = None
    logprob_threshold: float | None = None
    no_speech_threshold: float | None = None
    condition_on_prev_tokens: bool | None = None
    prompt: str | None = None
    return_token_timestamps: bool | None = None

    def __post_init__(self) -> None:
        temperatures = self.temperature
        if temperatures is not None and (not temperatures or not all(t >= 0 for t in temperatures)):
            raise ValueError(
                f"temperature must be one number of at least 0 or several, got {temperatures!r}"
            )

    @property
    def given(self) -> dict[str, Any]:
        """The options that are not None."""
        found = ((each.name, getattr(self, each.name)) for each in fields(self))
        return {name: value for name, value in found if value is not None}

    def with_defaults(self, defaults: Mapping[str, Any]) -> TranscriptionOptions:
        """Return a copy with these values for the options that are None."""
        return replace(self, **{**defaults, **self.given})


@dataclass(frozen=True, slots=True, eq=False)
class AudioPrompt:
    """Speech for the encoder of an encoder-decoder model, or a sound in a multi-modal prompt.

    By itself, for a decoder with audio input, it is a user's chat message with nothing else.

    Language, task and timestamps form the decoder's prompt; None leaves them to the checkpoint's
    generation config. If that names no language, the model detects it. They cannot be combined
    with an explicit decoder prompt, nor used in :data:`MultiModalData`.

    A recording that is longer than the model's window is transcribed window by window, each from
    where the text of the one before ended. This requires timestamps, which count from the
    beginning of their window; the end of a window's text is not a token of the output.

    Attributes:
        audio: a file of WAV, FLAC, OGG or MP3, its content (as bytes, or as a data URL), or mono
            samples ``(num_samples,)``, floating point in -1 to 1.
        sampling_rate: samples per second; None: the file's own, or the feature extractor's.
        language: spoken language, as a code or a name: ``"fr"``, ``"french"``; for a decoder with
            audio input a hint without effect, like the task ``transcribe``.
        task: see :data:`AudioTask`.
        timestamps: true to intersperse the text with timestamp tokens.
        vad: true to keep only speech, found by a voice detector: all else becomes silence, and a
            recording without speech gives no text. None: the engine's setting of that name.
        transcription: options of a speech model; None: the engine's setting of that name.

    Raises:
        ValueError: ``language``, ``vad`` or ``transcription`` is of another type.
    """

    audio: str | Path | bytes | Tensor | NDArray[Any]
    sampling_rate: int | None = None
    language: str | None = None
    task: AudioTask | None = None
    timestamps: bool | None = None
    vad: bool | None = None
    transcription: TranscriptionOptions | None = None

    def __post_init__(self) -> None:
        options = TranscriptionOptions
        check_argument("language", self.language, str | None, "a str or None")
        check_argument("vad", self.vad, bool | None, "a bool or None")
        check_argument("transcription", self.transcription, options | None, options.__name__)


@dataclass(frozen=True, slots=True, eq=False)
class ImagePrompt:
    """An image for the encoder of an encoder-decoder model.

    For a decoder with image input, it is a user's chat message with nothing else.

    Attributes:
        image: a file of PNG, JPEG, WebP, GIF, BMP or TIFF, its content (as bytes, or as a data
            URL), an image of Pillow, or pixels, ``(height, width, 3)`` uint8.
    """

    image: str | Path | bytes | Image | Tensor | NDArray[Any]


DecoderPrompt: TypeAlias = str | TextPrompt | ChatPrompt | TokensPrompt | EmbedsPrompt
"""Prompt of a decoder. A plain string means :class:`TextPrompt`."""

EncoderPrompt: TypeAlias = DecoderPrompt | AudioPrompt | ImagePrompt
"""Prompt of an encoder-decoder's encoder; the supported forms depend on the model."""


@dataclass(frozen=True, slots=True)
class ExplicitEncoderDecoderPrompt:
    """Both prompts of an encoder-decoder model.

    A prompt of any other form is the encoder's, and the decoder gets its default prompt.

    Attributes:
        encoder_prompt: the encoder's input.
        decoder_prompt: the beginning of the decoder's sequence; the decoder's start token is
            prepended unless present. None means the default prompt.
    """

    encoder_prompt: EncoderPrompt
    decoder_prompt: DecoderPrompt | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SpeechPrompt:
    """Another model's prompt and reply for a model to speak, one row per token.

    A row is the sum of the token's embedding (0 for a placeholder) and its last hidden state. The
    rows may arrive in chunks: the first has all rows of the prompt and the available ones of the
    reply, later chunks continue the reply::

        tokens    | prompt ................ | reply .................... | last |
        rows      |<----- prompt_rows ----->|<- reply_rows ->|<- more -->|       the last token has
                                              first chunk      later              none: it never ran

    Attributes:
        prompt_rows: ``(num_prompt_tokens, width)`` floating point; no rows in later chunks.
        reply_rows: ``(n, width)``, the reply's next rows; may be empty.
        prompt_keys: ``(num_prompt_tokens, 6)`` int64, the ``row_keys`` of the stage that computed
            the rows: the cache uses those that are not 0 instead of the rows; None: the rows.
        positions: ``(axes, num_prompt_tokens)`` int64 positions of its tokens; None: the indices.
        speaker: name of the voice; None uses the checkpoint's first choice.
        is_last: true if the reply ends here.
        prompt_ids: the prompt's tokens, for models that distinguish its turns.
    """

    prompt_rows: Tensor
    reply_rows: Tensor
    positions: Tensor | None = None
    speaker: str | None = None
    is_last: bool = True
    prompt_ids: tuple[int, ...] = ()
    prompt_keys: Tensor | None = None


Codes: TypeAlias = tuple[int, ...] | tuple[tuple[int, ...], ...]
"""One code per position of an utterance, or one per codebook at each position."""


@dataclass(frozen=True, slots=True)
class CodecPrompt:
    """Codec tokens (all or the next chunk) for a generator, such as a vocoder, to make a waveform.

    Attributes:
        codes: the codes, without the token that ended them.
        speaker: name of the voice; None uses the checkpoint's first choice.
        is_last: true if the codes end here.
        is_cut_off: true if a length limit cut the codes off.
    """

    codes: Codes
    speaker: str | None = None
    is_last: bool = True
    is_cut_off: bool = False


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Text for a stage that starts before the text is complete, such as a voice.

    Attributes:
        text: all text so far; the next chunk's text begins with it.
        is_last: true if the text is complete.
        speaker: name of the voice that the user requested; None leaves it to the stage.
    """

    text: str
    is_last: bool = True
    speaker: str | None = None


Prompt: TypeAlias = (
    EncoderPrompt | ExplicitEncoderDecoderPrompt | SpeechPrompt | CodecPrompt | TextChunk
)
"""Any form of prompt."""

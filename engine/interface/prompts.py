"""The forms in which a prompt may come."""

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
"""What a prompt shows beside its text, by modality: as many as it has placeholders, in their order.

- ``"image"``: files of PNG, JPEG, WebP, GIF, BMP or TIFF, images of Pillow, or pixels,
  ``(height, width, 3)`` uint8.
- ``"audio"``: files of WAV, FLAC, OGG or MP3, mono samples of the rate that the checkpoint's
  feature extractor wants, or an :class:`AudioPrompt` of either, for samples of another rate.
- ``"video"``: files of mp4 or webm, a :class:`VideoPrompt` of one, or :class:`VideoFeatures`.

In the place of a file may stand its content, as bytes or as a data URL
(``data:audio/wav;base64,UklGR...``).

A placeholder is one token of the checkpoint (``<image>``, ``<|AUDIO|>``); it is replaced by as many
as the item has rows, and for a video with its sound by as many as both have, and two around them.
"""


@dataclass(frozen=True, slots=True, eq=False)
class VideoFeatures:
    """A video as the checkpoint's video processor gives it.

    The tensors must not be changed until the request has finished.

    Attributes:
        pixel_values_videos: ``(patches, values of a patch)`` floating point.
        video_grid_thw: number of grids of patches, their height and width; also as a tensor.
        second_per_grid: seconds from one grid to the next.
        audio: the video's own sound, from its beginning on, in any form of ``"audio"`` in
            :data:`MultiModalData`; the model sees and hears the two in step. None for no sound.
        timestamps: seconds at which each grid is shown, for models that read times as words; None:
            ``second_per_grid`` apart from the beginning on.
    """

    pixel_values_videos: Tensor
    video_grid_thw: Sequence[int] | Tensor
    second_per_grid: float
    audio: str | Path | bytes | Tensor | NDArray[Any] | AudioPrompt | None = None
    timestamps: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class VideoPrompt:
    """A video by its file. Its frames are chosen and scaled as the checkpoint's processor says.

    Attributes:
        video: a file of mp4 or webm, or its content (as bytes, or as a data URL).
        use_audio: whether the model also hears its sound, in step with what it sees, if the video
            has any and the model can.
    """

    video: str | Path | bytes
    use_audio: bool = True


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text that the checkpoint's tokenizer turns into ids, special tokens added.

    Attributes:
        prompt: the text.
        add_special_tokens: whether the tokenizer adds its BOS and the like; not to a rendered chat.
        multi_modal_data: see :data:`MultiModalData`.
    """

    prompt: str
    add_special_tokens: bool = True
    multi_modal_data: MultiModalData = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Chat messages that the checkpoint's chat template turns into text.

    To a speech model, one sound without words is an :class:`AudioPrompt`.

    Attributes:
        messages: each with ``role`` and ``content``, oldest first. The content is text, or a list
            of parts, such as ``{"type": "image"}`` and ``{"type": "text", "text": ...}``, where
            the template knows them. An assistant's message may have ``tool_calls`` instead, and one
            of the role ``tool`` answers a call.
        multi_modal_data: see :data:`MultiModalData`.
        tools: functions that the model may ask to be called, in OpenAI's shape:
            ``{"type": "function", "function": {"name": ..., "parameters": {...}}}``.
        chat_template_kwargs: further values for the template, such as ``enable_thinking``.
    """

    messages: tuple[Mapping[str, Any], ...]
    multi_modal_data: MultiModalData = field(default_factory=dict, hash=False)
    tools: tuple[Mapping[str, Any], ...] = ()
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class TokensPrompt:
    """Token ids, used as they are, but for the placeholders of images and the like.

    Attributes:
        prompt_token_ids: the ids; one placeholder for each of them.
        multi_modal_data: see :data:`MultiModalData`.
    """

    prompt_token_ids: tuple[int, ...]
    multi_modal_data: MultiModalData = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, eq=False)
class EmbedsPrompt:
    """Embeddings in the place of token ids.

    Attributes:
        prompt_embeds: ``(num_tokens, hidden_size)`` floating point. It must not be changed until
            the request has finished; its content is what the prefix cache knows it by.
    """

    prompt_embeds: Tensor


AudioTask: TypeAlias = Literal["transcribe", "translate"]
"""What a speech model does: write what it hears, or write it in English."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionOptions:
    """How a speech model goes about a recording: transformers' options, by their names.

    What is None is as the engine has it, or the checkpoint's generation config, or left out.

    Attributes:
        temperature: the first for every window; where its text is poor, it is written again at the
            next one. None: that of the sampling parameters alone.
        compression_ratio_threshold: a text is poor whose tokens zlib makes so many times smaller.
        logprob_threshold: a text is poor whose tokens' mean log-probability is below this.
        no_speech_threshold: a window is silent whose text is below ``logprob_threshold`` where
            no speech is likelier than this: it gives no text.
        condition_on_prev_tokens: whether a window sees the text before it, unless that was written
            at a temperature of 0.5 or more.
        prompt: text before that of the first window, such as names to be spelled so; without
            ``condition_on_prev_tokens`` before every window's. Its end counts, where it is longer
            than half of what the model takes.
        return_token_timestamps: whether to say when each token and word is spoken, by the model's
            cross-attention, in the output's ``windows``.

    Raises:
        ValueError: a value cannot be.
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
        """The same, with these values for the options that are None."""
        return replace(self, **{**defaults, **self.given})


@dataclass(frozen=True, slots=True, eq=False)
class AudioPrompt:
    """Speech for the encoder of an encoder-decoder model, or sound that a prompt shows.

    By itself, to a decoder that hears, it is a user's chat message that holds nothing else.

    Language, task and timestamps say what the decoder is asked for; None leaves it to the
    checkpoint's generation config. Where that names no language, the model finds out which one is
    spoken. They cannot stand beside an explicit decoder prompt, nor in :data:`MultiModalData`.

    A recording that is longer than the model's window is transcribed window after window, each from
    where the text of the one before ended. For that timestamps are written, which count from the
    beginning of their window; the end of a window's text is no token of the output.

    Attributes:
        audio: a file of WAV, FLAC, OGG or MP3, its content (as bytes, or as a data URL), or mono
            samples ``(num_samples,)``, floating point in -1 to 1.
        sampling_rate: samples per second; None: the file's own, or the feature extractor's.
        language: spoken language, as a code or a name: ``"fr"``, ``"french"``; to a decoder that
            hears a hint that changes nothing, like the task ``transcribe``.
        task: see :data:`AudioTask`.
        timestamps: whether the text is to be interspersed with tokens of time.
        vad: whether only speech is heard, found by a voice detector: all else is silence, and a
            recording without any gives no text. None: as the engine's setting of that name.
        transcription: how a speech model goes about it; None: as the engine's setting of that name.

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

    To a decoder that sees, it is a user's chat message that holds nothing else.

    Attributes:
        image: a file of PNG, JPEG, WebP, GIF, BMP or TIFF, its content (as bytes, or as a data
            URL), an image of Pillow, or pixels, ``(height, width, 3)`` uint8.
    """

    image: str | Path | bytes | Image | Tensor | NDArray[Any]


DecoderPrompt: TypeAlias = str | TextPrompt | ChatPrompt | TokensPrompt | EmbedsPrompt
"""What any decoder takes. A plain string means :class:`TextPrompt`."""

EncoderPrompt: TypeAlias = DecoderPrompt | AudioPrompt | ImagePrompt
"""What the encoder of an encoder-decoder may take; which of these, is the model's to say."""


@dataclass(frozen=True, slots=True)
class ExplicitEncoderDecoderPrompt:
    """Both prompts of an encoder-decoder model.

    A prompt of any other form means the encoder's, and the decoder gets its default prompt.

    Attributes:
        encoder_prompt: what the encoder reads.
        decoder_prompt: what the decoder goes on from; the decoder's start token is put before it
            unless it is there. None means the default prompt.
    """

    encoder_prompt: EncoderPrompt
    decoder_prompt: DecoderPrompt | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SpeechPrompt:
    """What one model speaks: what another one read and what it replies, one row per token.

    A row is the sum of the token's embedding (0 for a placeholder) and of its last hidden state.
    The rows may come in chunks: the first has all the prompt's and as many of the reply's as
    there are, later ones go on with the reply's::

        tokens    | prompt ................ | reply .................... | last |
        rows      |<----- prompt_rows ----->|<- reply_rows ->|<- more -->|       the last token has
                                              first chunk      later              none: it never ran

    Attributes:
        prompt_rows: ``(num_prompt_tokens, width)`` floating point; no rows in later chunks.
        reply_rows: ``(n, width)``, the reply's next rows; may be none.
        prompt_keys: ``(num_prompt_tokens, 6)`` int64, the ``row_keys`` of the stage that made the
            rows: where they are not 0, the cache goes by them and not by the rows; None: by these.
        positions: ``(axes, num_prompt_tokens)`` int64 places of its tokens; None: their indices.
        speaker: whose voice; None takes the checkpoint's first choice.
        is_last: whether the reply ends here.
        prompt_ids: the prompt's tokens, for models that tell its turns apart.
    """

    prompt_rows: Tensor
    reply_rows: Tensor
    positions: Tensor | None = None
    speaker: str | None = None
    is_last: bool = True
    prompt_ids: tuple[int, ...] = ()
    prompt_keys: Tensor | None = None


Codes: TypeAlias = tuple[int, ...] | tuple[tuple[int, ...], ...]
"""One code for each place of an utterance, or, of several codebooks, one of each at each place."""


@dataclass(frozen=True, slots=True)
class CodecPrompt:
    """Codec tokens that a generator, a vocoder say, turns into a waveform, all or the next of them.

    Attributes:
        codes: without the token that ended them.
        speaker: whose voice; None takes the checkpoint's first choice.
        is_last: whether the codes end here.
        is_cut_off: whether they end where a limit of length cut them off, and not by themselves.
    """

    codes: Codes
    speaker: str | None = None
    is_last: bool = True
    is_cut_off: bool = False


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Text for a stage that begins before it is whole, such as a voice.

    Attributes:
        text: all of it that has come so far; the next chunk's begins with it.
        is_last: whether that is all.
        speaker: whose voice, as the user wants it; None leaves it to the stage.
    """

    text: str
    is_last: bool = True
    speaker: str | None = None


Prompt: TypeAlias = (
    EncoderPrompt | ExplicitEncoderDecoderPrompt | SpeechPrompt | CodecPrompt | TextChunk
)
"""Any form of prompt."""

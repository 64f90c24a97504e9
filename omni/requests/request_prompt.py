"""Makes a prompt of a line of ``requests.jsonl``, with the files that it names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from engine import (
    AudioPrompt,
    ChatPrompt,
    DecoderPrompt,
    EmbedsPrompt,
    EncoderPrompt,
    ExplicitEncoderDecoderPrompt,
    ImagePrompt,
    Prompt,
    TextPrompt,
    TokensPrompt,
    VideoPrompt,
)
from omni.requests.request_files import RequestFiles
from omni.requests.request_line import (
    AudioFile,
    ChatMessage,
    ContentPart,
    ImageUrl,
    PromptForm,
    RequestLine,
    VideoFile,
    VideoUrl,
)

__all__ = ["prompt_of"]


def prompt_of(line: RequestLine, files: RequestFiles) -> Prompt:
    """Make a line's prompt. Missing files are found now; what is in them is the engine's to judge.

    Args:
        line: as it was written.
        files: where its files are.

    Raises:
        ValueError: a file is not there, is no regular file, or holds no embeddings.
    """
    encoder = _encoder_prompt(line, files)
    if encoder is None:
        return _with_items(_form(line, files), line, files)
    if line.decoder_prompt is None:
        return ExplicitEncoderDecoderPrompt(encoder)
    return ExplicitEncoderDecoderPrompt(encoder, _side(line.decoder_prompt, files))


def _encoder_prompt(line: RequestLine, files: RequestFiles) -> EncoderPrompt | None:
    """What the line gives for an encoder by name, if anything."""
    if line.encoder_prompt is not None:
        return _side(line.encoder_prompt, files)
    if line.shows_items:
        return None
    if line.audio is not None:
        (entry,) = _audio_files(line)
        return AudioPrompt(
            files.item("audio", entry.file),
            language=entry.language,
            task=entry.task,
            timestamps=entry.timestamps,
        )
    if line.images is not None:
        (image,) = line.images
        return ImagePrompt(files.item("images", image))
    return None


def _with_items(form: DecoderPrompt, line: RequestLine, files: RequestFiles) -> DecoderPrompt:
    """Let a prompt show the line's images and sound, if it has any."""
    if not isinstance(form, TextPrompt | ChatPrompt | TokensPrompt):
        return form
    images: list[Any] = [files.item("images", image) for image in line.images or ()]
    sounds: list[Any] = [files.item("audio", entry.file) for entry in _audio_files(line)]
    videos: list[Any] = [_video(entry, files) for entry in line.videos or ()]
    messages = _messages(line)
    if messages is not None:
        videos = list(_in_order(messages, "video", videos, files))
        images = list(_in_order(messages, "image", images, files))
        sounds = list(_in_order(messages, "audio", sounds, files))
    shown = {"image": images, "audio": sounds, "video": videos}
    return replace(form, multi_modal_data={key: items for key, items in shown.items() if items})


def _in_order(
    messages: tuple[ChatMessage, ...], modality: str, listed: list[Any], files: RequestFiles
) -> Iterator[Any]:
    """Items as their parts stand: those that the parts bring, between those of the line's list."""
    rest = iter(listed)
    for part in _parts(messages):
        if part.type == modality:
            # A part that the list has nothing for is the engine's to tell: it counts both.
            item = next(rest, None)
            if item is not None:
                yield item
        elif part.image_url is not None and modality == "image":
            url = part.image_url.url if isinstance(part.image_url, ImageUrl) else part.image_url
            yield files.at_url("image_url", url)
        elif part.video_url is not None and modality == "video":
            url = part.video_url.url if isinstance(part.video_url, VideoUrl) else part.video_url
            yield files.at_url("video_url", url)
        elif part.input_audio is not None and modality == "audio":
            kind = part.input_audio.format.lower()
            yield f"data:audio/{kind};base64,{part.input_audio.data}"
    yield from rest


def _parts(messages: tuple[ChatMessage, ...]) -> Iterator[ContentPart]:
    for message in messages:
        if not isinstance(message.content, str):
            yield from message.content


def _video(entry: str | VideoFile, files: RequestFiles) -> VideoPrompt:
    entry = VideoFile(file=entry) if isinstance(entry, str) else entry
    return VideoPrompt(files.item("videos", entry.file), use_audio=entry.use_audio)


def _audio_files(line: RequestLine) -> list[AudioFile]:
    entries = line.audio or ()
    return [AudioFile(file=entry) if isinstance(entry, str) else entry for entry in entries]


def _side(side: str | PromptForm, files: RequestFiles) -> DecoderPrompt:
    return TextPrompt(side) if isinstance(side, str) else _form(side, files)


def _form(line: RequestLine | PromptForm, files: RequestFiles) -> DecoderPrompt:
    if isinstance(line.prompt, str):
        return TextPrompt(line.prompt)
    messages = _messages(line)
    if messages is not None:
        return ChatPrompt(tuple(_said(message) for message in messages))
    if line.prompt_token_ids is not None:
        return TokensPrompt(line.prompt_token_ids)
    if line.prompt_embeds is None:
        raise ValueError("the line has no prompt")
    return EmbedsPrompt(files.embeds(line.prompt_embeds))


def _messages(line: RequestLine | PromptForm) -> tuple[ChatMessage, ...] | None:
    if line.messages is not None:
        return line.messages
    return None if isinstance(line.prompt, str) else line.prompt


def _said(message: ChatMessage) -> Mapping[str, Any]:
    """A message as chat templates know it: what a part brings stands beside the messages."""
    said = message.model_dump(exclude_none=True)
    if not isinstance(message.content, str):
        said["content"] = tuple(_as_templates_know_it(part) for part in message.content)
    return said


_MODALITY_OF = {"image_url": "image", "input_audio": "audio", "video_url": "video"}
"""What templates call a part that brings its own."""


def _as_templates_know_it(part: ContentPart) -> Mapping[str, Any]:
    modality = _MODALITY_OF.get(part.type)
    return {"type": modality} if modality else part.model_dump(exclude_none=True)

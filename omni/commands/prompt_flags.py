"""Requests that are given on the command line instead of in a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from engine import EncoderPrompt, Prompt
    from omni.requests.request import OmniRequest

__all__ = ["PromptFlags"]


@dataclass(frozen=True, slots=True)
class PromptFlags:
    """The flags that make up requests: one for each prompt, chat and encoder prompt.

    Options of a command inherit them; see :func:`~omni.commands.command.command`. What each
    is for stands in its help.
    """

    prompts: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt",
            "-p",
            metavar="TEXT",
            help="A prompt, taken as it stands, placeholders included; may be given several times.",
        ),
    ] = None
    chats: Annotated[
        list[str] | None,
        typer.Option(
            "--chat",
            metavar="TEXT",
            help="What a user says, in the checkpoint's chat template, after each --image, --audio "
            "and --video; needs no placeholders. Each of several is a conversation of its own.",
        ),
    ] = None
    audio: Annotated[
        list[Path] | None,
        typer.Option(
            "--audio",
            metavar="FILE",
            help="Sound (WAV, FLAC, OGG, MP3) that every --chat begins with, after its images, or "
            "that every --prompt shows where its next placeholder is; without either, each is a "
            "request of its own. May be given several times.",
        ),
    ] = None
    language: Annotated[
        str | None,
        typer.Option(
            metavar="CODE",
            help="The language spoken in every --audio: en, fr, ...; the model finds out if it is "
            "left out.",
        ),
    ] = None
    encoder_prompts: Annotated[
        list[str] | None,
        typer.Option(
            "--encoder-prompt",
            metavar="TEXT",
            help="Text for an encoder; may be given several times.",
        ),
    ] = None
    decoder_prompt: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="What the decoder goes on from, beside every --audio or --encoder-prompt.",
        ),
    ] = None
    images: Annotated[
        list[Path] | None,
        typer.Option(
            "--image",
            metavar="FILE",
            help="An image that every --chat begins with, or that every --prompt shows where its "
            "next placeholder is; may be given several times.",
        ),
    ] = None
    videos: Annotated[
        list[Path] | None,
        typer.Option(
            "--video",
            metavar="FILE",
            help="A video (mp4, webm), with its sound where the model hears it, that every --chat "
            "begins with, after its sounds, or that every --prompt shows where its next "
            "placeholder is; may be given several times.",
        ),
    ] = None

    @property
    def given(self) -> bool:
        """Whether any of the flags was given."""
        shown = (self.images, self.audio, self.videos)
        wanted = (self.prompts, self.chats, self.encoder_prompts, *shown)
        return any(wanted) or self.decoder_prompt is not None or self.language is not None

    def digest(self) -> str:
        """SHA-256, in hexadecimal, of all that was given: the same flags are the same requests."""
        import hashlib
        import json

        given = {field.name: getattr(self, field.name) for field in fields(PromptFlags)}
        return hashlib.sha256(json.dumps(given, default=os.fspath).encode()).hexdigest()

    def check_files(self, taken: Mapping[str, Collection[str]]) -> None:
        """Check that a pipeline takes such files, that they are there, and how they begin.

        Args:
            taken: what stages that read the prompt take, by their names, where that is known.

        Raises:
            ValueError: a stage takes no such file, or one is not there, or is of another kind.
        """
        given = {"audio": self.audio, "image": self.images, "video": self.videos}
        for modality, files in given.items():
            for stage, modalities in taken.items():
                if files and modality not in modalities:
                    raise ValueError(
                        f"--{modality}: stage {stage!r} takes no {modality}; its model reads "
                        f"{', '.join(modalities) or 'what other stages make'}"
                    )
            for file in files or ():
                _check_file(modality, file)

    def requests(self) -> list[OmniRequest]:
        """The requests, with made-up ids.

        Raises:
            ValueError: there are both prompts and chats; or the decoder prompt, the language, or
                an image has nothing to stand beside.
        """
        # Only here: help and mistakes in the flags do not wait for it.
        from engine import AudioPrompt, ExplicitEncoderDecoderPrompt
        from omni.requests.request import OmniRequest

        if self.chats and self.prompts:
            raise ValueError(
                "--chat and --prompt do not go together: one is put into the chat template, the "
                "other is taken as it stands"
            )
        shows = bool(self.chats or self.prompts)
        for flag, files in (("--image", self.images), ("--video", self.videos)):
            if files and not shows:
                raise ValueError(f"{flag} stands beside --chat or --prompt only")
        if self.language is not None and (shows or not self.audio):
            raise ValueError("--language stands beside --audio only, without --chat or --prompt")
        encoder: list[EncoderPrompt] = [
            AudioPrompt(file, language=self.language)
            for file in (() if shows else self.audio or ())
        ]
        encoder += self.encoder_prompts or ()
        if self.decoder_prompt is not None and (shows or not encoder):
            raise ValueError(
                "--decoder-prompt stands beside --audio or --encoder-prompt only, without --chat "
                "or --prompt"
            )
        prompts: list[Prompt] = [*self._shown()]
        prompts += [ExplicitEncoderDecoderPrompt(each, self.decoder_prompt) for each in encoder]
        return [
            OmniRequest(prompt, request_id=f"prompt-{number}")
            for number, prompt in enumerate(prompts, start=1)
        ]

    def _shown(self) -> Iterator[Prompt]:
        """The prompts and chats, with the files that they show."""
        from engine import ChatPrompt, TextPrompt

        given = {
            "image": tuple(self.images or ()),
            "audio": tuple(self.audio or ()),
            "video": tuple(self.videos or ()),
        }
        shown = {modality: files for modality, files in given.items() if files}
        for text in self.prompts or ():
            yield TextPrompt(text, multi_modal_data=shown) if shown else text
        # The order in which flags of different names came is not known, so it is always this.
        parts = [{"type": modality} for modality, files in shown.items() for _ in files]
        for text in self.chats or ():
            # Plain text where nothing is shown: not every template knows parts.
            content = [*parts, {"type": "text", "text": text}] if parts else text
            yield ChatPrompt(({"role": "user", "content": content},), multi_modal_data=shown)


def _check_file(modality: str, file: Path) -> None:
    """Look at the beginning of a file; how long or large it is, is the engine's to judge."""
    from engine.media.media_source import MediaSource

    source = MediaSource(file, f"--{modality}:", sys.maxsize)
    if modality == "audio":
        from engine.media.sound_file import check_sound

        check_sound(source)
    elif modality == "image":
        from engine.media.image_file import check_image

        check_image(source)
    else:
        from engine.media.video_file import check_video

        check_video(source)

"""Requests that are given on the command line instead of in a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine import AudioPrompt, EncoderPrompt, ExplicitEncoderDecoderPrompt, Prompt, TextPrompt
from omni.request import OmniRequest

__all__ = ["PromptFlags"]


@dataclass(frozen=True, slots=True)
class PromptFlags:
    """The flags that make up requests: one for each prompt and encoder prompt.

    Attributes:
        prompts: texts.
        audio: WAV files, which each of the texts shows in the places of its placeholders. Without
            a text each of them is a request, for the encoder of a speech model.
        language: spoken in each of these; None leaves it to the checkpoint.
        encoder_prompts: texts for encoders.
        decoder_prompt: stands beside each of the audio files and encoder prompts.
        images: files that each of the texts shows likewise.
    """

    prompts: Sequence[str] | None = None
    audio: Sequence[Path] | None = None
    language: str | None = None
    encoder_prompts: Sequence[str] | None = None
    decoder_prompt: str | None = None
    images: Sequence[Path] | None = None

    @property
    def given(self) -> bool:
        """Whether any of the flags was given."""
        wanted = (self.prompts, self.audio, self.encoder_prompts, self.images)
        return any(wanted) or self.decoder_prompt is not None or self.language is not None

    def requests(self) -> list[OmniRequest]:
        """The requests, with made-up ids.

        Raises:
            ValueError: the decoder prompt, the language, or an image has nothing to stand beside.
        """
        if self.images and not self.prompts:
            raise ValueError("--image stands beside --prompt only")
        if self.language is not None and (self.prompts or not self.audio):
            raise ValueError("--language stands beside --audio only")
        spoken = () if self.prompts else self.audio or ()
        encoder: list[EncoderPrompt] = [
            AudioPrompt(file, language=self.language) for file in spoken
        ]
        encoder += self.encoder_prompts or ()
        if self.decoder_prompt is not None and (self.prompts or not encoder):
            raise ValueError("--decoder-prompt stands beside --audio or --encoder-prompt only")
        given = {"image": tuple(self.images or ()), "audio": tuple(self.audio or ())}
        shown = {modality: files for modality, files in given.items() if files}
        prompts: list[Prompt] = [
            TextPrompt(text, multi_modal_data=shown) if shown else text
            for text in self.prompts or ()
        ]
        prompts += [ExplicitEncoderDecoderPrompt(each, self.decoder_prompt) for each in encoder]
        return [
            OmniRequest(prompt, request_id=f"prompt-{number}")
            for number, prompt in enumerate(prompts, start=1)
        ]

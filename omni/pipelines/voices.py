"""Voices of a pipeline, and the names by which requests choose them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, ValidationInfo

from engine.interface.placed_error import suggest
from engine.interface.prompts import ChatPrompt, Prompt, TextPrompt
from engine.interface.settings import Settings

if TYPE_CHECKING:
    from stages import Stage, StageConfig

_STOCK_NAMES = (
    *("alloy", "ash", "ballad", "coral", "echo", "fable", "nova", "onyx", "sage", "shimmer"),
    *("verse", "marin", "cedar"),
)
"""OpenAI's voices, in the order of its documentation; many clients cannot send other names."""


def _located(path: Path, info: ValidationInfo) -> Path:
    """Resolve a path relative to the folder of the YAML file, if there is one."""
    beside = ((info.context or {}).get("base_dir") or Path()) / path
    if not beside.is_file() or not os.access(beside, os.R_OK):
        raise ValueError(f"there is no file {str(beside)!r} that can be read")
    return beside


class RecordedVoice(Settings):
    """A recording of a voice that a speaking model imitates.

    Attributes:
        audio: path of an audio file; in YAML, relative to the folder of the YAML file.
        text: transcript of the recording, for models that need it.
    """

    audio: Annotated[Path, AfterValidator(_located)]
    text: str | None = None


def speak_like(prompt: Prompt, audio: str | bytes, text: str | None) -> Prompt:
    """Insert a recording before the text to be spoken.

    With a transcript it becomes a separate message, like an earlier utterance; without, a part of
    the last message::

        [text, audio] [...]        [audio, ...]

    ``ValueError``: the prompt is neither text nor messages.
    """
    if isinstance(prompt, str):
        prompt = TextPrompt(prompt)
    if isinstance(prompt, TextPrompt):
        message = {"role": "user", "content": prompt.prompt}
        prompt = ChatPrompt((message,), multi_modal_data=prompt.multi_modal_data)
    if not isinstance(prompt, ChatPrompt) or not prompt.messages:
        came = type(prompt).__name__
        raise ValueError(f"a voice is heard before words: give text or messages, got {came}")
    *before, last = prompt.messages
    heard, content = {"type": "audio"}, last.get("content")
    if text is None:
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or ()
        messages = (*before, {**last, "content": [heard, *parts]})
    else:
        said = {"role": last.get("role"), "content": [{"type": "text", "text": text}, heard]}
        place = sum(each.get("role") == "system" for each in before)
        messages = (*before[:place], said, *before[place:], last)
    shown = {**prompt.multi_modal_data, "audio": [audio]}
    return replace(prompt, messages=messages, multi_modal_data=shown)


class Voices:
    """Finds voices by name.

    A voice's own name always means that voice. OpenAI's stock names are mapped to the pipeline's
    voices in order, cyclically if there are more names, unless ``voices`` overrides that::

        own      Ada    Ben
        stock    alloy  ash
                 ballad coral ...

    Args:
        speaking: the voices of each stage that has a choice of voices.
        voices: aliases, each with the name of its voice; and recorded voices by name, if no stage
            has voices.

    Attributes:
        own: voices that every speaking stage has, or recorded ones; empty if there is no choice.
        given: the argument ``voices``.
        speaks: true if the user gets audio, in whatever voice.

    Raises:
        ValueError: an alias refers to no voice, or is the name of one; a voice is recorded although
            stages have their own voices, or do not speak.
    """

    def __init__(
        self,
        stages: Mapping[str, Stage] | Mapping[str, StageConfig],
        speaking: Mapping[str, Sequence[str]],
        voices: Mapping[str, str | RecordedVoice],
    ) -> None:
        self._stages = tuple(stages)
        self._speaking = speaking
        self.given = dict(voices)
        self.speaks = bool(speaking) or any(
            "audio" in stage.final_output for stage in stages.values()
        )
        self._aliases = {name: each for name, each in voices.items() if isinstance(each, str)}
        recorded = {name: each for name, each in voices.items() if not isinstance(each, str)}
        if recorded and (speaking or not self.speaks):
            name = next(iter(recorded))
            raise ValueError(f"voices.{name}: a recording is for stages that speak without voices")
        self._recorded = {key: (one.audio.read_bytes(), one.text) for key, one in recorded.items()}
        first, *others = speaking.values() or [tuple(self._recorded)]
        self.own = tuple(voice for voice in first if all(voice in each for each in others))
        stock = _STOCK_NAMES if self.speaks else ()
        self._names: dict[str, str | None] = {
            name: self.own[place % len(self.own)] if self.own else None
            for place, name in enumerate(stock)
        }
        self._names |= {voice: voice for voice in self.own}
        for alias, voice in self._aliases.items():
            if alias in self.own:
                raise ValueError(f"voices.{alias}: is a voice itself; an alias has another name")
            if voice not in self.own:
                raise ValueError(f"voices.{alias}: {self._unknown(voice, aliases=())}")
            self._names[alias] = voice

    def find(self, name: str | None) -> str | None:
        """Return the voice of a name; None leaves the choice to the pipeline.

        Raises:
            ValueError: there is no such voice, or no stage speaks at all.
        """
        if name is None or name in self._names:
            return name and self._names[name]
        raise ValueError(f"speaker {self._unknown(name, self._aliases)}")

    def apply(self, prompt: Prompt, name: str | None) -> tuple[Prompt, str | None]:
        """Insert a recorded voice, named by :meth:`find`, before a prompt without audio.

        Returns the prompt, and the name of the speaker to request from stages.
        """
        if name not in self._recorded:
            return prompt, name
        if getattr(prompt, "multi_modal_data", {}).get("audio"):
            return prompt, None
        return speak_like(prompt, *self._recorded[name]), None

    def other_names(self, voice: str) -> list[str]:
        """Return the aliases of a voice."""
        return [name for name, each in self._names.items() if each == voice != name]

    def _unknown(self, name: str, aliases: Iterable[str]) -> str:
        if not self.speaks:
            return f"{name!r}: none of the stages {list(self._stages)} speaks"
        for stage, voices in self._speaking.items():
            if name not in voices:
                known = (*voices, *aliases)
                return f"{name!r}: stage {stage!r} has no such voice{suggest(name, known)}"
        if self._recorded:
            return f"{name!r}: no such voice was recorded{suggest(name, self._names)}"
        return f"{name!r}: the pipeline's voice has no name; leave it out, or record others"

"""The voices of a pipeline, and the names by which requests choose them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from engine.interface.placed_error import suggest

if TYPE_CHECKING:
    from stages import Stage, StageConfig

_STOCK_NAMES = (
    *("alloy", "ash", "ballad", "coral", "echo", "fable", "nova", "onyx", "sage", "shimmer"),
    *("verse", "marin", "cedar"),
)
"""OpenAI's voices, in the order of its documentation; many clients can send no other names."""


class Voices:
    """Finds the voice that a request asks for by name.

    A voice's own name always means that voice. Stock names of OpenAI stand for the pipeline's
    voices in order, beginning again where they are more, unless ``aliases`` says otherwise::

        own      Ada    Ben
        stock    alloy  ash
                 ballad coral ...

    Args:
        speaking: the voices of each stage that has any to choose from.
        aliases: other names, each with the voice that it stands for.

    Attributes:
        own: voices that every speaking stage has; none where there is nothing to choose.
        speaks: whether the user gets sound, in whatever voice.

    Raises:
        ValueError: an alias stands for no voice, or is one.
    """

    def __init__(
        self,
        stages: Mapping[str, Stage] | Mapping[str, StageConfig],
        speaking: Mapping[str, Sequence[str]],
        aliases: Mapping[str, str],
    ) -> None:
        self._stages = tuple(stages)
        self._speaking = speaking
        first, *others = speaking.values() or [()]
        self.own = tuple(voice for voice in first if all(voice in each for each in others))
        self.aliases = dict(aliases)
        self.speaks = bool(speaking) or any(
            "audio" in stage.final_output for stage in stages.values()
        )
        stock = _STOCK_NAMES if self.speaks else ()
        self._names: dict[str, str | None] = {
            name: self.own[place % len(self.own)] if self.own else None
            for place, name in enumerate(stock)
        }
        self._names |= {voice: voice for voice in self.own}
        for alias, voice in aliases.items():
            if alias in self.own:
                raise ValueError(f"voices.{alias}: is a voice itself; an alias has another name")
            if voice not in self.own:
                raise ValueError(f"voices.{alias}: {self._unknown(voice, aliases=())}")
            self._names[alias] = voice

    def find(self, name: str | None) -> str | None:
        """The voice that a name stands for; None leaves it to the pipeline.

        Raises:
            ValueError: there is no such voice, or no stage speaks at all.
        """
        if name is None or name in self._names:
            return name and self._names[name]
        raise ValueError(f"speaker {self._unknown(name, self.aliases)}")

    def other_names(self, voice: str) -> list[str]:
        """Names beside its own that stand for a voice."""
        return [name for name, each in self._names.items() if each == voice != name]

    def _unknown(self, name: str, aliases: Iterable[str]) -> str:
        if not self.speaks:
            return f"{name!r}: none of the stages {list(self._stages)} speaks"
        for stage, voices in self._speaking.items():
            if name not in voices:
                known = (*voices, *aliases)
                return f"{name!r}: stage {stage!r} has no such voice{suggest(name, known)}"
        return f"{name!r}: the pipeline's voice has no name; leave it out"

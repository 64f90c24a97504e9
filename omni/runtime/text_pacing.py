"""Keeps text back for a moment, so that whoever reads it is told of several tokens at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from math import isfinite
from typing import Generic, TypeVar

from engine.interface.arguments import check_argument
from engine.interface.deferred import with_fields
from omni.requests.request import OmniOutput
from stages import StageOutput

__all__ = ["TextPacing", "check_gap"]

_Asker = TypeVar("_Asker", bound=Hashable)


def check_gap(text_gap_s: object) -> None:
    """Check what a user gave.

    Raises:
        ValueError: it is no number of seconds.
    """
    check_argument("text_gap_s", text_gap_s, int | float, "a number of seconds")
    assert isinstance(text_gap_s, int | float)
    if not (isfinite(text_gap_s) and text_gap_s >= 0):
        raise ValueError(f"text_gap_s must be a number of seconds, 0 or more, got {text_gap_s}")


class TextPacing(Generic[_Asker]):
    """Keeps back outputs with neither sound nor an end, and puts them into what follows.

    Each output that is handed on wakes whoever reads it, which takes time from the thread that
    drives the stages. Text that is read along with speech can come a few times a second ::

        comes        a   ab  abc  abcd  sound  abcde  abcdef     (each has all the text so far)
        handed on    a       abc        sound         abcdef     with the deltas since the last one

    The first text waits for nothing, nor does an output with sound, or the last. Stages that the
    request has entered or left meanwhile are told of along with the text. Not safe to call from
    several threads at once.

    Args:
        clock: seconds, from wherever.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s: dict[_Asker, float] = {}
        self._kept: dict[_Asker, tuple[float, OmniOutput]] = {}  # with the asker's gap

    def admit(self, asker: _Asker, gap_s: float, output: OmniOutput) -> OmniOutput | None:
        """What is to be handed on now; None if that comes later.

        Args:
            asker: whom the output is for.
            gap_s: outputs of text for this one are so many seconds apart, or further.
            output: the next one.
        """
        if not gap_s:
            return output
        kept = self._kept.pop(asker, None)
        if kept is not None:
            output = _with_news_of(kept[1], output)
        now = self._clock()
        if _can_wait(output) and now < self._next_s.get(asker, now):
            self._kept[asker] = gap_s, output
            return None
        if output.finished:
            self._next_s.pop(asker, None)
        # Not before anything is said: the first text waits for nothing.
        elif any(each.text for each in output.stages.values()):
            self._next_s[asker] = now + gap_s
        return output

    def forget(self, asker: _Asker) -> None:
        """Keep nothing for somebody who has gone."""
        self._next_s.pop(asker, None)
        self._kept.pop(asker, None)

    @property
    def time_to_due(self) -> float | None:
        """Seconds until something that is kept is due, 0 if it is; None if nothing is kept."""
        if not self._kept:
            return None
        return max(0.0, min(self._next_s[each] for each in self._kept) - self._clock())

    def due(self) -> Mapping[_Asker, OmniOutput]:
        """What has been kept for long enough; it counts as handed on."""
        if not self._kept:
            return {}
        now = self._clock()
        due = {}
        for asker in [each for each in self._kept if self._next_s[each] <= now]:
            gap_s, due[asker] = self._kept.pop(asker)
            self._next_s[asker] = now + gap_s
        return due


def _can_wait(output: OmniOutput) -> bool:
    if output.finished:
        return False
    return all(stage.audio_delta is None for stage in output.stages.values())


def _with_news_of(kept: OmniOutput, output: OmniOutput) -> OmniOutput:
    """An output with what the one before had to tell, which its own deltas go on from."""
    deltas = {name: stage.delta for name, stage in kept.stages.items() if stage.delta}

    def whole(name: str, stage: StageOutput) -> StageOutput:
        before = deltas.get(name)
        return with_fields(stage, delta=before + stage.delta) if before else stage

    stages = {name: whole(name, stage) for name, stage in output.stages.items()}
    return replace(output, stages=stages, timeline=output.timeline or kept.timeline)

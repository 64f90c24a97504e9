"""A request on its way through a pipeline, and what its user has been told of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine import FinishReason, SamplingParams
from engine.interface.deferred import with_fields
from omni.requests.request import OmniOutput, OmniRequest
from omni.runtime.chunk_stream import ChunkStream
from stages import Stage, StageOutput

if TYPE_CHECKING:
    from engine import Waveform

__all__ = ["LiveRequest"]


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request on its way.

    Attributes:
        request: with its id set.
        request_id: its id.
        sampling: ``stage -> parameters`` where the request brings its own.
        speaker: whose voice is wanted.
        waiting: stages that it has yet to enter.
        streams: its chunks on every streamed edge, by the stage that takes them.
        final_stages: those whose outputs the user gets.
        preparing: stages that it is being made ready for.
        has_begun: whether it was let into any stage after it had been made ready.
        paused: stages in which it rests, since a stage behind does not keep up.
        finished: full outputs of stages that it has left and that a waiting stage still needs.
        visible: what the user has been or is about to be told, by final stage.
    """

    request: OmniRequest
    request_id: str
    sampling: Mapping[str, SamplingParams]
    speaker: str | None
    waiting: set[str]
    streams: Mapping[str, ChunkStream]
    final_stages: tuple[str, ...]
    preparing: set[str] = field(default_factory=set)
    has_begun: bool = False
    paused: set[str] = field(default_factory=set)
    finished: dict[str, StageOutput] = field(default_factory=dict)
    visible: dict[str, StageOutput] = field(default_factory=dict)

    def streams_from(self, source: str) -> list[ChunkStream]:
        """The streamed edges that leave a stage."""
        return [stream for stream in self.streams.values() if stream.source.name == source]

    def is_held_up(self, source: str) -> bool:
        """Whether a stage's next chunks should wait."""
        return any(stream.is_full for stream in self.streams_from(source))

    def was_told_of(self, stage: Stage) -> bool:
        """Whether anything that a stage made has reached the user, or a stage behind."""
        handed_on = any(each.next_token or each.next_row for each in self.streams_from(stage.name))
        return handed_on or stage.name in self.visible

    def show(self, stage: Stage, output: StageOutput) -> None:
        """Put what the user asked to get of a stage into the next output.

        Raises:
            ValueError: the stage changed its sampling rate in the middle of a sound.
        """
        before = self.visible.get(stage.name)
        if "tensors" not in stage.final_output:
            output = with_fields(output, tensors={})
        if "audio" not in stage.final_output:
            output = with_fields(output, audio=None, audio_delta=None)
        elif before is not None:
            unheard = _joined(before.audio_delta, output.audio_delta)
            output = with_fields(output, audio_delta=unheard)
        if "text" not in stage.final_output:
            output = with_fields(output, text=None, delta="", logprobs=None, completions=())
        elif before is not None:
            output = with_fields(output, delta=before.delta + output.delta)
        self.visible[stage.name] = output

    def snapshot(self, *, finished: bool = False, error: str | None = None) -> OmniOutput:
        """The request's state now; what it tells is told, and not told again."""
        visible = self.visible
        stages = {name: visible[name] for name in self.final_stages if name in visible}
        for name, output in stages.items():
            if output.delta or output.audio_delta is not None:
                self.visible[name] = with_fields(output, delta="", audio_delta=None)
        return OmniOutput(self.request_id, stages, finished, error)

    def cut_short(self, reason: FinishReason) -> None:
        """Show the stages that were not done as ended."""
        for name in self.final_stages:
            shown = self.visible.get(name, StageOutput(self.request_id, name, finished=False))
            if not shown.finished:
                self.visible[name] = with_fields(shown, finished=True, finish_reason=reason)


def _joined(first: Waveform | None, second: Waveform | None) -> Waveform | None:
    if first is None or second is None:
        return second if first is None else first
    return first.followed_by(second)

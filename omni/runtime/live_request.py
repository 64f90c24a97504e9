"""A request on its way through a pipeline, and what its user has been told of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from engine import FinishReason, SamplingParams
from engine.interface.deferred import num_items, with_fields
from omni.pipelines.pipeline import Pipeline
from omni.requests.request import OmniOutput, OmniRequest, StageTime
from omni.runtime.stream import Stream
from stages import Stage, StageOutput
from stages.worker.messages import Enter

if TYPE_CHECKING:
    from engine import Waveform

__all__ = ["LiveRequest", "next_to_lift"]


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request on its way.

    Attributes:
        request: with its id set.
        request_id: its id.
        sampling: ``stage -> parameters`` where the request brings its own.
        speaker: whose voice is wanted.
        waiting: stages that it has yet to enter.
        streams: the streamed edges, by the stage that takes the chunks.
        final_stages: those whose outputs the user gets.
        inside: stages that have it, or that make it ready, with the ticket of its stay.
        lifted: stages in which it rests and was let go on, until it has made a chunk there.
        has_moved: whether any stage has told anything of it.
        finished: full outputs of stages that it has left and that a waiting stage still needs.
        visible: what the user has been or is about to be told, by final stage.
        times: its stays, by stage.
        has_new_times: whether it has entered or left a stage since it was told of.
    """

    request: OmniRequest
    request_id: str
    sampling: Mapping[str, SamplingParams]
    speaker: str | None
    waiting: set[str]
    streams: Mapping[str, Stream]
    final_stages: tuple[str, ...]
    inside: dict[str, int] = field(default_factory=dict)
    lifted: set[str] = field(default_factory=set)
    has_moved: bool = False
    finished: dict[str, StageOutput] = field(default_factory=dict)
    visible: dict[str, StageOutput] = field(default_factory=dict)
    times: dict[str, StageTime] = field(default_factory=dict)
    has_new_times: bool = False

    @classmethod
    def of(
        cls,
        request: OmniRequest,
        request_id: str,
        pipeline: Pipeline,
        streams: Mapping[str, Stream],
    ) -> LiveRequest:
        """One that is about to enter a pipeline.

        Raises:
            ValueError: the pipeline has not the stage that it names, or no such voice.
        """
        speaker = pipeline.voices.find(request.speaker)
        return cls(
            request=request,
            request_id=request_id,
            sampling=pipeline.merge_sampling(request.sampling),
            speaker=speaker if speaker is not None else pipeline.speaker,
            waiting=set(pipeline.order),
            streams=streams,
            final_stages=pipeline.final_stages,
        )

    def enter(self, ticket: int, name: str, sources: tuple[StageOutput, ...]) -> Enter:
        """Begin a stay in a stage that it waited for, with what that makes its prompt of."""
        self.waiting.discard(name)
        self.inside[name] = ticket
        self.times[name] = StageTime(name, time.monotonic())
        self.has_new_times = True
        return Enter(
            ticket,
            self.request_id,
            self.request.prompt,
            sources,
            sampling=self.sampling.get(name),
            priority=self.request.priority,
            cache_salt=self.request.cache_salt,
            speaker=self.speaker,
        )

    def _note_end(self, name: str, output: StageOutput) -> None:
        """Take down when a stage was done with it, and what it took there."""
        metrics = output.metrics
        self.times[name] = replace(
            self.times[name],
            ended_s=time.monotonic(),
            queue_s=metrics.queue_s,
            first_token_s=metrics.first_token_s,
            num_prompt_tokens=output.num_prompt_tokens,
            num_cached_tokens=output.num_cached_tokens,
            num_tokens=num_items(output, "token_ids"),
            num_preemptions=metrics.num_preemptions,
            prefix_miss=metrics.prefix_miss,
        )
        self.has_new_times = True

    def held_up(self, order: Sequence[str]) -> list[str]:
        """The stages in which it rests, since one behind does not keep up; the last ones first.

        Args:
            order: of the pipeline's stages.
        """
        full = {stream.source for stream in self.streams.values() if stream.is_full}
        return [name for name in reversed(order) if name in full and name in self.inside]

    def show(self, stage: Stage, output: StageOutput) -> None:
        """Put what the user asked to get of a stage into the next output, and note its end.

        Raises:
            ValueError: the stage failed the request, or changed its sampling rate in the middle of
                a sound.
        """
        if output.finished:
            self._note_end(stage.name, output)
        if stage.final_output:
            self._show(stage, output)
        if output.failure is not None:
            raise ValueError(output.failure)

    def _show(self, stage: Stage, output: StageOutput) -> None:
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
        times = tuple(self.times.values()) if self.has_new_times or finished else ()
        self.has_new_times = False
        return OmniOutput(self.request_id, stages, finished, error, timeline=times)

    def cut_short(self, reason: FinishReason) -> None:
        """Show the stages that were not done as ended."""
        for name in self.final_stages:
            shown = self.visible.get(name, StageOutput(self.request_id, name, finished=False))
            if not shown.finished:
                self.visible[name] = with_fields(shown, finished=True, finish_reason=reason)


def next_to_lift(
    requests: Iterable[LiveRequest], order: Sequence[str]
) -> tuple[LiveRequest, str] | None:
    """Which request is to go on, and in which stage, where none can without it.

    The oldest that rests. But one that may go on already can lack the room that another one takes
    up which rests, too: so each of them gets its turn before the oldest gets another.

    Args:
        requests: the oldest first; those that rest and were all lifted are so no more.
        order: of the pipeline's stages.

    Returns:
        None if none rests.
    """
    resting = [(live, name) for live in requests for name in live.held_up(order)]
    if all(name in live.lifted for live, name in resting):
        for live, _ in resting:
            live.lifted.clear()
    return next(((live, name) for live, name in resting if name not in live.lifted), None)


def _joined(first: Waveform | None, second: Waveform | None) -> Waveform | None:
    if first is None or second is None:
        return second if first is None else first
    return first.followed_by(second)

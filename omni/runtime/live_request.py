"""A request on its way through a pipeline, and what its user gets of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine import FinishReason, RequestMetrics, SamplingParams
from engine.interface.outputs import OutputDelta
from omni.requests.request import OmniDelta, OmniRequest, StageTime
from stages import Stage, StageOutput
from stages.stage_output import OutputAccumulator
from stages.worker.messages import Enter, StreamedEdge


@dataclass(slots=True)
class Stream:
    """Where chunks go, and how many of them are on their way.

    Attributes:
        edge: the stage that takes them, and how.
        has_begun: whether any chunk came.
    """

    source: str
    edge: StreamedEdge
    outstanding: int = 0
    has_begun: bool = False
    is_open: bool = True

    @property
    def is_full(self) -> bool:
        """Whether the source lets the request rest, until the consumer has taken a chunk."""
        return self.is_open and self.outstanding >= self.edge.max_pending


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request on its way.

    Attributes:
        request: with its id set.
        sampling: ``stage -> parameters`` where the request brings its own.
        waiting: stages that it has yet to enter.
        streams: the streamed edges, by the stage that takes the chunks.
        inside: stages that have it, or that make it ready, with its ticket there.
        lifted: stages in which it rests and was let go on, until it has made a chunk there.
        has_moved: whether any stage has emitted anything of it.
        whole: what stages have made of it whose outputs are needed whole.
        finished: full outputs of stages that it has left and that a waiting stage still needs.
        new: what its user is to get, each with its final stage.
        ended: the final stages of which the user has got all.
        num_tokens: generated, by stage.
        times: its time in each stage.
        has_new_times: whether it has entered or left a stage since its user last got anything.
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
    whole: dict[str, OutputAccumulator] = field(default_factory=dict)
    finished: dict[str, StageOutput] = field(default_factory=dict)
    new: list[tuple[str, OutputDelta]] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)
    num_tokens: dict[str, int] = field(default_factory=dict)
    sampling_rates: dict[str, int] = field(default_factory=dict)
    times: dict[str, StageTime] = field(default_factory=dict)
    has_new_times: bool = False

    def enter(self, ticket: int, name: str, sources: tuple[StageOutput, ...], **more: Any) -> Enter:
        """Begin in a stage that it waited for, with what that makes its prompt of, and more."""
        self.waiting.discard(name)
        self.inside[name] = ticket
        self.times[name] = StageTime(name, time.monotonic())
        self.has_new_times = True
        return Enter(
            ticket,
            self.request_id,
            self.request.prompt,
            sources,
            priority=self.request.priority,
            cache_salt=self.request.cache_salt,
            speaker=self.speaker,
            **more,
        )

    def held_up(self, order: Sequence[str]) -> list[str]:
        """The stages in which it rests, since one behind does not keep up; the last ones first."""
        full = {stream.source for stream in self.streams.values() if stream.is_full}
        return [name for name in reversed(order) if name in full and name in self.inside]

    def take(self, stage: Stage, delta: OutputDelta, *, is_needed_whole: bool) -> None:
        """Take in what is new in a stage.

        Raises:
            ValueError: the stage failed the request, or changed its sampling rate in the middle of
                a sound.
        """
        name = stage.name
        if is_needed_whole:
            if name not in self.whole:
                self.whole[name] = OutputAccumulator(self.request_id, name)
            self.whole[name].add(delta)
        self.num_tokens[name] = self.num_tokens.get(name, 0) + len(delta.token_ids)
        if delta.finished:
            self._note_end(name, delta)
        if stage.final_output:
            shown = visible_part(delta, stage.final_output)
            if shown.audio is not None:
                self._check_rate(name, shown.audio.sampling_rate)
            self.new.append((name, shown))
            if delta.finished:
                self.ended.add(name)
        if delta.failure is not None:
            raise ValueError(delta.failure)

    def _check_rate(self, name: str, rate: int) -> None:
        before = self.sampling_rates.setdefault(name, rate)
        if rate != before:
            raise ValueError(
                f"sound of {before} samples per second cannot be followed by sound of {rate}"
            )

    def _note_end(self, name: str, delta: OutputDelta) -> None:
        """Take down when a stage was done with it, and what it took there."""
        metrics = delta.metrics or RequestMetrics()
        self.times[name] = replace(
            self.times[name],
            ended_s=time.monotonic(),
            queue_s=metrics.queue_s,
            first_token_s=metrics.first_token_s,
            num_prompt_tokens=delta.num_prompt_tokens,
            num_cached_tokens=delta.num_cached_tokens,
            num_tokens=self.num_tokens[name],
            num_preemptions=metrics.num_preemptions,
            prefix_miss=metrics.prefix_miss,
        )
        self.has_new_times = True

    def take_delta(self, *, finished: bool = False, error: str | None = None) -> OmniDelta:
        """What its user gets now."""
        new, self.new = tuple(self.new), []
        times = tuple(self.times.values()) if self.has_new_times or finished else ()
        self.has_new_times = False
        return OmniDelta(self.request_id, new, finished, error, timeline=times)

    def cut_short(self, reason: FinishReason) -> None:
        """End the stages that were not done."""
        for name in self.final_stages:
            if name not in self.ended:
                end = OutputDelta(self.request_id, finished=True, finish_reason=reason)
                self.new.append((name, end))


def visible_part(delta: OutputDelta, kinds: Sequence[str]) -> OutputDelta:
    """A delta without what the user does not get of a stage."""
    hidden: dict[str, Any] = {}
    if "text" not in kinds and (delta.num_completions or delta.text is not None):
        hidden |= {"text": None, "logprobs": None, "num_completions": 0, "others": ()}
    if "audio" not in kinds and (delta.audio or delta.whole_audio):
        hidden |= {"audio": None, "whole_audio": None}
    if "tensors" not in kinds and delta.tensors:
        hidden["tensors"] = {}
    return replace(delta, **hidden) if hidden else delta


def next_to_lift(
    requests: Iterable[LiveRequest], order: Sequence[str]
) -> tuple[LiveRequest, str] | None:
    """Which request goes on, and in which stage, where none can without it; None if none rests.

    The oldest that rests. But one that may go on already can lack the room that another one takes
    up which rests, too: so each of them gets its turn before the oldest gets another.
    """
    resting = [(live, name) for live in requests for name in live.held_up(order)]
    if all(name in live.lifted for live, name in resting):
        for live, _ in resting:
            live.lifted.clear()
    return next(((live, name) for live, name in resting if name not in live.lifted), None)

"""Moves requests through a pipeline's stages, turn by turn, in one thread."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any, TypeAlias

from engine import FinishReason, RequestMetrics, SamplingParams
from engine.interface.outputs import OutputDelta
from engine.interface.sampling_params import RequestSeeds
from omni.pipelines.graph_rules import sources_of
from omni.pipelines.pipeline import Pipeline
from omni.requests.request import OmniDelta, OmniRequest, StageTime
from omni.runtime.trace import Trace
from stages import Stage, StageConfig, StageOutput
from stages.remote.remote_stage import RemoteStage
from stages.stage_output import OutputAccumulator
from stages.trace_events import Traced
from stages.worker.messages import (
    Abort,
    Ack,
    Chunk,
    Command,
    Credit,
    Enter,
    Event,
    Extend,
    Failed,
    Lift,
    Output,
    StreamedEdge,
)
from stages.worker.stage_link import StageLink, why_lost
from stages.worker.stage_tracer import TracedWorker
from stages.worker.stage_worker import StageWorker

# Maximum time that a turn waits for stages driven elsewhere, unless its caller waits itself.
_WAIT_TIMEOUT_S = 0.1

StageOutputListener: TypeAlias = Callable[[StageOutput], None] | None


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A running request.

    Attributes:
        request: the request, with its id set.
        sampling: ``stage -> parameters`` that the request overrides.
        waiting: stages that it has yet to enter.
        inside: stages that have it, or prepare it, with its ticket there.
        outstanding: chunks that were sent to a stage but not consumed yet.
        lifted: stages in which it was paused and resumed, until it has produced a chunk there.
        has_moved: true if any stage has emitted output of it.
        whole: accumulated outputs of stages whose whole output is needed.
        finished: full outputs of stages that it has left and that a waiting stage still needs.
        new: output to be sent to the user, with its final stage.
        num_tokens: number of generated tokens, by stage.
        times: its times in each stage.
        has_new_times: true if it has entered or left a stage since the last output to the user.
    """

    request: OmniRequest
    request_id: str
    sampling: Mapping[str, SamplingParams]
    speaker: str | None
    waiting: set[str]
    final_stages: tuple[str, ...]
    inside: dict[str, int] = field(default_factory=dict)
    outstanding: Counter[str] = field(default_factory=Counter)
    lifted: set[str] = field(default_factory=set)
    has_moved: bool = False
    whole: dict[str, OutputAccumulator] = field(default_factory=dict)
    finished: dict[str, StageOutput] = field(default_factory=dict)
    new: list[tuple[str, OutputDelta]] = field(default_factory=list)
    num_tokens: dict[str, int] = field(default_factory=dict)
    sampling_rates: dict[str, int] = field(default_factory=dict)
    times: dict[str, StageTime] = field(default_factory=dict)
    has_new_times: bool = False

    def take(self, stage: Stage, delta: OutputDelta, *, is_needed_whole: bool) -> None:
        """Add a delta of a stage; ``ValueError`` if it failed, or its audio changed its rate."""
        name = stage.name
        if is_needed_whole:
            if name not in self.whole:
                self.whole[name] = OutputAccumulator(self.request_id, name)
            self.whole[name].add(delta)
        self.num_tokens[name] = self.num_tokens.get(name, 0) + len(delta.token_ids)
        if stage.final_output:
            shown = _visible_part(delta, stage.final_output)
            if shown.audio is not None:
                rate = shown.audio.sampling_rate
                if rate != (before := self.sampling_rates.setdefault(name, rate)):
                    raise ValueError(
                        f"sound of {before} samples per second cannot be followed by sound of "
                        f"{rate}"
                    )
            self.new.append((name, shown))
        if delta.finished:
            self._note_end(name, delta)
        if delta.failure is not None:
            raise ValueError(delta.failure)

    def _note_end(self, name: str, delta: OutputDelta) -> None:
        """Record when a stage was done with it, and its counts there."""
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
        """Remove and return the new output for the user."""
        new, self.new = tuple(self.new), []
        times = tuple(self.times.values()) if self.has_new_times or finished else ()
        self.has_new_times = False
        return OmniDelta(self.request_id, new, finished, error, timeline=times)

    def cut_short(self, reason: FinishReason) -> None:
        """End the output of all final stages that are not done."""
        for name in self.final_stages:
            if name not in self.times or self.times[name].ended_s is None:
                end = OutputDelta(self.request_id, finished=True, finish_reason=reason)
                self.new.append((name, end))


class Orchestrator:
    """Runs requests over a pipeline.

    It sends commands to every stage's worker, and handles its events, independent of where the
    worker runs. In a turn (:meth:`step`) the stages that this thread drives do one unit of work
    each, the last stages first, so that nearly finished requests leave before others enter. A
    request enters a stage as soon as all the stages that feed it are done with it. With stages
    ``a -> b`` and requests 1, 2::

        turn     1    2    3    4    5
        a       1 2  1 2   2
        b                 1    1 2  2      request 1 left a in turn 2, request 2 in turn 3

    On an edge with a ``chunk_size`` it enters with the first chunk, and its source pauses it while
    ``max_pending_chunks`` of its chunks are not consumed. Stages have limited capacity, so paused
    requests can block others that could run: when no stage has anything to do in a turn, the oldest
    paused request is resumed, for one chunk above the limit.

    An error of one request ends only that request, and frees what it holds in all stages. Not
    thread-safe.

    Args:
        pipeline: the stages; they must be idle.
        on_stage_output: called with every stage's finished output of every request, including
            stages that are not final.
        trace: records what happens where and when; None for no trace.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        on_stage_output: StageOutputListener = None,
        trace: Trace | None = None,
    ) -> None:
        pipeline.ownership.check()
        self._pipeline = pipeline
        self._on_stage_output = on_stage_output or (lambda _: None)
        self._live: dict[str, LiveRequest] = {}
        self._trace = trace
        edges = streamed_edges(pipeline.stages)
        # The streamed edges with their sources, by consumer.
        self._streams = {edge.consumer: (name, edge) for name in edges for edge in edges[name]}
        self._links = {
            name: _link(pipeline, stage, edges[name], is_traced=trace is not None)
            for name, stage in pipeline.stages.items()
        }
        # For each stage that consumes no chunks, the stages whose finished outputs it waits for.
        self._whole_edges = {
            name: sources
            for name, sources in sources_of(pipeline.stages).items()
            if name not in self._streams
        }
        # Needed by the listener, or by a later stage that consumes whole outputs, not chunks.
        self._needed_whole = frozenset(
            pipeline.order if on_stage_output is not None else chain(*self._whole_edges.values())
        )
        shown = {name for name, stage in pipeline.stages.items() if "tensors" in stage.final_output}
        self._tensor_sources = self._needed_whole | shown
        # Request and stage by ticket; an event without an entry is late, and dropped.
        self._entered: dict[int, tuple[LiveRequest, str]] = {}
        self._tickets = count()
        # Seeds are drawn here, where requests are in order, and reruns reuse the first run's seed.
        self._seeds = {name: RequestSeeds(stage.seed) for name, stage in pipeline.stages.items()}
        self._turns = deque(reversed(pipeline.order))
        self._has_events = threading.Event()
        self._on_event: Callable[[], object] = self._has_events.set
        # True if the caller of step() waits for events, along with its own commands.
        self._caller_waits = False
        self.listen()

    def prepare_aside(self, on_event: Callable[[], object]) -> None:
        """Prepare requests in other threads from now on, so that no turn waits for it.

        Turns do not wait for events any more: the caller does, between turns. :meth:`close` must be
        called in the end.
        """
        self._on_event = on_event
        self._caller_waits = True
        self.listen()
        for link in self._links.values():
            link.prepare_aside()

    def listen(self) -> None:
        """Register for the stages' events, again after another orchestrator has driven them."""
        for link in self._links.values():
            link.notify(self._on_event)

    @property
    def has_unfinished_requests(self) -> bool:
        """True if any request has not ended."""
        return bool(self._live)

    @property
    def has_work(self) -> bool:
        """True if :meth:`step` has work: events, or a stage with work."""
        return any([link.has_work for link in self._links.values()])

    def close(self) -> None:
        """Wait for the threads that prepare requests, if there are any."""
        for link in self._links.values():
            link.close()

    @property
    def live_request_ids(self) -> tuple[str, ...]:
        """Ids of the running requests, oldest first."""
        return tuple(self._live)

    def add_request(self, request: OmniRequest) -> None:
        """Send a request to the stages that use the user's prompt.

        A stage that refuses it does so by an output of :meth:`step`.

        Raises:
            ValueError: it has no id or that of a live request, names a stage that does not exist
                or samples nothing, or an unknown speaker; or any stage has neither a running worker
                nor one that is starting.
        """
        if not request.request_id:
            raise ValueError("a request needs a request_id that is not empty")
        if request.request_id in self._live:
            raise ValueError(
                f"request_id {request.request_id!r} belongs to a request that is still running"
            )
        pipeline, voices = self._pipeline, self._pipeline.voices
        speaker = voices.find(request.speaker) or pipeline.speaker
        prompt, speaker = voices.apply(request.prompt, speaker)
        live = LiveRequest(
            request=replace(request, prompt=prompt),
            request_id=request.request_id,
            sampling=pipeline.merge_sampling(request.sampling),
            speaker=speaker,
            waiting=set(pipeline.order),
            final_stages=pipeline.final_stages,
        )
        self._check_workers()
        self._live[live.request_id] = live
        for name, stage in pipeline.stages.items():
            if stage.inputs is None:
                self._enter(live, name)

    def step(self) -> list[OmniDelta]:
        """Run stages by turns, the last one first, until there is new output for users.

        Returns:
            New output and ends of requests; empty if every stage had its turn without any.
        """
        if not self._caller_waits:
            self._flush()
            if not self.has_work:
                self._has_events.wait(_WAIT_TIMEOUT_S)
            self._has_events.clear()
        moved: dict[str, OmniDelta | None] = {}
        has_moved = False
        for _ in range(len(self._turns)):
            name = self._turns[0]
            self._turns.rotate(-1)
            self._links[name].work()
            for event in self._events(name):
                has_moved = True
                self._take(event, moved)
            if moved:  # deliver it before the other stages work
                break
        if not has_moved and self._streams:
            self._resume_stalled()
        self._flush()
        return [ended or self._live[each].take_delta() for each, ended in moved.items()]

    def abort(self, request_id: str, reason: str = "aborted") -> OmniDelta | None:
        """Abort a request in all stages, and free what it holds."""
        live = self._live.get(request_id)
        ended = None if live is None else self._end(live, reason, FinishReason.ABORT)
        self._flush()
        return ended

    def fail_all(self, error: str) -> list[OmniDelta]:
        """End all requests and drop them in all stages, whatever state an exception left."""
        live, self._live, self._entered = tuple(self._live.values()), {}, {}
        if self._trace is not None:
            for request_id, name in [(one.request_id, name) for one in live for name in one.inside]:
                self._trace.left(name, request_id)
        for link in self._links.values():
            link.drop_all()
        self._flush()
        for each in live:
            each.cut_short(FinishReason.ERROR)
        return [each.take_delta(finished=True, error=error) for each in live]

    def _events(self, name: str) -> list[Event]:
        """Return the events of a stage since the last call; pass its reports to the trace."""
        events: list[Event] = []
        for event in self._links[name].events():
            if not isinstance(event, Traced):
                events.append(event)
            elif self._trace is not None:
                self._trace.take(name, event)
        return events

    def _send(self, name: str, command: Command) -> None:
        if self._trace is not None:
            self._trace.sending(name, command)
        self._links[name].send(command)

    def _flush(self) -> None:
        """Deliver the sent commands to all workers."""
        for link in self._links.values():
            link.flush()

    def _check_workers(self) -> None:
        """Raise ``ValueError`` if a stage has no worker, before any other stage does any work."""
        for name, stage in self._pipeline.stages.items():
            why = why_lost(stage.worker_states()) if isinstance(stage, RemoteStage) else None
            if why is not None:
                error = f"stage {name!r}: {why}"
                raise ValueError(error) from RuntimeError(error)  # the request is not at fault

    def _take(self, event: Event, moved: dict[str, OmniDelta | None]) -> None:
        """Handle an event of a worker."""
        if event.ticket not in self._entered:
            return
        live, name = self._entered[event.ticket]
        match event:
            case Output():
                ended = self._advance(live, name, event)
                is_shown = event.delta is not None and self._pipeline.stages[name].final_output
                if ended is not None or is_shown:
                    moved[live.request_id] = ended
            case Ack():
                live.outstanding[name] -= 1
                source, _ = self._streams[name]
                if source in live.inside:
                    self._send(source, Credit(live.request_id, name))
            case Failed():
                ended = self._end(live, event.error)
                if not (event.has_begun or live.has_moved):
                    # As if it had never been added.
                    ended = OmniDelta(live.request_id, (), True, error=event.error)
                moved[live.request_id] = replace(ended, refused=event.refused)

    def _advance(self, live: LiveRequest, name: str, event: Output) -> OmniDelta | None:
        """Pass a stage's output to the user and later stages; None if the request continues."""
        live.has_moved = True
        delta = event.delta
        if delta is not None:
            if delta.finished:
                self._leave(live, name)
            stage, is_needed_whole = self._pipeline.stages[name], name in self._needed_whole
            try:
                live.take(stage, delta, is_needed_whole=is_needed_whole)
            except ValueError as error:
                return self._end(live, f"stage {name!r}: {error}")
            finally:
                if delta.finished and is_needed_whole:
                    live.finished[name] = live.whole.pop(name).output()
                    self._on_stage_output(live.finished[name])
        for chunk in event.chunks:
            self._forward(live, chunk)
        if delta is not None and delta.finished:
            self._enter_ready_stages(live)
        if live.waiting or live.inside:
            return None
        del self._live[live.request_id]
        return live.take_delta(finished=True)

    def _forward(self, live: LiveRequest, chunk: Chunk) -> None:
        """Send a chunk to its consumer, unless that is done with the request."""
        consumer = chunk.consumer
        source, _ = self._streams[consumer]
        live.lifted.discard(source)
        if consumer in live.inside:
            self._send(consumer, Extend(live.request_id, chunk.output, chunk.first_row))
        elif consumer in live.waiting:
            self._enter(live, consumer, (chunk.output,), first_row=chunk.first_row)
        else:
            return
        live.outstanding[consumer] += 1

    def _enter_ready_stages(self, live: LiveRequest) -> None:
        """Send a request to every stage whose sources are all done with it."""
        whole = {name: of for name, of in self._whole_edges.items() if name in live.waiting}
        for name, sources in whole.items():
            if all(source in live.finished for source in sources):
                self._enter(live, name, tuple(live.finished[source] for source in sources))
        # Tensors of a long request are large: keep only what a stage still waits for.
        needed = {source for name in whole if name in live.waiting for source in whole[name]}
        live.finished = {name: out for name, out in live.finished.items() if name in needed}

    def _enter(
        self,
        live: LiveRequest,
        name: str,
        sources: tuple[StageOutput, ...] = (),
        *,
        first_row: int = 0,
    ) -> None:
        """Send a request to a stage that it waited for."""
        stage, ticket = self._pipeline.stages[name], next(self._tickets)
        live.waiting.discard(name)
        live.inside[name] = ticket
        live.times[name] = StageTime(name, time.monotonic())
        live.has_new_times = True
        self._entered[ticket] = (live, name)
        enter = Enter(
            ticket,
            live.request_id,
            live.request.prompt,
            sources,
            first_row,
            self._seeds[name].seeded(live.sampling.get(name), stage.sampling),
            live.request.priority,
            live.request.cache_salt,
            live.speaker,
            wants_tensors=name in self._tensor_sources,
        )
        self._send(name, enter)

    def _leave(self, live: LiveRequest, name: str) -> None:
        """Handle that a stage is done with a request, and consumes no more chunks of it."""
        del self._entered[live.inside.pop(name)]
        if self._trace is not None:
            self._trace.left(name, live.request_id)
        source, _ = self._streams.get(name, (None, None))
        if source in live.inside:
            self._send(source, Credit(live.request_id, name, closes=True))

    def _resume_stalled(self) -> None:
        """Resume a paused request if the pipeline is stalled: the oldest one, in its last stage.

        But a resumed request may lack capacity that another paused one holds, so each of them is
        resumed once before the oldest is again.
        """
        paused = [
            (live, name)
            for live in self._live.values()
            for name in reversed(self._pipeline.order)
            if name in live.inside
            and any(
                source == name
                and consumer in live.inside
                and live.outstanding[consumer] >= edge.max_pending
                for consumer, (source, edge) in self._streams.items()
            )
        ]
        if not paused or not all([link.check_idle() for link in self._links.values()]):
            return
        if all(name in live.lifted for live, name in paused):
            for live, _ in paused:
                live.lifted.clear()
        live, name = next((live, name) for live, name in paused if name not in live.lifted)
        live.lifted.add(name)
        self._send(name, Lift(live.request_id))

    def _end(
        self, live: LiveRequest, error: str, reason: FinishReason = FinishReason.ERROR
    ) -> OmniDelta:
        """End a request early, and free what it holds everywhere."""
        self._abort(live)
        live.cut_short(reason)
        return live.take_delta(finished=True, error=error)

    def _abort(self, live: LiveRequest) -> None:
        for name, ticket in live.inside.items():
            del self._entered[ticket]
            self._send(name, Abort(live.request_id))
        live.inside.clear()
        self._live.pop(live.request_id, None)


def _visible_part(delta: OutputDelta, kinds: Sequence[str]) -> OutputDelta:
    """Return a delta without the kinds of output that are not shown to the user."""
    hidden: dict[str, Any] = {}
    if "text" not in kinds and (delta.num_completions or delta.text is not None):
        hidden |= {"text": None, "logprobs": None, "num_completions": 0, "others": ()}
    if "audio" not in kinds and (delta.audio or delta.whole_audio):
        hidden |= {"audio": None, "whole_audio": None}
    if "tensors" not in kinds and delta.tensors:
        hidden["tensors"] = {}
    return replace(delta, **hidden) if hidden else delta


def refusal(request_id: str, error: Exception) -> OmniDelta:
    """Return the only output of a request that no stage has started."""
    is_value_error = isinstance(error, ValueError)
    return OmniDelta(
        request_id,
        finished=True,
        error=str(error) if is_value_error else repr(error),
        # True if the request was at fault, so that its sender can fix it. A ValueError that wraps
        # another kind of exception is an error of the stage itself.
        refused=is_value_error and isinstance(error.__cause__, ValueError | None),
    )


def streamed_edges(
    stages: Mapping[str, Stage | StageConfig],
) -> dict[str, tuple[StreamedEdge, ...]]:
    """Return the edges with a ``chunk_size``, by source."""
    edges: dict[str, tuple[StreamedEdge, ...]] = dict.fromkeys(stages, ())
    for name, stage in stages.items():
        inputs = stage.inputs
        if inputs is not None and inputs.chunk_size is not None:
            edge = StreamedEdge(name, inputs.chunk_size, inputs.max_pending_chunks)
            edges[inputs.sources[0]] += (edge,)
    return edges


def _link(
    pipeline: Pipeline, stage: Stage, edges: tuple[StreamedEdge, ...], *, is_traced: bool
) -> StageLink:
    """Return the link to a stage's worker: one in this thread, or that of a remote stage."""
    if isinstance(stage, RemoteStage):
        return stage.link
    kind = TracedWorker if is_traced else StageWorker
    return kind(stage, pipeline.transforms.get(stage.name), edges)

"""The links to a pipeline's stages, and what a trace learns at them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from engine.interface.outputs import OutputDelta
from omni.pipelines.pipeline import Pipeline
from omni.runtime.trace import Trace
from stages import Stage, StageOutput
from stages.trace_events import Traced
from stages.worker.messages import (
    Abort,
    Command,
    Enter,
    Event,
    Extend,
    Failed,
    Output,
    StreamedEdge,
)
from stages.worker.stage_link import DistantStage, StageLink, why_lost
from stages.worker.stage_tracer import TracedWorker
from stages.worker.stage_worker import StageWorker, num_tensor_bytes

__all__ = [
    "StageLinks",
    "check_workers",
    "chunk_streams",
    "streamed_edges",
    "tensor_sources",
    "whole_edges",
]


class StageLinks:
    """A link to every stage of a pipeline: a worker in this thread, or the stage's own elsewhere.

    Args:
        pipeline: the stages; they must be idle.
        trace: gets what happens at the links and in the workers; None for nothing.
    """

    def __init__(self, pipeline: Pipeline, trace: Trace | None = None) -> None:
        edges = streamed_edges(pipeline)
        self._tracer = None if trace is None else _LinkTracer(trace)
        self._links = {
            name: (
                _link(pipeline, stage, edges[name])
                if trace is None
                else _link(pipeline, stage, edges[name], is_traced=True)
            )
            for name, stage in pipeline.stages.items()
        }

    def send(self, name: str, command: Command) -> None:
        """Send a stage a command; see :class:`~stages.worker.stage_link.StageLink`."""
        if self._tracer is not None:
            self._tracer.sending(name, command)
        self._links[name].send(command)

    def work(self, name: str) -> None:
        """Do one unit of a stage's work, if this thread steps it."""
        self._links[name].work()

    def events(self, name: str) -> list[Event]:
        """The events of a stage since this was last called."""
        link, tracer = self._links[name], self._tracer
        if tracer is None:
            return link.events()
        traces = link.traces()
        events = link.events()
        # Those of workers elsewhere have come with the events.
        tracer.received(name, [*traces, *link.traces()], events)
        return events

    @property
    def has_work(self) -> bool:
        """Whether any stage has work or events."""
        return any([link.has_work for link in self._links.values()])

    @property
    def time_to_work(self) -> float | None:
        """Seconds after which :attr:`has_work` may change by itself; None if it will not."""
        times = [link.time_to_work for link in self._links.values()]
        return min([time for time in times if time is not None], default=None)

    def flush(self) -> None:
        """Let all workers have what was sent."""
        for link in self._links.values():
            link.flush()

    def drop_all(self) -> None:
        """Have all stages let go of all requests, whatever state an exception left."""
        if self._tracer is not None:
            self._tracer.left_all()
        for link in self._links.values():
            link.drop_all()

    def check_idle(self) -> bool:
        """Whether nothing has moved in any stage since this was asked before."""
        return all([link.check_idle() for link in self._links.values()])

    def notify(self, on_event: Callable[[], object]) -> None:
        """Have a function called, in any thread, when :attr:`has_work` may have become true."""
        for link in self._links.values():
            link.notify(on_event)

    def prepare_aside(self) -> None:
        """Have requests made ready in other threads from now on."""
        for link in self._links.values():
            link.prepare_aside()

    def close(self) -> None:
        """Wait for the threads that prepare requests, if there are any."""
        for link in self._links.values():
            link.close()


def check_workers(pipeline: Pipeline) -> None:
    """Check that every stage has a worker, or one that begins, before any of them does any work.

    Raises:
        ValueError: one has none; says which and why.
    """
    for name, stage in pipeline.stages.items():
        why = why_lost(stage.worker_states()) if isinstance(stage, DistantStage) else None
        if why is not None:
            error = f"stage {name!r}: {why}"
            raise ValueError(error) from RuntimeError(error)  # the request is not at fault


def streamed_edges(pipeline: Pipeline) -> dict[str, tuple[StreamedEdge, ...]]:
    """By source, the edges with a ``chunk_size``."""
    edges: dict[str, list[StreamedEdge]] = {name: [] for name in pipeline.order}
    for name, stage in pipeline.stages.items():
        inputs = stage.inputs
        if inputs is not None and inputs.chunk_size is not None:
            edge = StreamedEdge(name, inputs.chunk_size, inputs.max_pending_chunks)
            edges[inputs.sources[0]].append(edge)
    return {name: tuple(of_source) for name, of_source in edges.items()}


def chunk_streams(pipeline: Pipeline) -> list[tuple[str, StreamedEdge]]:
    """The edges with a ``chunk_size``, each with its source."""
    return [(name, edge) for name, edges in streamed_edges(pipeline).items() for edge in edges]


def whole_edges(pipeline: Pipeline) -> dict[str, tuple[str, ...]]:
    """By stage that takes no chunks, the stages whose finished outputs it waits for."""
    edges: dict[str, tuple[str, ...]] = {}
    for name, stage in pipeline.stages.items():
        if stage.inputs is None:
            edges[name] = ()
        elif stage.inputs.chunk_size is None:
            edges[name] = stage.inputs.sources
    return edges


def tensor_sources(pipeline: Pipeline, *, is_heard: bool) -> frozenset[str]:
    """The stages whose finished outputs are needed with their tensors.

    Either the user gets them, or a later stage takes them whole. A stage that takes chunks does not
    count: it has all rows by then.

    Args:
        pipeline: of the stages.
        is_heard: whether a listener gets all outputs of all stages.
    """
    if is_heard:
        return frozenset(pipeline.stages)
    needed = {name for name, stage in pipeline.stages.items() if "tensors" in stage.final_output}
    return frozenset(needed.union(*whole_edges(pipeline).values()))


def _link(
    pipeline: Pipeline,
    stage: Stage,
    edges: tuple[StreamedEdge, ...],
    *,
    is_traced: bool = False,
) -> StageLink:
    if isinstance(stage, DistantStage):
        return stage.link
    kind = TracedWorker if is_traced else StageWorker
    return kind(stage, pipeline.transforms.get(stage.name), edges)


class _LinkTracer:
    """Watches what goes to the stages and what comes back.

    Args:
        trace: gets it.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._tickets: dict[tuple[str, str], int] = {}  # by stage and request

    def sending(self, name: str, command: Command) -> None:
        """A stage gets a command."""
        match command:
            case Enter():
                self._left(name, command.request_id)
                self._tickets[name, command.request_id] = command.ticket
                if command.sources:
                    self._sent(name, command.request_id, command.sources)
            case Extend():
                self._sent(name, command.request_id, (command.source,))
            case Abort():
                self._left(name, command.request_id)

    def received(self, name: str, traces: Sequence[Traced], events: Iterable[Event]) -> None:
        """A stage has emitted events, and reported what it did when."""
        for traced in traces:
            self._trace.take(name, traced)
        for event in events:
            match event:
                case Output(delta=OutputDelta(finished=True) as delta):
                    self._left(name, delta.request_id)
                case Failed():
                    for (stage, request_id), ticket in tuple(self._tickets.items()):
                        if stage == name and ticket == event.ticket:
                            self._left(name, request_id)

    def left_all(self) -> None:
        """All stages have let go of all requests."""
        for name, request_id in tuple(self._tickets):
            self._left(name, request_id)

    def _sent(self, name: str, request_id: str, sources: Sequence[StageOutput]) -> None:
        stages = [each.stage for each in sources]
        self._trace.sent(name, request_id, stages, num_tensor_bytes(sources))

    def _left(self, name: str, request_id: str) -> None:
        self._trace.left(name, request_id)
        self._tickets.pop((name, request_id), None)

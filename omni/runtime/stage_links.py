"""The ways to a pipeline's stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from omni.pipelines.pipeline import Pipeline
from omni.runtime.trace import Trace
from omni.runtime.traced_link import TracedLink
from stages import Stage
from stages.worker.messages import StreamedEdge
from stages.worker.stage_link import DistantStage, StageLink, why_lost
from stages.worker.stage_tracer import TracedWorker
from stages.worker.stage_worker import StageWorker

__all__ = [
    "StageLinks",
    "check_workers",
    "chunk_streams",
    "streamed_edges",
    "tensor_sources",
    "whole_edges",
]


class StageLinks(Mapping[str, StageLink]):
    """A way to every stage of a pipeline: a worker in this thread, or the stage's own elsewhere.

    Args:
        pipeline: the stages; they must be idle.
        trace: gets what happens on the ways and in the workers; None for nothing.
    """

    def __init__(self, pipeline: Pipeline, trace: Trace | None = None) -> None:
        edges = streamed_edges(pipeline)
        link = _link if trace is None else partial(_traced_link, trace)
        self._links = {
            name: link(pipeline, stage, edges[name]) for name, stage in pipeline.stages.items()
        }

    def __getitem__(self, name: str) -> StageLink:
        return self._links[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._links)

    def __len__(self) -> int:
        return len(self._links)

    @property
    def has_work(self) -> bool:
        """Whether any stage would do or emit anything."""
        return any(link.has_work for link in self._links.values())

    @property
    def time_to_work(self) -> float | None:
        """Seconds after which :attr:`has_work` may change by itself; None if it will not."""
        times = (link.time_to_work for link in self._links.values())
        return min((time for time in times if time is not None), default=None)

    def flush(self) -> None:
        """Let all workers have what was sent."""
        for link in self._links.values():
            link.flush()

    def drop_all(self) -> None:
        """Have all stages let go of all requests, whatever state an exception left."""
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
            raise ValueError(error) from RuntimeError(error)  # it is not the client's to fix


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


def _link(pipeline: Pipeline, stage: Stage, edges: tuple[StreamedEdge, ...]) -> StageLink:
    if isinstance(stage, DistantStage):
        return stage.link
    return StageWorker(stage, pipeline.transforms.get(stage.name), edges)


def _traced_link(
    trace: Trace, pipeline: Pipeline, stage: Stage, edges: tuple[StreamedEdge, ...]
) -> StageLink:
    if isinstance(stage, DistantStage):
        return TracedLink(stage.name, stage.link, trace)
    worker = TracedWorker(stage, pipeline.transforms.get(stage.name), edges)
    return TracedLink(stage.name, worker, trace)

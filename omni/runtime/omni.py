"""User interface of a pipeline: runs prompts through it, in this process or in workers."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import re
import threading
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, aclosing, closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeAlias

from engine.interface.arguments import check_argument
from engine.interface.cpu_threads import available_cores
from engine.interface.ownership import Ownership
from omni.pipelines.graph_rules import check_graph
from omni.pipelines.pipeline import Pipeline
from omni.pipelines.pipeline_config import PipelineConfig, check_runtime
from omni.pipelines.runtime_config import (
    RuntimeConfig,
    placement_for,
    resolve_threads,
    stages_by_worker,
)
from omni.requests.request import (
    OmniAccumulator,
    OmniDelta,
    OmniOutput,
    OmniRequest,
    Requests,
    as_requests,
)
from omni.runtime.driver import Driver, Sink, Ticket
from omni.runtime.orchestrator import Orchestrator, streamed_edges
from omni.runtime.trace import Trace
from stages import StageConfig, StageStats
from stages.cluster.cluster_address import find_cluster
from stages.portable import check_portable, import_name, portable_transform
from stages.remote.messages import StageSpec, WorkerSpec
from stages.remote.remote_stage import RemoteStage
from stages.remote.supervisor import Connect, connect_process, start_workers
from stages.worker.stage_link import WorkerState

_Event: TypeAlias = tuple[int, OmniDelta | BaseException]


class Omni:
    """Runs requests through a pipeline.

    One background thread drives the stages, so any number of threads and coroutines can use the
    same object concurrently; their requests share batches and caches.

    >>> with Omni("two_step") as omni:
    ...     for output in omni.generate(["A quick brown fox", "A quick brown dog"]):
    ...         print(output.stages["reader"].text)

    Args:
        config: a pipeline, the config of one, the path of a YAML file, or the name of a shipped
            YAML file. A pipeline is owned by this object from then on, and closed with it; if its
            stages are to run elsewhere, they are closed immediately and rebuilt there.
        overrides: values by dotted path (``"stages.writer.engine.num_blocks"``), which replace
            those of the YAML file.
        runtime: where the stages run, overriding the config: ``"inline"``, ``"processes"``,
            ``"ray"``, or a :class:`~omni.pipelines.runtime_config.RuntimeConfig`. Settings of the
            config (a file, ``PipelineConfig`` or ``Pipeline``) that this runtime does not have,
            such as replicas inline, are dropped with a warning; those in ``overrides`` are an
            error.
        trace: file for a timeline of every request, for Perfetto or chrome://tracing; it is
            complete when this is closed.
        apart: if true, inline stages share one worker process, for a program whose own threads
            keep its interpreter busy, such as a server: one interpreter computes at a time. If the
            worker dies, it is restarted like any other one, and its requests are run again.

    Raises:
        ValueError: the config is wrong, a stage cannot be built where it is to run, or ``apart`` is
            set without a config.
        OSError: the trace cannot be written.
        RuntimeError: the pipeline belongs to another ``Omni``, or is closed.
    """

    def __init__(
        self,
        config: str | Path | PipelineConfig | Pipeline,
        *,
        overrides: Mapping[str, Any] | None = None,
        runtime: str | RuntimeConfig | None = None,
        trace: str | Path | None = None,
        apart: bool = False,
    ) -> None:
        wanted = "the name of a shipped pipeline, the path of a YAML file, a PipelineConfig or a "
        kinds = str | Path | PipelineConfig | Pipeline
        check_argument("config", config, kinds, f"{wanted}Pipeline")
        if overrides and not isinstance(config, str | Path):
            raise ValueError("overrides change a YAML file, but none was given")
        if isinstance(config, str | Path):
            config = PipelineConfig.load(config, overrides=_merge(overrides or {}, runtime))
        if isinstance(config, PipelineConfig):
            config = config.with_runtime(runtime)
        elif apart and RuntimeConfig.parse(runtime).kind == "inline":
            raise ValueError(
                "apart=True needs a config, of which another process can build the stages"
            )
        # Before any model is loaded, so that a file that cannot be written is detected immediately.
        order = config.order if isinstance(config, Pipeline) else config.topological_order()
        opened = None if trace is None else Trace(trace, order)
        try:
            if isinstance(config, PipelineConfig):
                built = build_pipeline(config, apart=apart, is_traced=trace is not None)
            else:
                built = place_pipeline(config, runtime or "inline", is_traced=trace is not None)
            built.ownership.claim(self, "another Omni")
        except BaseException:
            if opened is not None:
                opened.discard()
            raise
        self.pipeline = built
        self._ownership = Ownership("this Omni")
        self._driver = Driver(Orchestrator(self.pipeline, trace=opened))
        # Also runs when this object is dropped or the interpreter ends.
        self._finalizer = weakref.finalize(
            self, _finalize, self._ownership, self._driver, self.pipeline, opened
        )

    def generate(
        self, requests: Requests, *, on_progress: Callable[[OmniOutput], None] | None = None
    ) -> list[OmniOutput]:
        """Run requests to their end.

        Args:
            requests: one or several, as prompts or as :class:`OmniRequest`.
            on_progress: called with every output, finished or not.

        Returns:
            The last output of every request, in the order of the requests. A failed one has its
            ``error`` set; the others are complete.

        Raises:
            ValueError: ``requests`` is none of these.
            RuntimeError: the pipeline is closed, its driver crashed, or this thread drives the
                pipeline itself; or this is a fork of the process that created it.
        """
        batch = as_requests(requests)
        outputs = _Outputs(self.pipeline, len(batch), on_progress)
        for event in self._run(batch):
            outputs.add(*event)
        return outputs.last

    def stream(self, requests: Requests) -> Generator[OmniOutput, None, None]:
        """Run requests and yield every output as it comes; errors are those of :meth:`generate`.

        Leaving the loop early aborts the running requests.
        """
        batch = as_requests(requests)
        outputs = _Outputs(self.pipeline, len(batch))
        for event in self._run(batch):
            yield outputs.next(*event)

    async def agenerate(
        self,
        requests: Requests,
        *,
        on_progress: Callable[[OmniOutput], object] | None = None,
    ) -> list[OmniOutput]:
        """Run requests to their end like :meth:`generate`, as a coroutine; several may run at once.

        ``on_progress`` is called in the event loop. Cancelling the coroutine aborts the running
        requests; so does an exception of ``on_progress``, which is raised here.

        Raises:
            ValueError: ``requests`` is not valid.
        """
        batch = as_requests(requests)
        outputs = _Outputs(self.pipeline, len(batch), on_progress)
        async with aclosing(self._arun(batch)) as events:
            async for event in events:
                outputs.add(*event)
        return outputs.last

    async def astream(self, requests: Requests) -> AsyncGenerator[OmniOutput, None]:
        """Run requests and yield every output as it comes; errors are those of :meth:`generate`.

        Cancelling the coroutine, or closing the iterator, aborts the running requests.
        """
        batch = as_requests(requests)
        outputs = _Outputs(self.pipeline, len(batch))
        async with aclosing(self._arun(batch)) as events:
            async for event in events:
                yield outputs.next(*event)

    def abort(self, request_id: str) -> None:
        """Abort a request; its caller gets a last output. Unknown ids are ignored."""
        self._ownership.check()
        self._driver.abort(request_id)

    @contextmanager
    def paused(self) -> Generator[Pipeline, None, None]:
        """Queue new requests and lend out the pipeline, to reset, check or drive its stages.

        Raises:
            RuntimeError: requests are running, the pipeline is closed, or it is lent to another
                thread.
        """
        self._ownership.check()
        with self._driver.paused():
            yield self.pipeline

    def stats(self) -> dict[str, StageStats]:
        """Return every stage's counters."""
        return {name: stage.stats() for name, stage in self.pipeline.stages.items()}

    def worker_states(self) -> dict[str, tuple[WorkerState, ...]]:
        """Return the worker states of every stage that runs elsewhere, by replica."""
        return {
            name: stage.worker_states()
            for name, stage in self.pipeline.stages.items()
            if isinstance(stage, RemoteStage)
        }

    def replica_stats(self) -> dict[str, tuple[StageStats, ...]]:
        """Return every stage's counters, by replica."""
        return {name: stage.replica_stats() for name, stage in self.pipeline.stages.items()}

    def close(self) -> None:
        """End running requests with an error, stop the thread, close the stages.

        Idempotent. Does nothing in a fork of the process that created this object.
        """
        if (left := self._finalizer.detach()) is not None:
            _close(*left[2])

    def __enter__(self) -> Self:
        """Return this object, which the ``with`` statement closes at its end."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close."""
        self.close()

    def _run(self, batch: Sequence[OmniRequest]) -> Generator[tuple[int, OmniDelta], None, None]:
        """Yield every delta with the position of its request in the batch."""
        self._ownership.check()
        self._driver.check_can_wait()
        events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        running: dict[int, Ticket] = {}
        try:
            self._submit(batch, events.put, running)
            while running:
                if (taken := _take(events.get(), running)) is not None:
                    yield taken
        finally:
            self._driver.discard(running.values())

    async def _arun(self, batch: Sequence[OmniRequest]) -> AsyncGenerator[tuple[int, OmniDelta]]:
        """Yield the same, for coroutines."""
        self._ownership.check()
        events: asyncio.Queue[_Event] = asyncio.Queue()
        running: dict[int, Ticket] = {}
        try:
            wake = asyncio.get_running_loop().call_soon_threadsafe
            self._submit(batch, lambda event: wake(events.put_nowait, event), running)
            while running:
                if (taken := _take(await events.get(), running)) is not None:
                    yield taken
        finally:
            self._driver.discard(running.values())

    def _submit(
        self,
        batch: Sequence[OmniRequest],
        post: Callable[[_Event], object],
        running: dict[int, Ticket],
    ) -> None:
        """Submit requests; their events are posted with their positions."""
        with self._driver.together():
            for position, request in enumerate(batch):
                name = request.request_id or f"omni-{uuid.uuid4().hex}"
                sink = _sink(post, position)
                running[position] = self._driver.submit(request, name, sink)


def _merge(overrides: Mapping[str, Any], runtime: str | RuntimeConfig | None) -> Mapping[str, Any]:
    """Add the kind of a given runtime to overrides.

    Raises:
        ValueError: there is no such runtime, or overrides change a given ``RuntimeConfig``.
    """
    if runtime is None:
        return overrides
    own = next((place for place in overrides if place.partition(".")[0] == "runtime"), None)
    if isinstance(runtime, RuntimeConfig) and own is not None:
        raise ValueError(
            f"overrides: {own}: the whole runtime is given as a RuntimeConfig; say it there"
        )
    return {**overrides, "runtime.kind": RuntimeConfig.parse(runtime).kind}


class _Outputs:
    """Cumulative outputs of a batch for the user; without ``on_progress`` only the last ones."""

    def __init__(
        self,
        pipeline: Pipeline,
        length: int,
        on_progress: Callable[[OmniOutput], object] | None = None,
    ) -> None:
        self._so_far = [OmniAccumulator(pipeline.final_stages) for _ in range(length)]
        self._last: list[OmniOutput | None] = [None] * length
        self._on_progress = on_progress

    @property
    def last(self) -> list[OmniOutput]:
        """Last output of every request."""
        return [output for output in self._last if output is not None]

    def add(self, position: int, delta: OmniDelta) -> None:
        """Add a delta of a request."""
        if self._on_progress is None and not delta.finished:
            self._so_far[position].add(delta)
            self._so_far[position].skip()
            return
        output = self.next(position, delta)
        if self._on_progress is not None:
            self._on_progress(output)
        if delta.finished:
            self._last[position] = output

    def next(self, position: int, delta: OmniDelta) -> OmniOutput:
        """Add a delta of a request, and return its output so far."""
        self._so_far[position].add(delta)
        return self._so_far[position].output()


def _sink(post: Callable[[_Event], object], position: int) -> Sink:
    return lambda event: post((position, event))


def _take(event: _Event, running: dict[int, Ticket]) -> tuple[int, OmniDelta] | None:
    """Unpack an event of a sink, and remove a request that has ended; None if it ended before."""
    position, delta = event
    if position not in running:
        return None
    if isinstance(delta, BaseException):
        raise RuntimeError("the pipeline's driver has crashed") from delta
    if delta.finished:
        del running[position]
    return position, delta


def _close(ownership: Ownership, driver: Driver, pipeline: Pipeline, trace: Trace | None) -> None:
    if not ownership.is_over:
        ownership.close()
        with nullcontext() if trace is None else closing(trace):
            driver.stop()
            pipeline.close()


def _finalize(*what: Any) -> None:
    """Close a pipeline that has lost its last reference, or is still open at interpreter exit.

    The garbage collector may call this in one of the pipeline's own threads, which may be busy and
    hold locks. Closing waits for those, so it is left to another thread.
    """
    if threading.current_thread() is threading.main_thread():  # it holds none of those locks
        _close(*what)
    else:
        threading.Thread(target=_close, args=what, name="omni-close").start()


def build_pipeline(
    config: PipelineConfig, *, apart: bool = False, is_traced: bool = False
) -> Pipeline:
    """Build a pipeline, with its stages in this process, or in workers that are started for them.

    Raises:
        ValueError: a stage cannot be built, or the graph is wrong. Nothing is left running.
    """
    check_runtime(config)
    is_inline = config.runtime.kind == "inline"
    if is_inline and not apart:
        return Pipeline.from_config(config)
    if is_inline:
        check_portable(config.stages)
    check_graph(config.stages, emitted=config.emitted())
    config.check_speaker()
    specs = _worker_specs(config, is_traced=is_traced)
    with ExitStack() as built:
        connect, close = _connector(config)
        built.callback(close)
        workers = start_workers(specs, connect, config.runtime.stall_timeout_s)
        for worker in workers:
            built.callback(worker.close)
        stages = [
            RemoteStage(
                name,
                config.resolved(name),
                [worker for worker in workers if name in worker.inboxes],
                config.runtime.max_retries,
            )
            for name in config.topological_order()
        ]
        pipeline = Pipeline(stages, speaker=config.speaker, voices=config.voices)
        pipeline.close_after_stages(built.pop_all().close)
    return pipeline


def place_pipeline(
    pipeline: Pipeline, runtime: str | RuntimeConfig, *, is_traced: bool = False
) -> Pipeline:
    """Move a pipeline that was composed of stages to another runtime.

    Its stages are closed, which frees what they hold, and rebuilt there, with the same setting of
    prefix caching.

    Raises:
        ValueError: another process cannot import a stage or transform, and the pipeline is
            unchanged; or a stage cannot be built there.
        RuntimeError: the pipeline belongs to an ``Omni``, or is closed.
    """
    config = RuntimeConfig.parse(runtime)
    if config.kind == "inline":
        for name, stage in pipeline.stages.items():
            if isinstance(stage.built_of, StageConfig):
                placement_for(name, stage.built_of.placement, config.kind)
        return pipeline
    described = _config_of(pipeline, config)
    check_runtime(described)
    caching = {name: stage.enable_prefix_caching for name, stage in pipeline.stages.items()}
    # Raises if an Omni owns the pipeline already, which can then continue to use it.
    pipeline.ownership.claim(described, "the workers that its stages are built in")
    pipeline.close()
    placed = build_pipeline(described, is_traced=is_traced)
    try:
        for name, stage in placed.stages.items():
            if stage.enable_prefix_caching != caching[name]:
                stage.enable_prefix_caching = caching[name]
    except BaseException:
        placed.close()
        raise
    return placed


def _config_of(pipeline: Pipeline, runtime: RuntimeConfig) -> PipelineConfig:
    """Return the config of a composed pipeline, without settings that the runtime does not have.

    Raises:
        ValueError: a stage does not know its own settings, for example because it was created from
            an engine; or its name is not allowed in a pipeline's file.
    """
    stages: dict[str, Any] = {}
    for name, stage in pipeline.stages.items():
        try:
            settings = stage.configuration()
        except ValueError as error:
            raise ValueError(f"stage {name!r}: {error}") from error
        if isinstance(settings, StageConfig):
            placement = placement_for(name, settings.placement, runtime.kind)
            settings = settings.model_copy(update={"placement": placement})
        stages[name] = settings
    return PipelineConfig(
        name="composed",
        speaker=pipeline.speaker,
        voices=pipeline.voices.given,
        runtime=runtime,
        stages=stages,
    )


def _connector(config: PipelineConfig) -> tuple[Connect, Callable[[], object]]:
    """Return the function that starts workers, and one to call when all have ended.

    Imports only what the runtime needs.

    Raises:
        ValueError: the cluster cannot be joined, or lacks the resources of the stages.
    """
    if config.runtime.kind != "ray":
        return connect_process, lambda: None
    from stages.cluster.direct_transport import check_transport
    from stages.cluster.reservation import Reservation

    placements = config.placements
    if config.runtime.direct_transport is not None:
        has_gpus = any(placement.reserved_gpus for placement in placements.values())
        check_transport(config.runtime.direct_transport, has_gpus=has_gpus)
    reservation = Reservation(find_cluster(config.runtime.address), placements)
    return reservation.connect, reservation.close


_FIRST_NUMBER = re.compile(r"\s*([1-9]\d*)\b")


def _torch_threads() -> int:
    """Return PyTorch's default number of threads in this process, without importing it."""
    given = _FIRST_NUMBER.match(os.environ.get("OMP_NUM_THREADS", ""))
    return int(given[1]) if given else available_cores()


def _worker_specs(config: PipelineConfig, *, is_traced: bool) -> list[WorkerSpec]:
    """Specify a pipeline's workers; only one if it is inline.

    Raises:
        ValueError: another process could not import a transform.
    """
    order = config.topological_order()
    if config.runtime.kind == "inline":
        workers = [(config.name, order, _torch_threads())]
    else:
        if config.runtime.kind == "ray":
            threads = {name: each.actor_threads for name, each in config.placements.items()}
        else:
            threads = resolve_threads(config.placements, available_cores())
        workers = []
        for worker, names in stages_by_worker(config.placements):
            open_names = [name for name in names if config.stages[name].placement.threads is None]
            count = max(threads[name] for name in open_names or names)
            workers.append((worker, [name for name in order if name in names], count))
    specs = []
    for worker, names, count in workers:
        num_replicas = len(config.stages[names[0]].placement.all_devices)
        specs += [
            WorkerSpec(
                name=worker,
                stages=tuple(_stage_spec(config, name, replica) for name in names),
                replica=replica,
                num_replicas=num_replicas,
                threads=count,
                is_traced=is_traced,
                log_level=logging.getLogger("omni").getEffectiveLevel(),
                tensor_transport=config.runtime.direct_transport,
            )
            for replica in range(num_replicas)
        ]
    return specs


def _stage_spec(pipeline: PipelineConfig, name: str, replica: int) -> StageSpec:
    config, transform = pipeline.resolved(name, replica), None
    if config.inputs is not None:
        transform = portable_transform(config.inputs.transform)
        inputs = replace(config.inputs, transform=transform)
        config = config.model_copy(update={"inputs": inputs})
    return StageSpec(
        name=name,
        config=config.model_dump_json(by_alias=True),
        kind=import_name(type(config)),
        transform=transform,
        edges=streamed_edges(pipeline.stages)[name],
        is_shown=bool({"tensors", "audio"}.intersection(config.final_output)),
    )

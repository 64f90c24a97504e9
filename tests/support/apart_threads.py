"""Pipelines that run apart in threads of this process, reached as those in processes are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast
from unittest.mock import patch

from omni import Omni
from omni.pipelines.pipeline import Pipeline
from omni.pipelines.pipeline_config import PipelineConfig
from omni.runtime import omni as omni_module
from omni.runtime.apart import apart_pipeline
from omni.runtime.apart.apart_messages import ApartSpec, apart_codec
from omni.runtime.apart.apart_pipeline import build_apart
from omni.runtime.apart.pipeline_host import PipelineHost, build_stages
from stages import Stage
from stages.remote.connection import Connection
from stages.remote.control import WorkerSpec
from stages.remote.fork_server import WorkerProcess
from stages.remote.process_connection import ProcessConnection
from tests.support.channel_workers import ThreadAsProcess
from tests.support.patience import PATIENCE_S

__all__ = ["ApartThreads", "omni_apart"]


class ApartThreads:
    """Starts them in the place of processes.

    Args:
        build: builds a pipeline.

    Attributes:
        hosts: of all that were started, the last one last.
        connections: to them.
    """

    def __init__(self, build: Callable[[ApartSpec], Pipeline] = build_stages) -> None:
        self._build = build
        self.hosts: list[PipelineHost] = []
        self.connections: list[Connection] = []
        self._threads: list[ThreadAsProcess] = []

    def connect(
        self, spec: ApartSpec, on_message: Callable[[Any], None], on_end: Callable[[str], None]
    ) -> Connection:
        """See :class:`~stages.remote.connection.Connect`."""

        def make(send: Callable[[object], None]) -> PipelineHost:
            self.hosts.append(PipelineHost(spec, send, self._build))
            return self.hosts[-1]

        codec = apart_codec()
        thread = ThreadAsProcess(spec.label, codec, make)
        self._threads.append(thread)
        connection = ProcessConnection(cast(WorkerProcess, thread), on_message, on_end, codec)
        self.connections.append(connection)
        return connection

    def join(self) -> None:
        """Wait until all threads have ended."""
        for thread in self._threads:
            assert thread.wait(PATIENCE_S)

    @contextmanager
    def omni(self, config: PipelineConfig) -> Iterator[Omni]:
        """A pipeline that runs apart; afterwards all threads have ended."""
        connect = patch.object(apart_pipeline, "connect_host", self.connect)
        with connect, Omni(config, apart=True) as omni:
            yield omni
        self.join()


def omni_apart(*stages: Stage, make: Callable[[], Sequence[Stage]] | None = None) -> Omni:
    """An ``Omni`` whose stages are these, and run apart in a thread of this process.

    Args:
        stages: that it runs.
        make: makes the stages that it runs, in their place, each time that it is started.
    """
    names = tuple(WorkerSpec(stage.name, "", "", None, ()) for stage in stages)
    spec = ApartSpec("made", names, None)
    threads = ApartThreads(lambda _: Pipeline(stages if make is None else make()))
    shapes = {stage.name: stage for stage in stages}
    pipeline, runner = build_apart(spec, shapes, PATIENCE_S, threads.connect)
    with patch.object(omni_module, "_started_apart", lambda *_: (pipeline, runner, None)):
        return Omni(PipelineConfig.load("two_step"), apart=True)

"""Messages between a worker in another process and its link, which wrap commands and events."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from engine import SamplingParams
from engine.interface.placed_error import KeyPath
from stages.remote.worker_log import Logged
from stages.stage import StageStats
from stages.trace_events import Traced
from stages.worker.messages import Command, Event, StreamedEdge


@dataclass(frozen=True, slots=True)
class StageSpec:
    """Everything that a worker needs to build one of its stages; code is referenced by name.

    Attributes:
        config: its ``StageConfig`` as JSON, with the resolved paths of models.
        kind: import name of the config's class, whose import registers the kind.
        transform: import name of the function that makes its prompts; None for a root.
        edges: outgoing streamed edges.
        is_shown: true if the user gets its tensors or audio.
    """

    name: str
    config: str
    kind: str
    transform: str | None
    edges: tuple[StreamedEdge, ...]
    is_shown: bool = False


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker, which runs one stage, or several by turns.

    Attributes:
        name: name of the worker; that of its stage, if it has only one.
        stages: its stages, each after all stages that feed it.
        threads: number of CPU threads for computation.
        log_level: ``logging`` level below which log records are not forwarded.
        tensor_transport: Ray's name of the transport for direct tensor transfers; None for none.
    """

    name: str
    stages: tuple[StageSpec, ...]
    replica: int = 0
    num_replicas: int = 1
    threads: int = 1
    is_traced: bool = False
    log_level: int = logging.WARNING
    tensor_transport: str | None = None

    @property
    def label(self) -> str:
        """Name of its process and its threads."""
        return self.name if self.num_replicas == 1 else f"{self.name}[{self.replica}]"

    @property
    def called(self) -> str:
        """Its name in error messages."""
        return f"{'stage' if len(self.stages) == 1 else 'worker'} {self.label!r}"


@dataclass(frozen=True, slots=True)
class StageFacts:
    """Properties of a built stage; see ``Stage``."""

    hidden_size: int | None
    dtype: str | None
    sampling: SamplingParams | None
    seed: int | None
    takes_chunks: bool
    gives_chunks: bool
    speakers: tuple[str, ...] | None
    has_cache: bool
    enable_prefix_caching: bool
    description: Mapping[str, Any]


class Built(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The worker's stages are built, and it accepts commands."""

    facts: Mapping[str, StageFacts]


class NotBuilt(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A stage cannot be built; the error contains its name. The worker ends."""

    error: str


class GaveUp(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A stage is unusable; the worker ends, without reporting about its remaining requests."""

    reason: str


class Call(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Method call on one stage, or on all; see :func:`~stages.remote.worker.answer_call`."""

    number: int
    stage: str | None
    method: str
    arguments: tuple[Any, ...] = ()


class Returned(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Result of the call with the same number.

    Attributes:
        stats: counters of each stage, if requested.
        error_place: None unless it is a ``ValueError``; the place of a
            :class:`~engine.interface.placed_error.PlacedError`, else ``()``.
    """

    number: int
    stats: Mapping[str, StageStats] | None = None
    error: str | None = None
    error_place: KeyPath | None = None


class Commands(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Commands to one stage that arrive together."""

    stage: str
    commands: tuple[Command, ...]


class Events(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Events of one turn of a worker, by stage, with the counters of stages that finished a
    request, so that its work is counted even if the worker dies. Empty events are a heartbeat."""

    events: Mapping[str, tuple[Event | Traced, ...]]
    stats: Mapping[str, StageStats] = {}


class Idle(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The worker makes no progress, after executing the first ``num_commands`` commands."""

    num_commands: int


LinkMessage: TypeAlias = Commands | Call
"""Messages to a worker."""

WorkerMessage: TypeAlias = Built | NotBuilt | GaveUp | Returned | Events | Idle | Logged
"""Messages from a worker."""

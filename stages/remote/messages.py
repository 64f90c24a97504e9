"""Messages between a worker in another process and its link, around commands and events."""

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
    """All that a worker needs to build one of its stages; all of it is found by name.

    Attributes:
        config: its ``StageConfig`` as JSON, with models where they are.
        kind: import name of the config's class, whose import makes the kind known.
        transform: import name of what makes its prompts; None for a root.
        edges: the streamed edges that leave it.
        is_shown: whether its user gets tensors or sound of it.
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
        name: of the worker; of its stage, if it has one.
        stages: what it builds, each after all that feed it.
        threads: CPU threads that it computes with.
        log_level: of ``logging``, below which it reports nothing of what it logs.
        tensor_transport: by which it hands on tensors directly, in Ray's words; None for none.
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
        """The name of its process and its threads."""
        return self.name if self.num_replicas == 1 else f"{self.name}[{self.replica}]"

    @property
    def called(self) -> str:
        """Its name in messages."""
        return f"{'stage' if len(self.stages) == 1 else 'worker'} {self.label!r}"


@dataclass(frozen=True, slots=True)
class StageFacts:
    """The properties of a stage that is built; see ``Stage``."""

    hidden_size: int | None
    dtype: str | None
    sampling: SamplingParams | None
    seed: int | None
    takes_chunks: bool
    gives_chunks: bool
    speakers: tuple[str, ...] | None
    has_cache: bool
    enable_prefix_caching: bool
    final_output_kinds: tuple[str, ...]
    description: Mapping[str, Any]


class Built(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The worker's stages are built, and it takes commands."""

    facts: Mapping[str, StageFacts]


class NotBuilt(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A stage cannot be built; the error has its name. The worker ends."""

    error: str


class GaveUp(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A stage can be used no more; the worker ends, and reports nothing of what it had."""

    reason: str


class Call(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Call a method of a stage, or of all; see :func:`~stages.remote.worker.answer_call`."""

    number: int
    stage: str | None
    method: str
    arguments: tuple[Any, ...] = ()


class Returned(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to the call of a number.

    Attributes:
        stats: counters of each stage, if these were asked for.
        error_place: of a :class:`~engine.interface.placed_error.PlacedError`, which is one of
            type ``ValueError`` here.
    """

    number: int
    stats: Mapping[str, StageStats] | None = None
    error: str | None = None
    error_type: str = ""
    error_place: KeyPath = ()


class Commands(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Commands to one stage, which arrive together."""

    stage: str
    commands: tuple[Command, ...]


class Events(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What happened in one turn of a worker, by stage, with the counters of stages that are done
    with a request: should the worker die, its work has been counted. One without events is a sign
    of life."""

    events: Mapping[str, tuple[Event | Traced, ...]]
    stats: Mapping[str, StageStats] = {}


class Idle(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Nothing moves any more, with the first ``num_commands`` done."""

    num_commands: int


LinkMessage: TypeAlias = Commands | Call
"""Messages to a worker."""

WorkerMessage: TypeAlias = Built | NotBuilt | GaveUp | Returned | Events | Idle | Logged
"""Messages from a worker."""

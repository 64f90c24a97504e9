"""What crosses between a worker in another process and its link, around commands and events."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from engine import SamplingParams
from engine.interface.placed_error import KeyPath
from stages.remote.worker_log import Logged
from stages.stage import StageOutput, StageStats
from stages.trace_events import Traced
from stages.worker.messages import Chunk, Command, Event, StreamedEdge

__all__ = [
    "Beat",
    "Built",
    "Call",
    "GaveUp",
    "Grown",
    "Idle",
    "News",
    "NotBuilt",
    "Orders",
    "Returned",
    "StageFacts",
    "WorkerMessage",
    "WorkerSpec",
]


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker needs to build its stage; all of it is found by name.

    Attributes:
        name: of the stage.
        config: its ``StageConfig`` as JSON, with models where they are.
        kind: import name of the config's class, whose import makes the kind known.
        transform: import name of what makes its prompts; None for a root.
        edges: the streamed edges that leave it.
        replica: which of the stage's workers it is, from 0.
        num_replicas: how many there are.
        threads: CPU threads that it computes with.
        is_traced: whether it tells what it does when.
        log_level: of ``logging``, below which it tells nothing of what it logs.
        tensor_transport: by which it hands on tensors directly, in Ray's words; None for none.
        is_shown: whether its user gets tensors or sound of it.
    """

    name: str
    config: str
    kind: str
    transform: str | None
    edges: tuple[StreamedEdge, ...]
    replica: int = 0
    num_replicas: int = 1
    threads: int = 1
    is_traced: bool = False
    log_level: int = logging.WARNING
    tensor_transport: str | None = None
    is_shown: bool = False

    @property
    def label(self) -> str:
        """What its process and its threads are called."""
        return self.name if self.num_replicas == 1 else f"{self.name}[{self.replica}]"

    @property
    def called(self) -> str:
        """What the worker is one of, in messages."""
        return f"stage {self.label!r}"

    @property
    def stage_names(self) -> tuple[str, ...]:
        """What it runs."""
        return (self.name,)


@dataclass(frozen=True, slots=True)
class StageFacts:
    """What a stage says of itself once it is built; see the properties of ``Stage``.

    Attributes:
        description: see ``Stage.describe``.
    """

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


@dataclass(frozen=True, slots=True)
class Built:
    """What the worker runs is there, and commands are taken.

    Attributes:
        facts: of each of its stages.
    """

    facts: Mapping[str, StageFacts]


@dataclass(frozen=True, slots=True)
class NotBuilt:
    """The stage cannot be built; the worker ends.

    Attributes:
        error: why.
        is_told: whether the configuration is at fault, and not the code.
    """

    error: str
    is_told: bool


@dataclass(frozen=True, slots=True)
class GaveUp:
    """The stage can be used no more; the worker ends, and tells nothing of what it had.

    Attributes:
        reason: why.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Call:
    """Ask the stage something.

    Attributes:
        number: of this call.
        method: of :class:`~stages.remote.worker_main.WorkerCalls`.
        arguments: what it is given.
    """

    number: int
    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Returned:
    """What a call gave.

    Attributes:
        number: of the call.
        value: None after an error.
        error: what it raised, as text.
        error_type: the name of its class.
        error_place: of a :class:`~engine.interface.placed_error.PlacedError`, which is one of
            type ``ValueError`` here.
    """

    number: int
    value: Any = None
    error: str | None = None
    error_type: str = ""
    error_place: KeyPath = ()


@dataclass(frozen=True, slots=True)
class Grown:
    """A :class:`~stages.worker.messages.Moved` of an output that is not finished, as it grew.

    Attributes:
        ticket: of the stay.
        output: with the ``token_ids`` and ``logprobs`` that are new, and no ``text`` but ``delta``;
            its ``completions`` are there only if there are several.
        has_text: whether there is a text that ``delta`` is of.
        num_completions: that there are.
        chunks: what is due on the streamed edges.
    """

    ticket: int
    output: StageOutput
    has_text: bool
    num_completions: int = 0
    chunks: tuple[Chunk, ...] = ()


@dataclass(frozen=True, slots=True)
class Orders:
    """Commands that arrive together."""

    commands: tuple[Command, ...]


@dataclass(frozen=True, slots=True)
class News:
    """What happened in one turn of a worker."""

    events: tuple[Event | Grown | Traced, ...]


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing moves any more, with the first ``num_commands`` done."""

    num_commands: int


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life.

    Attributes:
        stats: what stages of the worker have counted.
    """

    stats: Mapping[str, StageStats]


WorkerMessage: TypeAlias = Built | NotBuilt | GaveUp | Returned | News | Idle | Beat | Logged
"""All that a worker says."""

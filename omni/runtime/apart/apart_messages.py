"""What crosses between a pipeline in a process of its own and its user."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from engine import FinishReason, RequestMetrics
from omni.requests.request import OmniRequest
from omni.requests.stage_time import StageTime
from stages import StageOutput
from stages.remote.channel import wire_codec
from stages.remote.codec import Codec
from stages.remote.control import Grown, WorkerSpec

__all__ = [
    "AbortById",
    "ApartSpec",
    "Discard",
    "Outputs",
    "Piece",
    "Shown",
    "ShownOutput",
    "Submission",
    "Submit",
    "apart_codec",
]


@dataclass(frozen=True, slots=True)
class ApartSpec:
    """What the process needs to build its pipeline.

    Attributes:
        name: of the pipeline.
        stages: what a worker of each would be told, each after all that feed it.
        speaker: whose voice answers requests that name none.
        voices: other names of voices.
        threads: CPU threads of stages that do not say how many they take.
        log_level: of ``logging``, below which it tells nothing of what it logs.
    """

    name: str
    stages: tuple[WorkerSpec, ...]
    speaker: str | None
    voices: Mapping[str, str] = field(default_factory=dict)
    threads: int = 1
    log_level: int = logging.WARNING

    @property
    def label(self) -> str:
        """What the process and its threads are called."""
        return self.name

    @property
    def called(self) -> str:
        """What it is, in messages."""
        return f"pipeline {self.name!r}"

    @property
    def stage_names(self) -> tuple[str, ...]:
        """What it runs."""
        return tuple(stage.name for stage in self.stages)

    @property
    def is_traced(self) -> bool:
        """Whether it tells what it does when: its own runtime would have to write it."""
        return False


@dataclass(frozen=True, slots=True)
class Submission:
    """One request.

    Attributes:
        number: that its outputs come with; its id alone would not tell it from another's.
        request: with its id.
    """

    number: int
    request: OmniRequest


@dataclass(frozen=True, slots=True)
class Submit:
    """Run requests, which begin together."""

    submissions: tuple[Submission, ...]


@dataclass(frozen=True, slots=True)
class Discard:
    """Nobody waits for these requests any more."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AbortById:
    """End a request, which gets a last output."""

    request_id: str


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """What a stage's output grew by, where that has nothing else to tell than most have.

    It is packed in C, unlike what codecs know: these are nearly all that is told.

    Attributes:
        finished, delta, finish_reason, num_prompt_tokens, num_cached_tokens, metrics: as of the
            :class:`~stages.stage_output.StageOutput`.
        token_ids: those that are new.
        has_text: whether there is a text that ``delta`` is of.
        num_completions: none or one.
        sound: the samples of its ``audio_delta``, as bytes; None if it has none. If it is finished,
            its ``audio`` is all sound that was told.
        sampling_rate: of the sound.
    """

    finished: bool
    delta: str
    token_ids: tuple[int, ...]
    has_text: bool
    num_completions: int
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    num_cached_tokens: int
    metrics: RequestMetrics
    sound: bytes | None
    sampling_rate: int


Shown: TypeAlias = Piece | StageOutput | Grown | None
"""An output of a stage: a piece; a whole one, if it is finished; what an unusual one grew by; None
for one that is as it was."""


class ShownOutput(msgspec.Struct, frozen=True, array_like=True):
    """An :class:`~omni.requests.request.OmniOutput`, as it differs from the one before.

    Attributes:
        number: of the request.
        stages: likewise; a number stands for a place in what is beside it.
        finished, error, refused, timeline: likewise.
    """

    number: int
    stages: dict[str, Piece | int | None]
    finished: bool
    error: str | None = None
    refused: bool = False
    timeline: tuple[StageTime, ...] = ()


@dataclass(frozen=True, slots=True)
class Outputs:
    """What there is to tell after one turn.

    Attributes:
        packed: of :class:`ShownOutput`, in order.
        beside: for each of them, what is no piece.
    """

    packed: bytes
    beside: tuple[tuple[StageOutput | Grown, ...], ...]


def apart_codec() -> Codec:
    """A codec that knows all of these, and what workers say."""
    codec = wire_codec()
    for kind in (ApartSpec, OmniRequest, Submission, Submit, Discard, AbortById, Outputs):
        codec.register(kind)
    return codec

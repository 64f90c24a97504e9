"""Requests to a pipeline, and their outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from engine import Prompt, SamplingParams
from engine.interface.arguments import check_argument
from engine.interface.outputs import OutputDelta
from stages import StageOutput
from stages.stage_output import OutputAccumulator


@dataclass(frozen=True, slots=True)
class StageTime:
    """Timing of a request in one stage; times are those of ``time.monotonic`` in this process.

    Attributes:
        entered_s: time at which the request was passed to the stage.
        ended_s: time at which the stage finished it; None while it is there.
        queue_s: seconds it waited there for its first step; None if unknown.
        first_token_s: seconds from its arrival there to its first token; likewise.
        num_prompt_tokens: number of tokens of the stage's input.
        num_cached_tokens: number of these that were prefix hits.
        num_preemptions: number of times it was preempted and lost its blocks.
        prefix_miss: reason why no more of its input was cached; see :class:`engine.RequestMetrics`.
    """

    stage: str
    entered_s: float
    ended_s: float | None = None
    queue_s: float | None = None
    first_token_s: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_tokens: int = 0
    num_preemptions: int = 0
    prefix_miss: str | None = None


@dataclass(frozen=True, slots=True)
class OmniRequest:
    """One request to a pipeline.

    Attributes:
        prompt: input of every root stage.
        request_id: unique among the running requests; None generates one.
        sampling: ``stage name -> parameters``: a ``SamplingParams`` replaces the stage's own, a
            mapping changes only the fields that it names.
        priority: lower runs earlier; equal priorities run first come, first served.
        cache_salt: only requests with the same salt share cached blocks.
        speaker: voice of the answer; None uses that of the pipeline, or else of the checkpoint.

    Raises:
        ValueError: a field has the wrong type; checked here so that other requests are unaffected.
    """

    prompt: Prompt
    request_id: str | None = None
    sampling: Mapping[str, SamplingParams | Mapping[str, Any]] = field(default_factory=dict)
    priority: int = 0
    cache_salt: str | None = None
    speaker: str | None = None

    def __post_init__(self) -> None:
        for name in ("request_id", "cache_salt", "speaker"):
            check_argument(name, getattr(self, name), str | None, "str | None")
        check_argument("priority", self.priority, int, "int")
        check_argument("sampling", self.sampling, Mapping, "Mapping")
        for stage, override in self.sampling.items():
            if not isinstance(stage, str):
                raise ValueError(f"sampling must name stages by str, got {stage!r}")
            name, kinds = f"sampling for stage {stage!r}", SamplingParams | Mapping
            check_argument(name, override, kinds, "SamplingParams or a mapping of its fields")


Requests: TypeAlias = Prompt | OmniRequest | Sequence[Prompt | OmniRequest]
"""One request or several; a prompt is a request with default settings."""


def as_requests(requests: Requests) -> list[OmniRequest]:
    """Convert a user's argument to a list of requests; ``ValueError`` if not :data:`Requests`."""
    given: object = requests
    # A mapping would be accepted too, with each of its keys as a prompt.
    if isinstance(given, Mapping | bytes) or not isinstance(given, Iterable | Prompt | OmniRequest):
        raise ValueError(
            "requests must be a prompt (such as a str, TextPrompt or ChatPrompt), an OmniRequest, "
            f"or a list of these, got {type(given).__name__}"
        )
    several: Iterable[Prompt | OmniRequest]
    several = [requests] if isinstance(requests, Prompt | OmniRequest) else requests
    return [each if isinstance(each, OmniRequest) else OmniRequest(each) for each in several]


@dataclass(frozen=True, slots=True)
class OmniOutput:
    """The state of one request after an update.

    Attributes:
        request_id: as in the request, or the generated one.
        stages: the outputs, so far, of the final stages; stages without any output are missing.
            ``delta`` and ``audio_delta`` hold only what is new in this output.
        finished: true if no output follows.
        error: why the request failed or was aborted; ``stages`` then holds the partial outputs.
        refused: true if it failed because a stage, or the code that makes its prompt, does not
            accept it as requested: an error of the client.
        timeline: its timing in all stages, including those that are not final; set whenever it
            has entered or left one, else empty.
    """

    request_id: str
    stages: Mapping[str, StageOutput]
    finished: bool
    error: str | None = None
    refused: bool = False
    timeline: tuple[StageTime, ...] = ()


@dataclass(frozen=True, slots=True)
class OmniDelta:
    """An update of one request: what is new since the previous one.

    Attributes:
        request_id: as in the request, or the generated one.
        deltas: deltas of the final stages, each with the stage's name, in order of arrival.
        finished, error, refused, timeline: see :class:`OmniOutput`.
    """

    request_id: str
    deltas: tuple[tuple[str, OutputDelta], ...] = ()
    finished: bool = False
    error: str | None = None
    refused: bool = False
    timeline: tuple[StageTime, ...] = ()


class OmniAccumulator:
    """Accumulates the deltas of one request; outputs list the final stages in the given order."""

    def __init__(self, final_stages: Sequence[str]) -> None:
        self._final_stages = final_stages
        self._stages: dict[str, OutputAccumulator] = {}
        self._outputs: dict[str, StageOutput] = {}
        self._moved: set[str] = set()
        self._last: OmniDelta | None = None

    def add(self, delta: OmniDelta) -> None:
        """Add a delta."""
        self._last = delta
        for name, each in delta.deltas:
            if name not in self._stages:
                self._stages[name] = OutputAccumulator(delta.request_id, name)
            self._stages[name].add(each)
            self._moved.add(name)

    def skip(self) -> None:
        """Mark all deltas so far as delivered: the next output does not report them as new."""
        for name in self._moved:
            self._stages[name].skip()

    def output(self) -> OmniOutput:
        """Return the request's current state; its deltas cover the time since the previous call."""
        last, stages = self._last, {}
        assert last is not None, "a delta has come"
        for name in self._final_stages:
            if name in self._moved:
                stages[name] = self._stages[name].output()
            elif name in self._outputs:
                stages[name] = replace(self._outputs[name], delta="", audio_delta=None)
        self._outputs = stages
        self._moved.clear()
        about = (last.finished, last.error, last.refused, last.timeline)
        return OmniOutput(last.request_id, stages, *about)

"""Requests to a pipeline, and its outputs."""

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
    """A request's stay in one stage; times are those of ``time.monotonic`` in this process.

    Attributes:
        entered_s: when it was handed to the stage.
        ended_s: when the stage was done with it; None while it is there.
        queue_s: how long it waited there for its first step; None if that is not known.
        first_token_s: how long after its arrival there the first token came; likewise.
        num_prompt_tokens: of the stage's input.
        num_cached_tokens: of these, those that the cache saved computing.
        num_preemptions: how often it had to give its blocks back.
        prefix_miss: why no more of its input was cached; see :class:`engine.RequestMetrics`.
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
        prompt: what every root stage gets.
        request_id: unique among the requests that are under way; None has one made up.
        sampling: ``stage name -> parameters``: a ``SamplingParams`` replaces the stage's own, a
            mapping changes only the fields that it names.
        priority: lower runs earlier; equal priorities run first come, first served.
        cache_salt: only requests with the same salt share cached blocks.
        speaker: whose voice answers; None leaves it to the pipeline, which may leave it to the
            checkpoint.

    Raises:
        ValueError: a field is of the wrong type; found here, where it cannot hurt other requests.
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
"""One request or several; a prompt is a request with nothing else to say."""


def as_requests(requests: Requests) -> list[OmniRequest]:
    """List what a user gave as requests; ``ValueError``: it is none of :data:`Requests`."""
    given: object = requests
    # A mapping would run as well: each of its keys as a prompt.
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
    """The state of one request after something moved.

    Attributes:
        request_id: as in the request, or the one made up for it.
        stages: the outputs, so far, of the stages that are final; a stage that has not put
            anything out is not in it. ``delta`` and ``audio_delta`` hold only what is new in
            this output.
        finished: nothing follows.
        error: why the request failed or was cut short; ``stages`` then holds what there was.
        refused: whether it failed because a stage, or what makes its prompt, could not take it as
            it was asked for: it is the client's to fix.
        timeline: its time in all stages, those included that the user gets nothing of; given
            whenever it has entered or left one, else empty.
    """

    request_id: str
    stages: Mapping[str, StageOutput]
    finished: bool
    error: str | None = None
    refused: bool = False
    timeline: tuple[StageTime, ...] = ()


@dataclass(frozen=True, slots=True)
class OmniDelta:
    """What is new of one request after something moved.

    Attributes:
        request_id: as in the request, or the one made up for it.
        deltas: what is new of the stages that are final, each with the stage's name, in the order
            in which it came.
        finished, error, refused, timeline: see :class:`OmniOutput`.
    """

    request_id: str
    deltas: tuple[tuple[str, OutputDelta], ...] = ()
    finished: bool = False
    error: str | None = None
    refused: bool = False
    timeline: tuple[StageTime, ...] = ()


class OmniAccumulator:
    """Adds up the deltas of one request; outputs name the final stages in the order given."""

    def __init__(self, final_stages: Sequence[str]) -> None:
        self._final_stages = final_stages
        self._stages: dict[str, OutputAccumulator] = {}
        self._outputs: dict[str, StageOutput] = {}
        self._moved: set[str] = set()
        self._last: OmniDelta | None = None

    def add(self, delta: OmniDelta) -> None:
        """Add what is new."""
        self._last = delta
        for name, each in delta.deltas:
            if name not in self._stages:
                self._stages[name] = OutputAccumulator(delta.request_id, name)
            self._stages[name].add(each)
            self._moved.add(name)

    def skip(self) -> None:
        """Count what has come so far as delivered: the next output does not have it as new."""
        for name in self._moved:
            self._stages[name].skip()

    def output(self) -> OmniOutput:
        """The request's state now; new in it is what came since this was last called."""
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

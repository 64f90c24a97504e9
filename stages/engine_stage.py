"""Base class of stages that wrap an engine."""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

from engine import FinishReason
from engine.interface.config import EngineConfig, GeneratorConfig
from engine.interface.log_fields import package_logger
from engine.interface.outputs import OutputDelta
from stages.stage import Prepared, Stage, StageRequest, StageStats
from stages.stage_config import StageConfig
from stages.stage_output import OutputAccumulator, StageOutput

if TYPE_CHECKING:
    import torch

    from engine import Engine, Prompt, SamplingParams
    from engine.interface.engine import PreparedRequest

_logger = package_logger(__name__)


class EngineStage(Stage):
    """A stage that wraps one engine.

    Attributes:
        engine: runs the model; set by the subclass after checking its arguments. Missing after a
            failed :meth:`rebuild`.
    """

    engine: Engine[Any]
    # Default parameters of requests; None for an engine that generates no tokens.
    _sampling: SamplingParams | None = None
    # Counters of previous engines of this stage, and their caching setting.
    _past_stats: StageStats = StageStats()
    _past_caching: bool | None = None
    # True if the previous step failed as a whole.
    _has_failed: bool = False

    def __init__(self, name: str, **graph: Any) -> None:
        super().__init__(name, **graph)
        # For requests of a caller that uses step() instead of step_deltas().
        self._accumulators: dict[str, OutputAccumulator] = {}

    def _configuration(
        self, kind: type[StageConfig], config: EngineConfig | GeneratorConfig, **own: Any
    ) -> StageConfig:
        """Build the configuration of a stage that was constructed from arguments."""
        settings = type(kind.model_fields["engine"].default)
        given = {
            "kind": get_args(kind.model_fields["kind"].annotation)[0],
            "model": config.model,
            "part": config.part,
            "engine": settings(**config.model_dump(include=set(settings.model_fields))),
            "inputs": self.inputs,
            "final_output": self.final_output,
        }
        return kind.model_validate(given | own)

    def _build_engine(self) -> Engine[Any]:
        """Build the configured engine; must be defined by the subclass."""
        raise NotImplementedError(f"a {type(self).__name__} does not say how to build its engine")

    @property
    def is_broken(self) -> bool:
        """True if its engine was interrupted and could not restart."""
        return hasattr(self, "engine") and self.engine.is_broken

    def rebuild(self) -> None:
        """Drop the engine and build a new one; see :class:`~stages.stage.Stage`."""
        self.ownership.check()
        if hasattr(self, "engine"):
            self._past_stats = self.engine.stats().following(self._past_stats).plus(num_restarts=1)
            self._past_caching = self.engine.enable_prefix_caching
            # Two engines may not fit into memory. gc.collect() frees reference cycles, too.
            del self.engine
        self._accumulators.clear()
        gc.collect()
        self.engine = self._build_engine()
        if self._past_caching is not None:
            self.engine.enable_prefix_caching = self._past_caching

    @property
    def hidden_size(self) -> int | None:
        """Width of its hidden states and input embeddings; None if it has none."""
        return self.engine.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        """Element type of weights and activations."""
        return self.engine.dtype

    def add_request(self, request: StageRequest) -> None:
        """Queue a request; see :class:`~stages.stage.Stage`."""
        self.ownership.check()
        self.engine.add(self._prepare(self.engine, request))

    def prepare(self, request: StageRequest) -> Prepared:
        """Tokenize, decode and compute features; see :class:`~stages.stage.Stage`."""
        # There is no engine while the stage is rebuilt in its own thread.
        engine = getattr(self, "engine", None)
        # A subclass that overrides add_request prepares requests there.
        if engine is None or type(self).add_request is not EngineStage.add_request:
            return Prepared(request)
        return Prepared(request, self._prepare(engine, request))

    def add(self, prepared: Prepared) -> None:
        """Queue a request; if another engine has prepared it, prepare it again."""
        self.ownership.check()
        content = prepared.content
        if content is not None and content.engine is self.engine:
            self.engine.add(content)
        else:
            self.add_request(prepared.request)

    def _prepare(self, engine: Engine[Any], request: StageRequest) -> PreparedRequest:
        return engine.prepare(
            request.request_id,
            self._engine_prompt(request),
            self._sampling if request.sampling is None else request.sampling,
            priority=request.priority,
            cache_salt=request.cache_salt,
            order=request.order,
        )

    def _engine_prompt(self, request: StageRequest) -> Prompt:
        """Return the prompt for the engine."""
        return request.prompt

    @property
    def takes_chunks(self) -> bool:
        """True if the engine begins a request before its prompt is complete."""
        return self.engine.takes_chunks

    def extend_request(self, request_id: str, prompt: Prompt) -> None:
        """Append the next chunk of a prompt; ignored if the request has ended."""
        if not self.takes_chunks:
            super().extend_request(request_id, prompt)
        self.engine.extend_request(request_id, prompt)

    def needs_input(self, request_id: str) -> bool:
        """Return True if a live request cannot continue before its next chunk."""
        return self.engine.needs_input(request_id)

    def step(self) -> list[StageOutput]:
        """Run one engine step over its requests; see :meth:`step_deltas`."""
        outputs = []
        for delta in self.step_deltas():
            request_id = delta.request_id
            accumulator = self._accumulators.get(request_id)
            if accumulator is None:
                accumulator = OutputAccumulator(request_id, self.name)
                self._accumulators[request_id] = accumulator
            accumulator.add(delta)
            outputs.append(accumulator.output())
            if delta.finished:
                del self._accumulators[request_id]
        return outputs

    def step_deltas(self) -> list[OutputDelta]:
        """Run one engine step over its requests; return the deltas of those with progress.

        After a step that failed as a whole, the engine restarts all requests; a single failure is
        only a step without outputs.

        Raises:
            Exception: the engine's error, if it occurred twice in a row or the engine is broken.
        """
        self.ownership.check()
        try:
            deltas = self.engine.step_deltas()
        except Exception:  # of any kind: the engine has restarted, which is tolerated once
            has_failed, self._has_failed = self._has_failed, not self._has_failed
            if has_failed or self.is_broken:
                raise
            _logger.exception("a step of stage %r failed; its requests begin again", self.name)
            return []
        self._has_failed = False
        return [self._finish_delta(delta) if delta.finished else delta for delta in deltas]

    def _finish_delta(self, delta: OutputDelta) -> OutputDelta:
        """Add the tensors to a last delta; if that fails, fail only this request."""
        try:
            return select_tensors(self._with_tensors(delta), self.outputs)
        except Exception as error:  # the outputs of other requests must not be lost
            request_id = delta.request_id
            about = {"request_id": request_id}
            _logger.exception("the output of request %r cannot be made", request_id, extra=about)
            return OutputDelta(
                request_id,
                finished=True,
                finish_reason=FinishReason.ERROR,
                error=f"its output cannot be made: {type(error).__name__}: {error}",
                num_completions=delta.num_completions,
            )

    def _with_tensors(self, delta: OutputDelta) -> OutputDelta:
        """Add all tensors that the stage computes to the engine's last delta of a request."""
        return delta

    def abort(self, request_id: str) -> None:
        """Drop a request and free its blocks."""
        self._accumulators.pop(request_id, None)
        self.engine.abort(request_id)

    @property
    def has_unfinished_requests(self) -> bool:
        """True if it has requests, including ones that wait for input."""
        return self.engine.has_unfinished_requests

    @property
    def enable_prefix_caching(self) -> bool:
        """True if requests reuse cached computations."""
        return self.engine.enable_prefix_caching

    @enable_prefix_caching.setter
    def enable_prefix_caching(self, value: bool) -> None:
        self.engine.enable_prefix_caching = value

    def reset_prefix_cache(self) -> None:
        """Drop all cached computations, and their mirrored rows."""
        self.engine.reset_prefix_cache()

    def stats(self) -> StageStats:
        """Return counters since the stage was built, including those of previous engines."""
        counted = self._past_stats
        if hasattr(self, "engine"):
            counted = self.engine.stats().following(counted)
        return counted.plus(
            num_transfers=self.num_transfers, transferred_bytes=self.transferred_bytes
        )

    def describe(self) -> Mapping[str, Any]:
        """Describe the engine's resolved settings and reserved memory."""
        return {"engine": type(self.engine).__name__, **self.engine.describe()}

    def check_integrity(self) -> None:
        """Raise if the engine lost blocks, or audio of its codes."""
        self.engine.check_integrity()

    def close(self) -> None:
        """Close the engine, if there is one."""
        self.ownership.close()
        if hasattr(self, "engine"):
            self.engine.close()


def select_tensors(delta: OutputDelta, names: Collection[str] | None) -> OutputDelta:
    """Keep the named tensors of a last delta, or all; fail the request if one is missing.

    A missing tensor must not pass silently: a later stage would run without a declared input.
    """
    if names is None or not delta.finished or delta.failure is not None:
        return delta
    missing = [name for name in names if name not in delta.tensors]
    if missing:
        return replace(
            delta,
            tensors={},
            finish_reason=FinishReason.ERROR,
            error=(
                f"the model made no tensor named {', '.join(map(repr, missing))}, which the "
                f"stage's outputs ask for; it made {sorted(delta.tensors)}"
            ),
        )
    if len(delta.tensors) == len(names):
        return delta
    return replace(delta, tensors={name: delta.tensors[name] for name in names})

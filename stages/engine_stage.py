"""What stages around an engine have in common."""

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
    """A stage around one engine.

    Attributes:
        engine: runs the model; set by the kind of stage, after it has checked what it is given.
            There is none after a :meth:`rebuild` that failed.
    """

    engine: Engine[Any]
    # Of requests that bring none; None to an engine that generates no tokens.
    _sampling: SamplingParams | None = None
    # What engines counted that this stage had before, and what of them was set since.
    _counted: StageStats = StageStats()
    _caching: bool | None = None
    # Whether the step before was interrupted as a whole.
    _has_failed: bool = False

    def __init__(self, name: str, **graph: Any) -> None:
        super().__init__(name, **graph)
        # Of requests of a caller that drives the stage itself.
        self._accumulators: dict[str, OutputAccumulator] = {}

    def _configuration(
        self, kind: type[StageConfig], config: EngineConfig | GeneratorConfig, **own: Any
    ) -> StageConfig:
        """The configuration of such a stage, which was made of arguments: its engine's, and own."""
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
        """Build the configured engine; ``NotImplementedError``: the kind does not say how."""
        raise NotImplementedError(f"a {type(self).__name__} does not say how to build its engine")

    @property
    def is_broken(self) -> bool:
        """Whether its engine was interrupted and could not restart."""
        return hasattr(self, "engine") and self.engine.is_broken

    def rebuild(self) -> None:
        """Let go of the engine and build another one; see :class:`~stages.stage.Stage`."""
        self.ownership.check()
        if hasattr(self, "engine"):
            self._counted = self.engine.stats().following(self._counted).plus(num_restarts=1)
            self._caching = self.engine.enable_prefix_caching
            # Two engines may be more than the memory holds. What is in a circle is freed, too.
            del self.engine
        self._accumulators.clear()
        gc.collect()
        self.engine = self._build_engine()
        if self._caching is not None:
            self.engine.enable_prefix_caching = self._caching

    @property
    def hidden_size(self) -> int | None:
        """Width of its hidden states and of the embeddings it takes; None if it has none."""
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
        # While the stage is rebuilt in its own thread there is no engine.
        engine = getattr(self, "engine", None)
        # A kind of stage with an add_request of its own does everything there.
        if engine is None or type(self).add_request is not EngineStage.add_request:
            return Prepared(request)
        return Prepared(request, self._prepare(engine, request))

    def add(self, prepared: Prepared) -> None:
        """Queue a request; one that another engine has prepared is prepared again."""
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
        """What the engine is given to run."""
        return request.prompt

    @property
    def takes_chunks(self) -> bool:
        """Whether the engine begins a request before all of its prompt is there."""
        return self.engine.takes_chunks

    def extend_request(self, request_id: str, prompt: Prompt) -> None:
        """Hand in the next chunk; one for a request that has ended is ignored."""
        if not self.takes_chunks:
            super().extend_request(request_id, prompt)
        self.engine.extend_request(request_id, prompt)

    def needs_input(self, request_id: str) -> bool:
        """Whether a live request cannot go on before its next chunk comes."""
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
        """Run one engine step over its requests; return what is new of those that moved.

        After a step that was interrupted as a whole all requests begin again in the engine, so that
        one such step is no more than a step without outputs.

        Raises:
            Exception: what the engine raised, if it did so twice in a row, or is broken.
        """
        self.ownership.check()
        try:
            deltas = self.engine.step_deltas()
        except Exception:  # whatever it was, the engine has begun again; once that is good enough
            has_failed, self._has_failed = self._has_failed, not self._has_failed
            if has_failed or self.is_broken:
                raise
            _logger.exception("a step of stage %r failed; its requests begin again", self.name)
            return []
        self._has_failed = False
        return [self._completed(delta) if delta.finished else delta for delta in deltas]

    def _completed(self, delta: OutputDelta) -> OutputDelta:
        """A last delta with its tensors; a request for which they cannot be made fails alone."""
        try:
            return select_tensors(self._with_tensors(delta), self.outputs)
        except Exception as error:  # its neighbours' outputs are emitted once, now or never
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
        """The engine's last delta of a request, with all tensors that the stage makes."""
        return delta

    def abort(self, request_id: str) -> None:
        """Drop a request and free its blocks."""
        self._accumulators.pop(request_id, None)
        self.engine.abort(request_id)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether it has requests, be it that they wait for input."""
        return self.engine.has_unfinished_requests

    @property
    def enable_prefix_caching(self) -> bool:
        """Whether requests reuse what was computed before."""
        return self.engine.enable_prefix_caching

    @enable_prefix_caching.setter
    def enable_prefix_caching(self, value: bool) -> None:
        self.engine.enable_prefix_caching = value

    def reset_prefix_cache(self) -> None:
        """Forget all that was computed, and its mirrored rows."""
        self.engine.reset_prefix_cache()

    def stats(self) -> StageStats:
        """Counters since the stage was built, of the engines that it had before as well."""
        counted = self._counted
        if hasattr(self, "engine"):
            counted = self.engine.stats().following(counted)
        return counted.plus(
            num_transfers=self.num_transfers, transferred_bytes=self.transferred_bytes
        )

    def describe(self) -> Mapping[str, Any]:
        """What the engine resolved and reserved."""
        return {"engine": type(self.engine).__name__, **self.engine.describe()}

    def check_integrity(self) -> None:
        """Raise if the engine lost something: blocks, or sound that its codes stand for."""
        self.engine.check_integrity()

    def close(self) -> None:
        """Close the engine, if there is one."""
        self.ownership.close()
        if hasattr(self, "engine"):
            self.engine.close()


def select_tensors(delta: OutputDelta, names: Collection[str] | None) -> OutputDelta:
    """Keep the named tensors of a last delta, or all; fail the request if one is not there.

    A tensor that was asked for and is missing must not pass silently: a stage behind this one
    would run on less than it was promised.
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

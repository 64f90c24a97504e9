"""The stage that runs one forward pass over its whole input."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import replace

from engine import (
    EncoderEngine,
    EncoderOutput,
    EngineConfig,
    FinishReason,
    LLMEngine,
    RequestOutput,
    SamplingParams,
)
from engine.checkpoints.checkpoint import Checkpoint
from engine.encoder.pooling import Pooling, pool, resolve_pooling
from engine.models.registry import SUPPORTED_ARCHITECTURES
from stages.engine_stage import EngineStage
from stages.stage import StageInputs, StageOutput, StageRequest
from stages.tensor_selection import select_tensors

__all__ = ["EncoderStage"]

_POOLED = "pooled"
_HIDDEN_STATES = "hidden_states"


class EncoderStage(EngineStage):
    """Runs an encoder, and hands on ``hidden_states (n, D)`` and ``pooled (D,)``.

    A bidirectional encoder (BERT and its kin) runs in an ``EncoderEngine``, where a hit is all or
    nothing, because every row depends on the whole input. An embedding model that is built on a
    causal decoder runs in an ``LLMEngine`` that generates nothing, where inputs share prefixes.

    Args:
        name: unique in the pipeline.
        engine: what to build the engine from; the checkpoint decides which engine.
        pooling: how the rows become one: ``auto`` is the checkpoint's own pooler or the mean for
            a bidirectional encoder, and the last token's row for a causal one.
        outputs: of ``hidden_states``, ``pooled`` and what else the model makes, the tensors to
            hand on; None hands on all.
        inputs: the stages that feed this one; None makes it a root.
        final_output: what the user gets.

    Raises:
        ValueError: the engine cannot be built as asked, or the pooling does not fit the model.
    """

    final_output_kinds = ("tensors",)

    def __init__(
        self,
        name: str,
        engine: EngineConfig,
        *,
        pooling: Pooling = "auto",
        outputs: Collection[str] | None = None,
        inputs: StageInputs | None = None,
        final_output: Collection[str] = ("tensors",),
    ) -> None:
        super().__init__(name, inputs=inputs, outputs=outputs, final_output=final_output)
        checkpoint = Checkpoint.open(
            engine.model,
            part=engine.part,
            revision=engine.revision,
            trust_remote_code=engine.trust_remote_code,
        )
        causal = checkpoint.architecture in SUPPORTED_ARCHITECTURES
        runner = _CausalRunner if causal else _BidirectionalRunner
        self._runner: _Runner = runner(engine, pooling, self.outputs)

    @property
    def engine(self) -> EncoderEngine | LLMEngine:
        """The engine that runs the model."""
        return self._runner.engine

    def add_request(self, request: StageRequest) -> None:
        """Queue an input; see :class:`~stages.stage.Stage`."""
        self._runner.add_request(request)

    def step(self) -> list[StageOutput]:
        """Run one forward pass over a batch of its requests."""
        return [
            select_tensors(replace(output, stage=self.name), self.outputs)
            for output in self._runner.step()
        ]


class _Runner(ABC):
    """What differs between the two engines: how a request goes in and what comes out."""

    engine: EncoderEngine | LLMEngine

    @abstractmethod
    def add_request(self, request: StageRequest) -> None: ...

    @abstractmethod
    def step(self) -> list[StageOutput]:
        """Run one step; the outputs' stage is still to be named."""


class _BidirectionalRunner(_Runner):
    def __init__(
        self, config: EngineConfig, pooling: Pooling, outputs: Collection[str] | None
    ) -> None:
        self.engine: EncoderEngine = EncoderEngine(config, output_names=outputs, pooling=pooling)

    def add_request(self, request: StageRequest) -> None:
        self.engine.add_request(
            request.request_id,
            request.prompt,
            priority=request.priority,
            cache_salt=request.cache_salt,
        )

    def step(self) -> list[StageOutput]:
        return [self._stage_output(output) for output in self.engine.step()]

    def _stage_output(self, output: EncoderOutput) -> StageOutput:
        return StageOutput(
            request_id=output.request_id,
            stage="",
            finished=output.finished,
            finish_reason=FinishReason.STOP if output.error is None else FinishReason.ERROR,
            error=output.error,
            num_prompt_tokens=output.num_prompt_tokens,
            num_cached_tokens=output.num_cached_tokens,
            tensors=output.tensors,
            metrics=output.metrics,
        )


class _CausalRunner(_Runner):
    def __init__(
        self, config: EngineConfig, pooling: Pooling, outputs: Collection[str] | None
    ) -> None:
        self._pooling = resolve_pooling("last" if pooling == "auto" else pooling, None)
        self.engine: LLMEngine = LLMEngine(config, output_names=_rows_behind(outputs))

    def add_request(self, request: StageRequest) -> None:
        self.engine.add_request(
            request.request_id,
            request.prompt,
            SamplingParams(max_tokens=0),
            priority=request.priority,
            cache_salt=request.cache_salt,
        )

    def step(self) -> list[StageOutput]:
        return [self._stage_output(output) for output in self.engine.step() if output.finished]

    def _stage_output(self, output: RequestOutput) -> StageOutput:
        completion = output.outputs[0]
        tensors = dict(completion.tensors)
        if _HIDDEN_STATES in tensors:
            tensors[_POOLED] = pool(self._pooling, tensors[_HIDDEN_STATES], None)
        return StageOutput(
            request_id=output.request_id,
            stage="",
            finished=True,
            finish_reason=completion.finish_reason,
            error=output.error,
            num_prompt_tokens=output.num_prompt_tokens,
            num_cached_tokens=output.num_cached_tokens,
            tensors=tensors,
            metrics=output.metrics,
        )


def _rows_behind(outputs: Collection[str] | None) -> tuple[str, ...] | None:
    """The per-token tensors that the wanted outputs are, or are made from."""
    if outputs is None:
        return None
    return tuple(dict.fromkeys(_HIDDEN_STATES if name == _POOLED else name for name in outputs))

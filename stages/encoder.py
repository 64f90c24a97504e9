"""The stage that runs one forward pass over its whole input."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from engine import (
    EncoderEngine,
    EncoderOutput,
    EngineConfig,
    FinishReason,
    LLMEngine,
    RequestOutput,
    SamplingParams,
)
from engine.checkpoint import Checkpoint
from engine.models.registry import SUPPORTED_ARCHITECTURES
from engine.pooling import Pooling, pool, resolve_pooling
from stages.stage import Stage, StageInputs, StageOutput, StageRequest, StageStats
from stages.tensor_selection import select_tensors

__all__ = ["EncoderStage"]

_POOLED = "pooled"
_HIDDEN_STATES = "hidden_states"


class EncoderStage(Stage):
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
            engine.model, revision=engine.revision, trust_remote_code=engine.trust_remote_code
        )
        causal = checkpoint.architecture in SUPPORTED_ARCHITECTURES
        runner = _CausalRunner if causal else _BidirectionalRunner
        self._runner: _Runner = runner(engine, pooling, self.outputs)

    @property
    def engine(self) -> EncoderEngine | LLMEngine:
        """The engine that runs the model."""
        return self._runner.engine

    @property
    def hidden_size(self) -> int:
        """Width of its hidden states and of the embeddings it takes."""
        return self.engine.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        """Element type of weights and activations."""
        dtype: torch.dtype = getattr(torch, self.engine.memory_plan.dtype)
        return dtype

    def add_request(self, request: StageRequest) -> None:
        """Queue an input; see :class:`~stages.stage.Stage`."""
        self._runner.add_request(request)

    def step(self) -> list[StageOutput]:
        """Run one forward pass over a batch of its requests."""
        return [
            select_tensors(replace(output, stage=self.name), self.outputs)
            for output in self._runner.step()
        ]

    def abort(self, request_id: str) -> None:
        """Drop a request and free its blocks."""
        self.engine.abort(request_id)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has work."""
        return self.engine.has_unfinished_requests

    @property
    def enable_prefix_caching(self) -> bool:
        """Whether inputs reuse what was computed before."""
        return self.engine.enable_prefix_caching

    @enable_prefix_caching.setter
    def enable_prefix_caching(self, value: bool) -> None:
        self.engine.enable_prefix_caching = value

    def reset_prefix_cache(self) -> None:
        """Forget all cached outputs."""
        self.engine.reset_prefix_cache()

    def stats(self) -> StageStats:
        """Counters since the engine was built."""
        stats = self.engine.stats()
        return StageStats(
            num_steps=stats.num_steps,
            busy_s=stats.busy_s,
            prompt_tokens=stats.prompt_tokens,
            cached_tokens=stats.cached_tokens,
            generated_tokens=stats.generated_tokens,
        )

    def describe(self) -> Mapping[str, Any]:
        """What the engine resolved and reserved."""
        return {
            "kind": "encoder",
            "engine": type(self.engine).__name__,
            "hidden_size": self.hidden_size,
            "dtype": self.engine.memory_plan.dtype,
            "device": self.engine.memory_plan.device,
            "max_model_len": self.engine.max_model_len,
            "enable_prefix_caching": self.enable_prefix_caching,
            "memory": self.engine.memory_plan.lines(),
        }

    def check_integrity(self) -> None:
        """Raise if blocks are not conserved."""
        self.engine.check_integrity()

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()


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

"""The stage that generates tokens with one decoder model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from engine import EngineConfig, LLMEngine, RequestOutput, SamplingParams
from stages.stage import Stage, StageInputs, StageOutput, StageRequest, StageStats
from stages.tensor_selection import select_tensors

__all__ = ["AutoregressiveStage"]


class AutoregressiveStage(Stage):
    """Generates tokens, and hands on the text, the ids and the per-token tensors.

    Args:
        name: unique in the pipeline.
        engine: what to build the engine from; or an engine that exists, which only this stage may
            use from then on, and which stays its maker's to close.
        sampling: of requests that bring none.
        outputs: names of the tensors to hand on, one row for every token whose forward pass has
            run; None hands on all that the model makes, ``()`` none.
        inputs: the stages that feed this one; None makes it a root.
        final_output: what the user gets.

    Raises:
        ValueError: the engine cannot be built as asked.
    """

    def __init__(
        self,
        name: str,
        engine: EngineConfig | LLMEngine,
        *,
        sampling: SamplingParams | None = None,
        outputs: Collection[str] | None = None,
        inputs: StageInputs | None = None,
        final_output: Collection[str] = ("text",),
    ) -> None:
        super().__init__(name, inputs=inputs, outputs=outputs, final_output=final_output)
        self._sampling = sampling if sampling is not None else SamplingParams()
        self._owns_engine = isinstance(engine, EngineConfig)
        self.engine = (
            LLMEngine(engine, output_names=outputs) if isinstance(engine, EngineConfig) else engine
        )

    @property
    def hidden_size(self) -> int:
        """Width of its hidden states and of prompt embeddings."""
        return self.engine.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        """Element type of weights, activations and cache."""
        dtype: torch.dtype = getattr(torch, self.engine.memory_plan.dtype)
        return dtype

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters of requests that bring none."""
        return self._sampling

    def add_request(self, request: StageRequest) -> None:
        """Queue a request; see :class:`~stages.stage.Stage`."""
        sampling = request.sampling if request.sampling is not None else self._sampling
        self.engine.add_request(
            request.request_id,
            request.prompt,
            sampling,
            priority=request.priority,
            cache_salt=request.cache_salt,
        )

    def step(self) -> list[StageOutput]:
        """Run one engine step over all its requests."""
        return [self._stage_output(output) for output in self.engine.step()]

    def _stage_output(self, output: RequestOutput) -> StageOutput:
        first = output.outputs[0]
        several = len(output.outputs) > 1
        stage_output = StageOutput(
            request_id=output.request_id,
            stage=self.name,
            finished=output.finished,
            text=first.text if self.engine.tokenizer is not None else None,
            delta=first.delta,
            token_ids=first.token_ids,
            finish_reason=first.finish_reason,
            error=output.error,
            num_prompt_tokens=output.num_prompt_tokens,
            num_cached_tokens=output.num_cached_tokens,
            tensors=first.tensors,
            logprobs=first.logprobs,
            completions=tuple(
                (each.text, each.token_ids, each.finish_reason) for each in output.outputs
            )
            if several
            else (),
            metrics=output.metrics,
        )
        return select_tensors(stage_output, self.outputs)

    def abort(self, request_id: str) -> None:
        """Drop a request and free its blocks."""
        self.engine.abort(request_id)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has work."""
        return self.engine.has_unfinished_requests

    @property
    def enable_prefix_caching(self) -> bool:
        """Whether prompts reuse blocks that were computed before."""
        return self.engine.enable_prefix_caching

    @enable_prefix_caching.setter
    def enable_prefix_caching(self, value: bool) -> None:
        self.engine.enable_prefix_caching = value

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks and their mirrored rows."""
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
            "kind": "autoregressive",
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
        """Close the engine if this stage built it."""
        if self._owns_engine:
            self.engine.close()

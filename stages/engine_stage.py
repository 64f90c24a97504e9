"""What stages around an engine have in common: all but how requests go in and outputs come out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from engine import EncoderEngine, LLMEngine
from stages.stage import Stage, StageStats

__all__ = ["EngineStage"]


class EngineStage(Stage):
    """A stage around one engine."""

    @property
    @abstractmethod
    def engine(self) -> LLMEngine | EncoderEngine:
        """The engine that runs the model."""

    @property
    def hidden_size(self) -> int:
        """Width of its hidden states and of the embeddings it takes."""
        return self.engine.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        """Element type of weights and activations."""
        dtype: torch.dtype = getattr(torch, self.engine.memory_plan.dtype)
        return dtype

    def abort(self, request_id: str) -> None:
        """Drop a request and free its blocks."""
        self.engine.abort(request_id)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has work."""
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
        """Counters since the engine was built."""
        stats = self.engine.stats()
        return StageStats(
            num_steps=stats.num_steps,
            busy_s=stats.busy_s,
            prompt_tokens=stats.prompt_tokens,
            cached_tokens=stats.cached_tokens,
            generated_tokens=stats.generated_tokens,
            encoder_runs=stats.encoder_runs,
            encoder_hits=stats.encoder_hits,
        )

    def describe(self) -> Mapping[str, Any]:
        """What the engine resolved and reserved."""
        return {
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

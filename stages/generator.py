"""The stage that turns codec tokens into sound."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from engine import FinishReason, GeneratorConfig, Prompt
from engine.generator.generator_engine import GeneratorEngine, GeneratorOutput
from stages.stage import Stage, StageInputs, StageOutput, StageRequest, StageStats

__all__ = ["GeneratorStage"]


class GeneratorStage(Stage):
    """Runs a vocoder, and hands out ``audio``: whole in the end, and piece by piece as it comes.

    Codes that come in chunks become sound in windows, whose size the config sets. Speech is then
    close to that of the same codes at once, but not equal to it; see
    ``engine.generator``. Codes that fit one chunk of the edge come whole. Speech whose
    codes a limit of length cut off finishes with ``length``, like the codes.

    There is no prefix cache: every sample depends on nearly every code, so utterances share
    nothing. The switch for caching is kept, and changes nothing.

    Args:
        name: unique in the pipeline.
        config: what to build the engine from.
        inputs: the stages that feed this one; None makes it a root.
        final_output: what the user gets.

    Raises:
        ValueError: the engine cannot be built as asked, or the stage is to hand out what it does
            not make.
    """

    final_output_kinds = ("audio",)
    has_cache = False

    def __init__(
        self,
        name: str,
        config: GeneratorConfig,
        *,
        inputs: StageInputs | None = None,
        final_output: Collection[str] = ("audio",),
    ) -> None:
        super().__init__(name, inputs=inputs, outputs=(), final_output=final_output)
        self.engine = GeneratorEngine(config)
        self._enable_prefix_caching = True

    @property
    def dtype(self) -> torch.dtype:
        """Always float32."""
        return torch.float32

    @property
    def takes_chunks(self) -> bool:
        """Codes may come as they are made."""
        return True

    @property
    def speakers(self) -> tuple[str, ...]:
        """The checkpoint's voices."""
        return self.engine.speakers.names

    def add_request(self, request: StageRequest) -> None:
        """Queue codes, or their first chunk; see :class:`~stages.stage.Stage`."""
        self.engine.add_request(request.request_id, request.prompt, priority=request.priority)

    def extend_request(self, request_id: str, prompt: Prompt) -> None:
        """Hand in the next codes."""
        self.engine.extend_request(request_id, prompt)

    def needs_input(self, request_id: str) -> bool:
        """Whether the codes of its next window are still to come."""
        return self.engine.needs_input(request_id)

    def step(self) -> list[StageOutput]:
        """Run one batch of utterances or windows of equal length."""
        return [self._stage_output(output) for output in self.engine.step()]

    def abort(self, request_id: str) -> None:
        """Drop a request with what was made of it."""
        self.engine.abort(request_id)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether it has requests, be it that they wait for input."""
        return self.engine.has_unfinished_requests

    @property
    def enable_prefix_caching(self) -> bool:
        """As it was set; nothing is cached either way."""
        return self._enable_prefix_caching

    @enable_prefix_caching.setter
    def enable_prefix_caching(self, value: bool) -> None:
        self._enable_prefix_caching = value

    def reset_prefix_cache(self) -> None:
        """Forget nothing: nothing is cached."""

    def stats(self) -> StageStats:
        """Counters since the engine was built; ``prompt_tokens`` are codes that became sound."""
        stats = self.engine.stats()
        return StageStats(
            num_steps=stats.num_steps, busy_s=stats.busy_s, prompt_tokens=stats.prompt_tokens
        )

    def describe(self) -> Mapping[str, Any]:
        """What the engine resolved."""
        return {"engine": type(self.engine).__name__, **self.engine.describe()}

    def check_integrity(self) -> None:
        """Raise if a request's sound is not that of its codes."""
        self.engine.check_integrity()

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()

    def _stage_output(self, output: GeneratorOutput) -> StageOutput:
        return StageOutput(
            request_id=output.request_id,
            stage=self.name,
            finished=output.finished,
            finish_reason=_finish_reason(output),
            error=output.error,
            num_prompt_tokens=output.num_codes,
            audio=output.waveform,
            audio_delta=output.delta,
            metrics=output.metrics,
        )


def _finish_reason(output: GeneratorOutput) -> FinishReason | None:
    if not output.finished:
        return None
    if output.error is not None:
        return FinishReason.ERROR
    return FinishReason.LENGTH if output.is_cut_off else FinishReason.STOP

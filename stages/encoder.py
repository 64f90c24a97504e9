"""The stage that runs one forward pass over its whole input."""

from __future__ import annotations

from collections.abc import Collection

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

__all__ = ["EncoderStage"]

_POOLED = "pooled"
_HIDDEN_STATES = "hidden_states"


class EncoderStage(EngineStage[RequestOutput | EncoderOutput]):
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
    engine: EncoderEngine | LLMEngine

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
        if checkpoint.architecture in SUPPORTED_ARCHITECTURES:
            self._pooling = resolve_pooling("last" if pooling == "auto" else pooling, None)
            self.engine = LLMEngine(engine, output_names=_rows_behind(self.outputs))
        else:
            self.engine = EncoderEngine(engine, output_names=self.outputs, pooling=pooling)

    def _engine_sampling(self, request: StageRequest) -> SamplingParams | None:
        """Nothing is generated: a decoder runs its prompt only."""
        return SamplingParams(max_tokens=0) if isinstance(self.engine, LLMEngine) else None

    def _stage_output(self, output: RequestOutput | EncoderOutput) -> StageOutput:
        finish_reason: FinishReason | None
        if isinstance(output, EncoderOutput):
            tensors = output.tensors
            finish_reason = FinishReason.STOP if output.error is None else FinishReason.ERROR
        else:
            completion = output.outputs[0]
            tensors, finish_reason = dict(completion.tensors), completion.finish_reason
            if _HIDDEN_STATES in tensors:
                tensors[_POOLED] = pool(self._pooling, tensors[_HIDDEN_STATES], None)
        return StageOutput(
            request_id=output.request_id,
            stage=self.name,
            finished=output.finished,
            finish_reason=finish_reason,
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

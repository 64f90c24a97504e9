"""Stage that runs one forward pass over its whole input."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from engine import SamplingParams, TextPrompt
from engine.interface.arguments import check_argument
from engine.interface.config import EngineConfig
from engine.interface.outputs import OutputDelta
from engine.interface.settings import Settings
from engine.models.registry import FAMILIES
from stages.engine_stage import EngineStage
from stages.model_fit import family_row
from stages.stage import OneOrMore, StageInputs, StageRequest
from stages.stage_config import TokenStageConfig, register_stage_kind

if TYPE_CHECKING:
    from torch import Tensor

    from engine import EncoderEngine, LLMEngine, Prompt
    from engine.encoder.sentence_layout import Pooling

_POOLED = "pooled"
_HIDDEN_STATES = "hidden_states"


@register_stage_kind
class EncoderStageConfig(TokenStageConfig):
    """A stage that runs one forward pass over its whole input.

    Attributes:
        pooling: reduction of the rows to the one row ``pooled``; ``auto``: as the checkpoint
            specifies.
        normalize: if true, that row is scaled to length 1; None: as the checkpoint specifies.
        final_output: ``tensors`` if the user gets this stage's tensors.
    """

    kind: Literal["encoder"]
    pooling: Literal["auto", "mean", "cls", "last", "pooler"] = "auto"
    normalize: bool | None = None
    final_output: Annotated[tuple[Literal["tensors"], ...], OneOrMore] = ()

    def modalities(self, config: Mapping[str, Any]) -> Collection[str] | None:
        """See :class:`~stages.stage_config.StageConfig`; unknown models encode text."""
        if (row := family_row(config, self.part)) is not None:
            return row.modalities
        return None if FAMILIES.may_grow() else ("text",)

    def build_stage(self, name: str) -> EncoderStage:
        """See :class:`~stages.stage_config.StageConfig`."""
        return EncoderStage(
            name,
            self.engine_config(),
            pooling=self.pooling,
            normalize=self.normalize,
            outputs=self.outputs,
            inputs=self.inputs,
            final_output=self.final_output,
        )


class EncoderStage(EngineStage):
    """Stage that runs an encoder, and outputs ``hidden_states (n, D)`` and ``pooled (D,)``.

    A bidirectional encoder (such as BERT) runs in an ``EncoderEngine``, where a cache hit requires
    the same whole input, because every row depends on all of it. An embedding model based on a
    causal decoder runs in an ``LLMEngine`` that generates nothing, where inputs share prefixes.

    A checkpoint in the layout of sentence-transformers specifies the maximum length of inputs and
    their format, pooling and normalization; see :mod:`engine.encoder.sentence_layout`.

    Args:
        name: see :class:`~stages.stage.Stage`, like ``inputs`` and ``final_output``.
        engine: config to build the engine from; the checkpoint determines the kind of engine.
        pooling: reduction of the rows to one. ``auto`` uses the layout of sentence-transformers;
            without one, the checkpoint's own pooler or the mean for a bidirectional encoder, and
            the last token's row for a causal one.
        normalize: if true, the pooled row is scaled to length 1; None: as in such a layout, or
            false without one.
        outputs: names of the tensors to output: ``hidden_states``, ``pooled`` and others that the
            model emits; None: all.

    Raises:
        ValueError: the engine cannot be built as configured, or the pooling does not fit the model.
    """

    final_output_kinds = ("tensors",)
    engine: EncoderEngine | LLMEngine

    def __init__(
        self,
        name: str,
        engine: EngineConfig,
        *,
        pooling: Pooling = "auto",
        normalize: bool | None = None,
        outputs: Collection[str] | None = None,
        inputs: StageInputs | None = None,
        final_output: Collection[str] = ("tensors",),
    ) -> None:
        super().__init__(name, inputs=inputs, outputs=outputs, final_output=final_output)
        check_argument("engine", engine, EngineConfig, "an EngineConfig", "EngineConfig(model={})")
        self._config, self._given_pooling, self._given_normalize = engine, pooling, normalize
        self.engine = self._build_engine()

    def configuration(self) -> Settings:
        """See :class:`~stages.stage.Stage`."""
        if self.built_of is not None or type(self) is not EncoderStage:
            return super().configuration()
        own = {
            "pooling": self._given_pooling,
            "normalize": self._given_normalize,
            "outputs": self.outputs,
        }
        return self._configuration(EncoderStageConfig, self._config, **own)

    def _build_engine(self) -> EncoderEngine | LLMEngine:
        # Imported lazily: configurations are checked without torch.
        from engine import EncoderEngine, LLMEngine
        from engine.encoder.sentence_layout import read_sentence_layout, resolve_pooling
        from engine.models.model_loader import is_supported, open_configured

        config, pooling = self._config, self._given_pooling
        checkpoint = open_configured(config)
        self._layout = read_sentence_layout(checkpoint.path, pooling)
        self._normalize = self._given_normalize
        if self._layout is not None:
            pooling = self._layout.pooling
            if self._normalize is None:
                self._normalize = self._layout.normalize
            if config.max_model_len is None:
                config = config.model_copy(update={"max_model_len": self._layout.max_seq_length})
        if not is_supported(checkpoint.architecture):
            return EncoderEngine(config, output_names=self.outputs, pooling=pooling)
        # A decoder runs only its prompt and generates nothing.
        self._sampling = SamplingParams(max_tokens=0)
        self._pooling = resolve_pooling("last" if pooling == "auto" else pooling, None)
        if self.outputs is None:
            return LLMEngine(config)
        # The requested per-token tensors, and those that requested outputs are computed from.
        rows = {_HIDDEN_STATES if name == _POOLED else name for name in self.outputs}
        return LLMEngine(config, output_names=sorted(rows))

    def _engine_prompt(self, request: StageRequest) -> Prompt:
        """Format text as the checkpoint's layout specifies; other prompts are unchanged."""
        prompt, layout = request.prompt, self._layout
        if layout is None:
            return prompt
        if isinstance(prompt, TextPrompt):
            return replace(prompt, prompt=layout.written(prompt.prompt))
        return layout.written(prompt) if isinstance(prompt, str) else prompt

    def check_sampling(self, params: SamplingParams) -> None:
        """Reject all but ``truncate_prompt_tokens``; see :class:`~stages.stage.Stage`."""
        if not params.only_truncates:
            raise ValueError(
                "it generates no tokens, so truncate_prompt_tokens is all that it takes of the "
                "sampling parameters"
            )
        self.engine.check_sampling(params)

    def _with_tensors(self, delta: OutputDelta) -> OutputDelta:
        from engine.encoder.sentence_layout import pool  # lazily, as in _build_engine

        tensors = dict(delta.tensors)
        if delta.num_completions and _HIDDEN_STATES in tensors:  # the model is a decoder
            tensors[_POOLED] = pool(self._pooling, tensors[_HIDDEN_STATES], None)
        if _POOLED in tensors:
            tensors[_POOLED] = self._embedding(tensors[_POOLED])
        # An encoder has no completions; drop the decoder's one empty completion.
        return replace(delta, text=None, num_completions=0, prompt_token_ids=(), tensors=tensors)

    def _embedding(self, row: Tensor) -> Tensor:
        """Apply the checkpoint's projections and normalization to the pooled row, ``(D,)``."""
        from engine.encoder.sentence_layout import normalized  # lazily, as in _build_engine

        for projection in () if self._layout is None else self._layout.projections:
            row = projection.apply(row)
        return normalized(row) if self._normalize else row

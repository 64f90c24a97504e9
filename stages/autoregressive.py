"""Stage that generates tokens with one decoder model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from engine import Engine
from engine.interface.arguments import check_argument, check_sampling_argument
from engine.interface.config import EngineConfig
from engine.interface.sampling_params import SamplingParams
from engine.interface.settings import Settings
from stages.engine_stage import EngineStage
from stages.model_fit import family_row, misfit_of, misfit_of_outputs, speakers_in
from stages.stage import OneOrMore, StageInputs
from stages.stage_config import TokenStageConfig, register_stage_kind

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from engine import LLMEngine


@register_stage_kind
class AutoregressiveStageConfig(TokenStageConfig):
    """A stage that generates tokens.

    Attributes:
        sampling: default sampling parameters; requests may override them.
        final_output: outputs of this stage for the user: ``text``, ``tensors`` or both.
    """

    takes_chunks: ClassVar[bool] = True
    gives_chunks: ClassVar[bool] = True

    kind: Literal["autoregressive"]
    sampling: SamplingParams = SamplingParams()
    final_output: Annotated[tuple[Literal["text", "tensors"], ...], OneOrMore] = ()

    @property
    def own_sampling(self) -> SamplingParams:
        """See :class:`~stages.stage_config.StageConfig`."""
        return self.sampling

    def misfit(self, config: Mapping[str, Any]) -> tuple[str, str] | None:
        """See :class:`~stages.stage_config.StageConfig`."""
        misfit = misfit_of(config, self.part, makes_sound=False)
        is_streamed = self.inputs is not None and self.inputs.chunk_size is not None
        if misfit is None and is_streamed and self.modalities(config):
            # A user's prompt is read as a whole; only rows of another stage may be streamed.
            misfit = "inputs", "it reads its whole input at once: leave out chunk_size"
        return misfit or misfit_of_outputs(self.emitted(config), self.outputs)

    def emitted(self, config: Mapping[str, Any]) -> Collection[str] | None:
        """See :class:`~stages.stage_config.StageConfig`."""
        row = family_row(config, self.part)
        return None if row is None else row.outputs

    def modalities(self, config: Mapping[str, Any]) -> Collection[str] | None:
        """See :class:`~stages.stage_config.StageConfig`."""
        row = family_row(config, self.part)
        return None if row is None else row.modalities

    def load_speakers(self) -> tuple[str, ...] | None:
        """See :class:`~stages.stage_config.StageConfig`."""
        return speakers_in(self.model, self.part)

    def load_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """See :class:`~stages.stage_config.StageConfig`."""
        from engine.models.model_loader import load_tokenizer_of, open_checkpoint

        checkpoint = open_checkpoint(self.model, part=self.part, revision=self.engine.revision)
        return load_tokenizer_of(checkpoint, trust_remote_code=self.engine.trust_remote_code)

    def build_stage(self, name: str) -> AutoregressiveStage:
        """See :class:`~stages.stage_config.StageConfig`."""
        return AutoregressiveStage(
            name,
            self.engine_config(),
            sampling=self.sampling,
            outputs=self.outputs,
            inputs=self.inputs,
            final_output=self.final_output,
        )


class AutoregressiveStage(EngineStage):
    """Stage that generates tokens, and outputs the text, the ids and the per-token tensors.

    Args:
        name: see :class:`~stages.stage.Stage`, like ``inputs`` and ``final_output``.
        engine: config to build the engine from; or an existing engine, which only this stage may
            use from then on, and which its creator must close.
        sampling: default parameters of requests.
        outputs: names of the tensors to output, one row for every token whose forward pass has
            run; None: all that the model emits, ``()``: none.

    Raises:
        ValueError: the engine cannot be built as configured.
        RuntimeError: the engine belongs to another stage, or is closed.
    """

    final_output_kinds = ("text", "tensors")
    engine: LLMEngine
    _sampling: SamplingParams

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
        wanted, fix = "an EngineConfig or an LLMEngine", "EngineConfig(model={})"
        check_argument("engine", engine, EngineConfig | Engine, wanted, fix)
        check_sampling_argument(sampling)
        self._config = engine if isinstance(engine, EngineConfig) else None
        if isinstance(engine, EngineConfig):
            self.engine = self._build_engine()
        else:
            engine.ownership.claim(self, f"stage {name!r}")
            self.engine = engine
        self._given_sampling = sampling if sampling is not None else SamplingParams()
        self._sampling = self._given_sampling.with_defaults(self.engine.sampling_defaults)

    def configuration(self) -> Settings:
        """See :class:`~stages.stage.Stage`."""
        if self.built_of is not None or type(self) is not AutoregressiveStage:
            return super().configuration()
        if self._config is None:
            raise ValueError(
                "it was given an engine that exists, which stays in this process: give it the "
                "EngineConfig"
            )
        own = {"sampling": self._sampling, "outputs": self.outputs}
        return self._configuration(AutoregressiveStageConfig, self._config, **own)

    def _build_engine(self) -> LLMEngine:
        from engine import LLMEngine  # imported lazily: configurations are checked without torch

        assert self._config is not None
        return LLMEngine(self._config, output_names=self.outputs)

    def rebuild(self) -> None:
        """Rebuild the engine; see :class:`~stages.stage.Stage`.

        Raises:
            NotImplementedError: the engine was passed in, and others may have references to it.
        """
        if self._config is None:
            raise NotImplementedError("it was given its engine, which its maker must rebuild")
        super().rebuild()

    @property
    def sampling(self) -> SamplingParams:
        """Default sampling parameters of requests."""
        return self._sampling

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The engine's tokenizer; see :class:`~stages.stage.Stage`."""
        return self.engine.tokenizer

    @property
    def seed(self) -> int:
        """The engine's seed; see :class:`~stages.stage.Stage`."""
        return self.engine.config.seed

    def check_sampling(self, params: SamplingParams) -> None:
        """See :class:`~stages.stage.Stage`."""
        self.engine.check_sampling(params)

    def describe(self) -> Mapping[str, Any]:
        """Describe the engine's settings and memory, and the sources of sampling parameters."""
        given = self._given_sampling.model_fields_set
        stated = self._sampling.model_fields_set
        of_checkpoint = dict(self.engine.checkpoint_token_ids)
        sampling = []
        for name in SamplingParams.model_fields:
            source = "generation_config.json" if name in stated else "default"
            source = "pipeline" if name in given else source
            besides = f" and {of_checkpoint.pop(name)}" if name in of_checkpoint else ""
            sampling.append(f"{name}: {getattr(self._sampling, name)} ({source}){besides}")
        sampling += [f"{name}: {ids}" for name, ids in of_checkpoint.items()]
        return {**super().describe(), "sampling": sampling}

    @property
    def gives_chunks(self) -> bool:
        """True if tokens and their tensors can be streamed: unless it is an encoder-decoder model.

        The encoder's tensors have rows for its own tokens, which cannot be split into chunks of
        the decoder's tokens.
        """
        return not self.engine.is_encoder_decoder

    @property
    def speakers(self) -> tuple[str, ...] | None:
        """Voices of a speech model; None for others."""
        return self.engine.speakers

    def partial_tensors(self, request_id: str, first_row: int) -> Mapping[str, Tensor]:
        """Return rows of a live request; see :class:`~stages.stage.Stage`.

        Empty while there are no such rows, for example until they are recomputed after a
        preemption.

        Raises:
            ValueError: the model is an encoder-decoder, or no such request is live.
        """
        if not self.gives_chunks:
            return super().partial_tensors(request_id, first_row)
        return self.engine.partial_outputs(request_id, first_row, self.outputs)

    def pause_request(self, request_id: str) -> None:
        """Pause a live request, which keeps its resources, until it is resumed. Idempotent."""
        self.engine.pause(request_id)

    def resume_request(self, request_id: str) -> None:
        """Resume a paused request; one that is not paused, or unknown, is ignored."""
        self.engine.resume(request_id)

    def close(self) -> None:
        """Close the engine if this stage built it; otherwise release its ownership."""
        if self._config is not None:
            super().close()
        else:
            self.ownership.close()
            self.engine.ownership.release(self)

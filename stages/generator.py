"""Stage that converts codec tokens to audio."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from engine.interface.arguments import check_argument
from engine.interface.config import GenerationParams, GeneratorConfig, GeneratorSettings
from engine.interface.settings import Settings
from stages.engine_stage import EngineStage
from stages.model_fit import misfit_of, speakers_in
from stages.stage import OneOrMore, StageInputs
from stages.stage_config import ModelReference, StageConfig, register_stage_kind

if TYPE_CHECKING:
    from engine import GeneratorEngine


@register_stage_kind
class GeneratorStageConfig(StageConfig):
    """A stage that converts codec tokens to audio.

    Attributes:
        engine: settings of the engine.
        generation: parameters of audio generation.
        final_output: ``audio`` if the user gets the audio.
    """

    takes_chunks: ClassVar[bool] = True

    kind: Literal["generator"]
    model: ModelReference
    engine: GeneratorSettings = GeneratorSettings()
    generation: GenerationParams = GenerationParams()
    final_output: Annotated[tuple[Literal["audio"], ...], OneOrMore] = ()

    def generator_config(self) -> GeneratorConfig:
        """Join model and settings."""
        return GeneratorConfig(
            model=self.model, part=self.part, generation=self.generation, **self.engine.model_dump()
        )

    def misfit(self, config: Mapping[str, Any]) -> tuple[str, str] | None:
        """See :class:`~stages.stage_config.StageConfig`."""
        return misfit_of(config, self.part, makes_sound=True)

    def load_speakers(self) -> tuple[str, ...] | None:
        """See :class:`~stages.stage_config.StageConfig`."""
        return speakers_in(self.model, self.part)

    def build_stage(self, name: str) -> GeneratorStage:
        """See :class:`~stages.stage_config.StageConfig`."""
        return GeneratorStage(
            name, self.generator_config(), inputs=self.inputs, final_output=self.final_output
        )


class GeneratorStage(EngineStage):
    """Stage that runs a generator, and outputs ``audio``: in pieces, and as a whole at the end.

    Codes that arrive in chunks are converted in windows, whose size the config sets. The audio is
    then close, but not equal, to that of the same codes at once; ``GeneratorEngine`` explains why.
    Codes that fit into one chunk of the edge are converted at once. If a length limit truncated the
    codes, the audio finishes with ``length``, too.

    There is no prefix cache: every sample depends on nearly every code, so utterances share
    nothing. The caching switch is accepted without effect.

    Args:
        name: see :class:`~stages.stage.Stage`, like ``inputs`` and ``final_output``.
        config: config to build the engine from.

    Raises:
        ValueError: the engine cannot be built as configured, or the stage does not produce a
            requested final output.
    """

    final_output_kinds = ("audio",)
    has_cache = False
    engine: GeneratorEngine

    def __init__(
        self,
        name: str,
        config: GeneratorConfig,
        *,
        inputs: StageInputs | None = None,
        final_output: Collection[str] = ("audio",),
    ) -> None:
        super().__init__(name, inputs=inputs, outputs=(), final_output=final_output)
        fix = "GeneratorConfig(model={})"
        check_argument("config", config, GeneratorConfig, "a GeneratorConfig", fix)
        self._config = config
        self.engine = self._build_engine()

    def configuration(self) -> Settings:
        """See :class:`~stages.stage.Stage`."""
        if self.built_of is not None or type(self) is not GeneratorStage:
            return super().configuration()
        own = {"generation": self._config.generation}
        return self._configuration(GeneratorStageConfig, self._config, **own)

    def _build_engine(self) -> GeneratorEngine:
        from engine import GeneratorEngine  # lazily: configurations are checked without torch

        return GeneratorEngine(self._config)

    @property
    def speakers(self) -> tuple[str, ...] | None:
        """The checkpoint's voices."""
        return self.engine.speakers or None

"""What there is to say of a model family: all that the engine has to know of it in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedConfig

from engine.checkpoints.checkpoint import Checkpoint, CheckpointPart
from engine.inputs.prompt_processor import PlainPromptProcessor, PromptProcessor, PromptSources
from engine.models.base import CausalModel, GeneratorModel, ModelSettings

Builder: TypeAlias = Callable[[Checkpoint, ModelSettings], CausalModel]
"""From a checkpoint and settings to a model without its weights yet. Raises ``ValueError`` if
something that the config asks for does not fit or is not supported."""


def has_head(checkpoint: Checkpoint) -> bool:
    """Whether a plain decoder's checkpoint has a language-model head, by its architecture."""
    return checkpoint.architecture.endswith("ForCausalLM")


@dataclass(frozen=True, slots=True, eq=False)
class ModelFamily:
    """One family of models, or one part of a checkpoint that holds several models.

    A family makes tokens (``build``) or sound (``generator``). Families of other packages are
    made known by ``engine.register_model_family``, or by an entry point of the group
    ``omni_pipeline.model_families`` that loads to the declaration.

    Attributes:
        architectures: class names by which ``config.json`` asks for it; no two families share one.
        build: makes the model, before its weights are loaded.
        generator: loads the model that makes sound of codec tokens.
        prompts: makes what resolves its prompts.
        chat_template: writes chats where the folder of a checkpoint brings none.
        max_positions: reads the longest sequence from a config.
        config_class: of its ``config.json``, where transformers does not know the ``model_type``.
        decoder_config: reads the config of a plain decoder on which other families may build: a
            ``DecoderConfig`` of the config.
        model_type: of the configs that ``decoder_config`` reads; None: that of ``config_class``, or
            without one the family's name, as transformers has it for most.
        reads_text: whether the tokenizer beside the weights is of its tokens.
        part: which part of a checkpoint it is, where one holds several models.

    Raises:
        ValueError: it names no architecture, or does not say how one thing alone is made.
    """

    name: str
    architectures: tuple[str, ...]
    build: Builder | None = None
    generator: Callable[[Checkpoint, torch.device], GeneratorModel] | None = None
    prompts: Callable[[PromptSources], PromptProcessor] = PlainPromptProcessor
    chat_template: str | None = None
    max_positions: Callable[[PreTrainedConfig], int] = lambda config: (
        config.get_text_config().max_position_embeddings
    )
    config_class: type[PreTrainedConfig] | None = None
    decoder_config: Callable[[PreTrainedConfig], Any] | None = None
    model_type: str | None = None
    reads_text: bool = True
    part: CheckpointPart | None = None

    def __post_init__(self) -> None:
        if not self.architectures:
            raise ValueError(f"model family {self.name!r} names no architecture: give at least one")
        if (self.build is None) == (self.generator is None):
            raise ValueError(
                f"model family {self.name!r} must say how its model is made: give build= for one "
                "that makes tokens, or generator= for one that makes sound"
            )

    @property
    def makes_sound(self) -> bool:
        """Whether it makes sound, not tokens."""
        return self.generator is not None

    @property
    def base_type(self) -> str | None:
        """``model_type`` of the configs of decoders that it builds and others may build on."""
        if self.decoder_config is None:
            return None
        named = self.name if self.config_class is None else self.config_class.model_type
        return self.model_type or named

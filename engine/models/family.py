"""The declaration of a model family: everything the engine has to know about it."""

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
"""Builds a model from a checkpoint and settings, before its weights are loaded. Raises
``ValueError`` if something in the config is inconsistent or not supported."""


def has_head(checkpoint: Checkpoint) -> bool:
    """Return True if a plain decoder's checkpoint has a language-model head, by architecture."""
    return checkpoint.architecture.endswith("ForCausalLM")


@dataclass(frozen=True, slots=True, eq=False)
class ModelFamily:
    """One family of models, or one part of a checkpoint that holds several models.

    A family generates tokens (``build``) or audio (``generator``). Families of other packages are
    registered by ``engine.register_model_family``, or by an entry point in the group
    ``omni_pipeline.model_families`` that loads to the declaration.

    Attributes:
        architectures: class names in ``config.json`` that select it; no two families share one.
        build: builds the model, before its weights are loaded.
        generator: loads the model that generates audio from codec tokens.
        prompts: creates the prompt processor.
        chat_template: used for chats if the checkpoint's folder has none.
        max_positions: reads the longest sequence from a config.
        config_class: of its ``config.json``, if transformers does not know the ``model_type``.
        decoder_config: reads the config of a plain decoder on which other families may build;
            returns a ``DecoderConfig``.
        model_type: of the configs that ``decoder_config`` reads; None: that of ``config_class``, or
            without one the family's name, as for most in transformers.
        reads_text: True if the tokenizer next to the weights is for its tokens.
        part: its part of a checkpoint that holds several models.

    Raises:
        ValueError: it names no architecture, or sets both or neither of build and generator.
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
        """True if it generates audio, not tokens."""
        return self.generator is not None

    @property
    def base_type(self) -> str | None:
        """``model_type`` of the decoder configs that other families may build on, if any."""
        if self.decoder_config is None:
            return None
        named = self.name if self.config_class is None else self.config_class.model_type
        return self.model_type or named

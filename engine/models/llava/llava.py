"""LLaVA: a CLIP tower, a projector of two layers, and any plain decoder.

Source: Liu et al., "Visual Instruction Tuning", 2023; transformers' ``llava``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy

import torch
from torch import Tensor
from transformers import LlamaConfig, LlavaConfig, PreTrainedConfig
from transformers.models.llava.modeling_llava import LlavaModel

from engine.checkpoints.checkpoint import Checkpoint
from engine.checkpoints.quantized_weight import Target
from engine.inputs.multimodal_inputs import MultiModalPromptProcessor
from engine.models.base import ModelSettings
from engine.models.decoders.decoder import build_decoder
from engine.models.encoder_module import build_empty
from engine.models.family import ModelFamily
from engine.models.multimodal import ItemTower, MultiModalModel, unique_prefix
from engine.requests.encoder_input import Modality, MultiModalInput

_PIXELS = "pixel_values"
_TOWER = "clip_vision_model"


class LlavaTower(ItemTower):
    """One image of a fixed size to one row per patch, after the class's if the config wants that.

    Raises:
        ValueError: the tower is of a type that is not supported.
    """

    feature_names = (_PIXELS,)

    def __init__(self, config: PreTrainedConfig, settings: ModelSettings) -> None:
        super().__init__()
        vision = config.vision_config
        if vision.model_type != _TOWER:
            raise ValueError(
                f"LLaVA with a tower of type {vision.model_type!r}; supported is {_TOWER}"
            )
        self.module: LlavaModel = build_empty(_without_decoder, config, settings)
        self.layer: int | list[int] = config.vision_feature_layer
        self.strategy: str = config.vision_feature_select_strategy
        self.image_shape = (vision.num_channels, vision.image_size, vision.image_size)
        # The tower's first row is that of its class.
        self.rows: int = (vision.image_size // vision.patch_size) ** 2
        self.rows += self.strategy == "full"

    def targets(self, stored: Collection[str]) -> Iterator[tuple[str, Target]]:
        """See :meth:`ItemTower.targets`."""
        # Some exports put the tower in a module of its own, and all in one of theirs.
        root = unique_prefix(stored, "multi_modal_projector.linear_1.weight")
        outer, inner = f"{root}vision_tower.", f"{root}vision_tower.vision_model."
        is_nested = any(name.startswith(inner) for name in stored)
        for name, tensor in self.module.state_dict().items():
            place = f"{root}{name}"
            yield place.replace(outer, inner, 1) if is_nested else place, tensor

    def num_rows(self, features: Mapping[str, Tensor]) -> int:
        """See :meth:`ItemTower.num_rows`; ``pixel_values`` is ``(channels, height, width)``."""
        self.require_features(features)
        shape = tuple(features[_PIXELS].shape)
        if shape != self.image_shape:
            raise ValueError(f"{_PIXELS} of one image must be {self.image_shape}, got {shape}")
        return self.rows

    def forward(self, inputs: Sequence[MultiModalInput]) -> list[Tensor]:
        """See :meth:`ItemTower.forward`."""
        pixels = torch.stack([item.features[_PIXELS] for item in inputs])
        output = self.module.get_image_features(
            pixels.to(self.module.device, self.module.dtype),
            vision_feature_layer=self.layer,
            vision_feature_select_strategy=self.strategy,
        )
        return list(output.pooler_output)


def build_llava(checkpoint: Checkpoint, settings: ModelSettings) -> MultiModalModel:
    """Build a LLaVA, its weights not yet loaded; see :data:`Builder`."""
    config = checkpoint.config
    text = config.text_config
    decoder = build_decoder(settings.decoder_config_of(text), text, settings)
    tower = LlavaTower(config, settings)
    placeholders: dict[Modality, int] = {"image": int(config.image_token_index)}
    return MultiModalModel(decoder, {"image": tower}, placeholders, checkpoint.weight_files)


def _without_decoder(config: LlavaConfig) -> LlavaModel:
    """The tower and the projector; transformers need not know the decoder, of which it has none."""
    towers = copy(config)
    width = config.get_text_config().hidden_size
    towers.text_config = LlamaConfig(
        hidden_size=width, num_attention_heads=1, num_hidden_layers=0, vocab_size=3
    )
    module = LlavaModel(towers)
    del module.language_model
    return module


FAMILY = ModelFamily(
    "llava",
    ("LlavaForConditionalGeneration",),
    build=build_llava,
    prompts=MultiModalPromptProcessor,
)

"""LLaVA: a CLIP tower, a two-layer projector, and any plain decoder.

Source: Liu et al., "Visual Instruction Tuning", 2023; transformers' ``llava``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.llava.modeling_llava import LlavaModel

from engine.checkpoints.checkpoint import Checkpoint
from engine.checkpoints.quantized_weight import Target
from engine.models.base import ModelSettings
from engine.models.decoders.decoder import build_decoder
from engine.models.encoder_module import build_empty, module_targets
from engine.models.multimodal import ItemTower, MultiModalModel, unique_prefix
from engine.requests.encoder_input import Modality, MultiModalInput

_PIXELS = "pixel_values"


class LlavaTower(ItemTower):
    """Encodes an image of fixed size to one row per patch, after the class row if configured.

    Raises:
        ValueError: the tower's type is not supported.
    """

    feature_names = (_PIXELS,)
    known_weight = "multi_modal_projector.linear_1.weight"
    tower_type = "clip_vision_model"
    make: type[PreTrainedModel] = LlavaModel

    def __init__(self, config: PreTrainedConfig, settings: ModelSettings) -> None:
        super().__init__()
        vision = config.vision_config
        if vision.model_type != self.tower_type:
            raise ValueError(
                f"{type(config).__name__} has a tower of type {vision.model_type!r}; supported is "
                f"{self.tower_type}"
            )
        self.module: Any = build_empty(partial(without_decoder, self.make), config, settings)
        self.image_shape = (vision.num_channels, vision.image_size, vision.image_size)
        self.rows, self.choices = self.rows_of(config)

    def rows_of(self, config: PreTrainedConfig) -> tuple[int, dict[str, Any]]:
        """Return the number of rows of an image, and the options that select them in the tower."""
        vision = config.vision_config
        names = ("vision_feature_layer", "vision_feature_select_strategy")
        # The tower's first row is the class row.
        rows = (vision.image_size // vision.patch_size) ** 2
        rows += config.vision_feature_select_strategy == "full"
        return rows, {name: getattr(config, name) for name in names}

    def targets(self, stored: Collection[str]) -> Iterator[tuple[str, Target]]:
        """See :meth:`ItemTower.targets`."""
        # Some exports nest the tower in another module, or everything in a root module.
        root = unique_prefix(stored, self.known_weight)
        outer, inner = f"{root}vision_tower.", f"{root}vision_tower.vision_model."
        is_nested = any(name.startswith(inner) for name in stored)
        for place, target in module_targets(self.module, root):
            yield place.replace(outer, inner, 1) if is_nested else place, target

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
        pixels = pixels.to(self.module.device, self.module.dtype)
        output = self.module.get_image_features(pixels, **self.choices)
        return list(output.pooler_output)


def build_llava(checkpoint: Checkpoint, settings: ModelSettings) -> MultiModalModel:
    """Build a LLaVA, its weights not yet loaded; see :data:`Builder`."""
    config = checkpoint.config
    text = config.text_config
    decoder = build_decoder(settings.decoder_config_of(text), text, settings)
    tower = LlavaTower(config, settings)
    placeholders: dict[Modality, int] = {"image": int(config.image_token_index)}
    return MultiModalModel(decoder, {"image": tower}, placeholders, checkpoint.weight_files)


def without_decoder(make: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Create the tower and the projector only; the decoder's type need not be known."""
    towers = copy(config)
    width = config.get_text_config().hidden_size
    towers.text_config = LlamaConfig(
        hidden_size=width, num_attention_heads=1, num_hidden_layers=0, vocab_size=3
    )
    module = make(towers)
    del module.language_model
    return module

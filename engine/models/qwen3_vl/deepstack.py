"""What the Qwen3 models that see have in common: features of several depths of the vision tower.

A row of an image replaces a placeholder's embedding, as elsewhere, and brings features of earlier
layers of the tower, which are added behind the decoder's first layers::

    tower     layer 8 ──► features 0 ─┐   layer 16 ──► features 1 ─┐      last layer ──► embedding
    decoder   embedding ──► layer 0 ─ + ──────────────► layer 1 ─── + ──► layer 2 ──► ...

Source: Meng et al., "DeepStack", 2024, arXiv:2406.04334; transformers' ``qwen3_vl``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from engine.attention.layer import AttentionStep
from engine.layers import MultiAxisRotaryEmbedding
from engine.models.base import ModelSettings
from engine.models.decoders.decoder import DecoderConfig, DecoderModel, build_rotary
from engine.models.qwen2_5_vl.qwen2_5_vl import ImageTower, VideoTower

__all__ = [
    "DeepstackDecoder",
    "DeepstackImageTower",
    "DeepstackVideoTower",
    "build_interleaved_rotary",
]

_SECTIONS = [24, 20, 20]
"""Where a config does not say them, as transformers has it."""


class DeepstackImageTower(ImageTower):
    """Patches of images to rows, each with its features behind it."""

    def __init__(self, module: PreTrainedModel, vision: PreTrainedConfig, *more: Any) -> None:
        super().__init__(module, vision, *more)
        self.row_parts = 1 + len(vision.deepstack_visual_indexes)

    def rows_of(self, output: Any) -> Tensor:
        """See :meth:`ImageTower.rows_of`."""
        return torch.cat([output.pooler_output, *output.deepstack_features], dim=-1)


class DeepstackVideoTower(DeepstackImageTower, VideoTower):
    """The same of videos."""


class DeepstackDecoder(DecoderModel):
    """A decoder that adds its items' features behind its first layers.

    Args:
        kept_layer: after so many layers its stream is emitted too, as ``layer_states``, before
            features are added; None: it is not.
    """

    def __init__(
        self,
        read_config: Callable[[PreTrainedConfig], DecoderConfig],
        config: PreTrainedConfig,
        settings: ModelSettings,
        *,
        kept_layer: int | None = None,
    ) -> None:
        decoder = read_config(config).for_length(settings.max_model_len)
        super().__init__(decoder, [build_interleaved_rotary(config, settings)], settings)
        if kept_layer is not None and not 0 <= kept_layer <= len(self.layers):
            raise ValueError(
                f"the stream after {kept_layer} layers is asked for; there are {len(self.layers)}"
            )
        self.kept_layer = kept_layer

    def forward(
        self, inputs_embeds: Tensor, positions: Tensor, step: AttentionStep
    ) -> dict[str, Tensor]:
        """Run the layers; see :meth:`CausalModel.forward`."""
        rotation = self.rotaries[0](positions)
        features: tuple[Tensor, ...] = ()
        if step.item_features is not None:
            features = step.item_features.split(self.hidden_size, dim=-1)
        kept = inputs_embeds
        # Layers add to the residual in place; the caller's embeddings are not ours to change.
        residual, x = inputs_embeds.clone(), None
        for index, layer in enumerate(self.layers, 1):
            x = layer(x, residual, rotation, step)
            if index == self.kept_layer:
                kept = residual + x
            if index <= len(features):
                x = x + features[index - 1]
        normed = self.final_norm(residual) if x is None else self.final_norm.add(x, residual)
        if self.kept_layer is None:
            return {"hidden_states": normed}
        # transformers has the normed stream in the place of the last layer's.
        is_last = self.kept_layer == len(self.layers)
        return {"hidden_states": normed, "layer_states": normed if is_last else kept}


def build_interleaved_rotary(
    config: PreTrainedConfig, settings: ModelSettings
) -> MultiAxisRotaryEmbedding:
    """Cosines and sines of three numbers to a place, which take turns at every frequency."""
    sections = (config.rope_parameters or {}).get("mrope_section") or _SECTIONS
    make = partial(MultiAxisRotaryEmbedding, sections=sections, interleaved=True)
    rotary = build_rotary(config, settings, make_rotary=make)
    assert isinstance(rotary, MultiAxisRotaryEmbedding)
    return rotary

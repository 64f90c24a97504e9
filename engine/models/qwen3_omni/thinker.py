"""The thinker of Qwen3-Omni: text from text, images, sound and videos, by a mixture of experts.

Tokens lie in time, height and width, and time is that of the world, as in Qwen2.5-Omni; a place is
as long as a row of sound, 1/13 s in published models. A video and its sound come in the order in
which they are seen and heard, row by row.

Beside its hidden states it hands on what a talker needs to speak, of each token: its id, its place
and a row, of a word its embedding, of what is seen or heard the stream after a middle layer.

Source: Xu et al., "Qwen3-Omni Technical Report", 2025; transformers' ``qwen3_omni_moe``.

The audio tower: log-mel frames in, a row for every eight of them out::

    frames  | 0 1 2 3 4 5 6 7 | 8 ...    10 ms each, in pieces of 1 s (two windows), each of
    rows    | +               | +        which has 13 rows; a last one that is shorter has fewer

A row of an image replaces a placeholder's embedding, as elsewhere, and brings features of earlier
layers of the tower, which are added behind the decoder's first layers (Meng et al., "DeepStack",
2024, arXiv:2406.04334)::

    tower     layer 8 ──► features 0 ─┐   layer 16 ──► features 1 ─┐      last layer ──► embedding
    decoder   embedding ──► layer 0 ─ + ──────────────► layer 1 ─── + ──► layer 2 ──► ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeAudioEncoder,
    Qwen3OmniMoeVisionEncoder,
)

from engine.attention.layer import AttentionStep
from engine.checkpoints.checkpoint import Checkpoint
from engine.layers import RotaryEmbedding
from engine.models.base import ModelSettings
from engine.models.decoders.decoder import DecoderConfig, DecoderModel, build_multi_axis_rotary
from engine.models.decoders.families import qwen3_moe_config
from engine.models.encoder_module import build_empty
from engine.models.qwen2_5_omni.thinker import AudioTower, Qwen2_5OmniThinker
from engine.models.qwen2_5_vl.qwen2_5_vl import ImageTower, VideoTower
from engine.models.qwen3_omni.talker import SECTIONS
from engine.requests.encoder_input import MultiModalInput


class Qwen3AudioTower(AudioTower):
    """Sound of any length to rows; see the module's note."""

    encoder = Qwen3OmniMoeAudioEncoder
    known_weight = "conv2d1.weight"
    least_frames = 1
    hears_silence = False

    def __init__(self, audio: PreTrainedConfig, settings: ModelSettings) -> None:
        super().__init__(audio, settings)
        self.piece: int = 2 * audio.n_window

    def rows_of(self, num_frames: int) -> int:
        """See :meth:`AudioTower.rows_of`."""
        pieces, rest = divmod(num_frames, self.piece)
        return pieces * -(-self.piece // 8) + -(-rest // 8)

    def forward(self, inputs: Sequence[MultiModalInput]) -> list[Tensor]:
        """One sound by itself: what a last piece's convolutions see depends on what else ran."""
        encode = super().forward
        return [rows for item in inputs for rows in encode([item])]


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
        config: DecoderConfig,
        rotary: RotaryEmbedding,
        settings: ModelSettings,
        kept_layer: int | None,
    ) -> None:
        super().__init__(config.for_length(settings.max_model_len), [rotary], settings)
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


class Qwen3OmniThinker(Qwen2_5OmniThinker):
    """A decoder that also emits what a talker reads; see the module's note."""

    pair_step = 1

    def for_talker(
        self, tensors: dict[str, Tensor], inputs_embeds: Tensor, step: AttentionStep
    ) -> dict[str, Tensor]:
        """See :meth:`Qwen2_5OmniThinker.for_talker`."""
        rows = tensors.pop("layer_states", None)
        if rows is None:
            return {}
        shown = step.shows_item
        rows = inputs_embeds if shown is None else torch.where(shown[:, None], rows, inputs_embeds)
        assert step.token_ids is not None
        return {"speech_rows": rows, "token_ids": step.token_ids}


def build_qwen3_omni_thinker(checkpoint: Checkpoint, settings: ModelSettings) -> Qwen3OmniThinker:
    """Build a thinker, its weights not yet loaded; see :data:`Builder`.

    One whose checkpoint has no talker emits nothing for it.
    """
    config, vision = checkpoint.config, checkpoint.config.vision_config
    text, whole = config.text_config, checkpoint.whole_config
    # Whether the head is the embedding is a matter of the whole, not of its text part.
    decoder = replace(qwen3_moe_config(text), tie_word_embeddings=bool(config.tie_word_embeddings))
    rotary = build_multi_axis_rotary(text, settings, SECTIONS, interleaved=True)
    speaks = getattr(whole, "enable_audio_output", False)
    kept = int(whole.talker_config.accept_hidden_layer) if speaks else None
    module = build_empty(Qwen3OmniMoeVisionEncoder, vision, settings)
    return Qwen3OmniThinker(
        checkpoint,
        DeepstackDecoder(decoder, rotary, settings, kept),
        {
            "image": DeepstackImageTower(module, vision),
            "audio": Qwen3AudioTower(config.audio_config, settings),
            "video": DeepstackVideoTower(module, vision, float(config.position_id_per_seconds)),
        },
        None,
    )

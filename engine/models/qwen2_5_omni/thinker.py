"""The thinker of Qwen2.5-Omni: text from text, images, sound and videos.

Tokens lie in time, height and width, and time is that of the world: a row of sound takes a place
(1/25 s), and a video's grids lie as many places apart as 25ths of a second pass between them::

    token    | a | ~ | ~ | ~ | b | v   v | v   v | c |     sound, and a video of 2 grids, 1 x 2
    time       0   1   2   3   4   5   5   55  55  56      rows each, 2 s apart
    height     0   1   2   3   4   5   5   5   5   56
    width      0   1   2   3   4   5   6   5   6   56

Beside its hidden states it hands on what a talker needs to speak: each token's own embedding and
its place. Videos are tensors. One may have its own sound, the two in step (``use_audio_in_video``):
see :mod:`engine.inputs.audio_in_video`.

Source: Xu et al., "Qwen2.5-Omni Technical Report", 2025; transformers' ``qwen2_5_omni``.
"""

from __future__ import annotations

from torch import Tensor
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniVisionEncoder

from engine.attention.step import AttentionStep
from engine.checkpoints.checkpoint import Checkpoint
from engine.inputs.audio_in_video import AudioInVideo
from engine.models.encoder_module import build_empty
from engine.models.model_settings import ModelSettings
from engine.models.qwen2_5_omni.audio_tower import AudioTower
from engine.models.qwen2_5_vl.multi_axis import MultiAxisModel, build_multi_axis_decoder
from engine.models.qwen2_5_vl.qwen2_5_vision import ImageTower, VideoTower

__all__ = ["Qwen2_5OmniThinker", "build_qwen2_5_omni_thinker"]


class Qwen2_5OmniThinker(MultiAxisModel):
    """A decoder that also tells what it was given; see the module's note."""

    def forward(
        self, inputs_embeds: Tensor, positions: Tensor, step: AttentionStep
    ) -> dict[str, Tensor]:
        """Run the decoder; see :meth:`MultiModalModel.forward`.

        Returns:
            ``hidden_states`` and ``token_embeds`` ``(num_tokens, hidden_size)``, the latter 0 for
            rows of items, and ``position_ids`` ``(num_tokens, 3)`` int64.
        """
        tensors = super().forward(inputs_embeds, positions, step)
        token_embeds = inputs_embeds
        if step.shows_item is not None:
            token_embeds = inputs_embeds.masked_fill(step.shows_item.unsqueeze(1), 0)
        places = positions.expand(self.num_position_axes, -1).T.contiguous()
        return tensors | {"token_embeds": token_embeds, "position_ids": places}


def build_qwen2_5_omni_thinker(
    checkpoint: Checkpoint, settings: ModelSettings
) -> Qwen2_5OmniThinker:
    """Build a thinker, its weights not yet loaded; see :data:`Builder`."""
    config = checkpoint.config
    vision = config.vision_config
    module = build_empty(Qwen2_5OmniVisionEncoder, vision, settings)
    model = Qwen2_5OmniThinker(
        build_multi_axis_decoder(config, settings),
        {
            "image": ImageTower(module, vision),
            "audio": AudioTower(config.audio_config, settings),
            "video": VideoTower(module, vision, float(config.position_id_per_seconds)),
        },
        {
            "image": int(config.image_token_index),
            "audio": int(config.audio_token_index),
            "video": int(config.video_token_index),
        },
        checkpoint.weight_files,
    )
    model.audio_in_video = AudioInVideo(
        int(config.audio_start_token_id),
        int(config.audio_end_token_id),
        int(config.position_id_per_seconds * config.seconds_per_chunk),
    )
    return model

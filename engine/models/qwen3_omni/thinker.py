"""The thinker of Qwen3-Omni: text from text, images, audio and videos, with a mixture of experts.

Tokens have positions in time, height and width, and time is real time, as in Qwen2.5-Omni; a time
position is as long as a row of audio, 1/13 s in published models. Rows of a video and its audio are
interleaved in order of time.

In addition to hidden states it emits what a talker needs for each token: its id, its position, and
a row: the embedding of a text token, or the stream after a middle layer for multimodal items.

Source: Xu et al., "Qwen3-Omni Technical Report", 2025; transformers' ``qwen3_omni_moe``.

The audio tower maps every eight log-mel frames to one row::

    frames  | 0 1 2 3 4 5 6 7 | 8 ...    10 ms each, in pieces of 1 s (two windows) with
    rows    | +               | +        13 rows each; a shorter last piece has fewer

Rows of images contain features of several depths: see :mod:`engine.models.qwen3_vl.qwen3_vl`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeAudioEncoder,
    Qwen3OmniMoeVisionEncoder,
)

from engine.attention.layer import AttentionStep
from engine.checkpoints.checkpoint import Checkpoint
from engine.models.base import ModelSettings
from engine.models.decoders.families import qwen3_moe_config
from engine.models.encoder_module import build_empty
from engine.models.qwen2_5_omni.thinker import AudioTower, Qwen2_5OmniThinker
from engine.models.qwen2_5_vl.qwen2_5_vl import ImageTower, VideoTower, build_multi_axis_decoder
from engine.requests.encoder_input import MultiModalInput


class Qwen3AudioTower(AudioTower):
    """Encodes audio of any length to rows; see the module docstring."""

    encoder = Qwen3OmniMoeAudioEncoder
    known_weight = "conv2d1.weight"
    min_frames = 1
    sound_end = "mirrored"

    def rows_of(self, num_frames: int) -> int:
        """See :meth:`AudioTower.rows_of`."""
        piece = 2 * int(self.audio.n_window)
        pieces, rest = divmod(num_frames, piece)
        return pieces * -(-piece // 8) + -(-rest // 8)

    def forward(self, inputs: Sequence[MultiModalInput]) -> list[Tensor]:
        """Encode recordings one by one: in a batch, the last piece's convolutions would differ."""
        encode = super().forward
        return [rows for item in inputs for rows in encode([item])]


class Qwen3OmniThinker(Qwen2_5OmniThinker):
    """A decoder that also emits what a talker reads; see the module docstring."""

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

    Without a talker in the checkpoint, it emits nothing for one.
    """
    config, vision = checkpoint.config, checkpoint.config.vision_config
    decoder, whole = qwen3_moe_config(config.text_config), checkpoint.whole_config
    speaks = getattr(whole, "enable_audio_output", False)
    kept = int(whole.talker_config.accept_hidden_layer) if speaks else None
    module = build_empty(Qwen3OmniMoeVisionEncoder, vision, settings)
    return Qwen3OmniThinker(
        checkpoint,
        build_multi_axis_decoder(config, settings, decoder, interleaved=True, kept_layer=kept),
        {
            "image": ImageTower(module, vision),
            "audio": Qwen3AudioTower(config.audio_config, settings),
            "video": VideoTower(module, vision, float(config.position_id_per_seconds)),
        },
        None,
    )

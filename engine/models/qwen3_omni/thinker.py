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

Rows of images bring features of several depths: see :mod:`engine.models.qwen3_vl.qwen3_vl`.
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
from engine.models.qwen2_5_vl.qwen2_5_vl import (
    ImageTower,
    VideoTower,
    build_multi_axis_decoder,
)
from engine.requests.encoder_input import MultiModalInput


class Qwen3AudioTower(AudioTower):
    """Sound of any length to rows; see the module's note."""

    encoder = Qwen3OmniMoeAudioEncoder
    known_weight = "conv2d1.weight"
    least_frames = 1
    sound_end = "mirrored"

    def rows_of(self, num_frames: int) -> int:
        """See :meth:`AudioTower.rows_of`."""
        piece = 2 * int(self.audio.n_window)
        pieces, rest = divmod(num_frames, piece)
        return pieces * -(-piece // 8) + -(-rest // 8)

    def forward(self, inputs: Sequence[MultiModalInput]) -> list[Tensor]:
        """One sound by itself: what a last piece's convolutions see depends on what else ran."""
        encode = super().forward
        return [rows for item in inputs for rows in encode([item])]


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

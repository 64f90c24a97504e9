"""The thinker of Qwen2.5-Omni: generates text from text, images, audio and videos.

Tokens have positions in time, height and width, and time is real time: a row of audio advances it
by one (1/25 s), and a video's grids by the number of 25ths of a second between them::

    token    | a | ~ | ~ | ~ | b | v   v | v   v | c |     audio, and a video of 2 grids, 1 x 2
    time       0   1   2   3   4   5   5   55  55  56      rows each, 2 s apart
    height     0   1   2   3   4   5   5   5   5   56
    width      0   1   2   3   4   5   6   5   6   56

In addition to hidden states it emits what a talker needs: each token's embedding and position.
Videos are tensors. A video may be synchronised with its audio (``use_audio_in_video``):
see :mod:`engine.inputs.multimodal_inputs`.

The audio tower maps every four log-mel frames to one row::

    frames  | 0 1 2 3 4 5 6 7 8 9 | ...    10 ms each, any number of them
    conv    | .   .   .   .   .   |        every second frame, within independent pieces of 2 s
    rows    | +       +           |        one per two outputs; a single remaining one is dropped

Source: Xu et al., "Qwen2.5-Omni Technical Report", 2025; transformers' ``qwen2_5_omni``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniAudioEncoder,
    Qwen2_5OmniVisionEncoder,
)

from engine.attention.layer import AttentionStep
from engine.checkpoints.checkpoint import Checkpoint
from engine.inputs.multimodal_inputs import AudioInVideo
from engine.models.base import ModelSettings
from engine.models.decoders.decoder import DecoderModel
from engine.models.decoders.families import qwen2_config
from engine.models.encoder_module import build_empty
from engine.models.multimodal import ItemTower
from engine.models.qwen2_5_vl.qwen2_5_vl import (
    ImageTower,
    MultiAxisModel,
    VideoTower,
    build_multi_axis_decoder,
)
from engine.requests.encoder_input import Modality, MultiModalInput

_FRAMES = "input_features"


class AudioTower(ItemTower):
    """Encodes audio of any length to rows; ``input_features`` ``(mel bins, frames)`` are unpadded.

    Args:
        config: of the tower, or of a module that contains it.
    """

    feature_names = (_FRAMES,)
    encoder: Callable[[Any], PreTrainedModel] = Qwen2_5OmniAudioEncoder
    known_weight = "audio_bos_eos_token.weight"
    min_frames = 3

    def __init__(self, config: PreTrainedConfig, settings: ModelSettings) -> None:
        super().__init__()
        self.module = build_empty(type(self).encoder, config, settings)
        self.audio: Any = getattr(config, "audio_config", config)
        self.num_mel_bins: int = self.audio.num_mel_bins

    def num_rows(self, features: Mapping[str, Tensor]) -> int:
        """See :meth:`ItemTower.num_rows`."""
        self.require_features(features)
        shape = tuple(features[_FRAMES].shape)
        if len(shape) != 2 or shape[0] != self.num_mel_bins:
            raise ValueError(f"{_FRAMES} must be ({self.num_mel_bins}, frames), got {shape}")
        num_frames = shape[1]
        if num_frames < self.min_frames:
            raise ValueError(
                f"the audio is too short: it has {num_frames} frames of log-mel features, and "
                f"{self.min_frames} are needed to make a row"
            )
        return self.rows_of(num_frames)

    def rows_of(self, num_frames: int) -> int:
        """Return the number of rows for a number of frames."""
        return ((num_frames - 1) // 2 + 1) // 2

    def forward(self, inputs: Sequence[MultiModalInput]) -> list[Tensor]:
        """See :meth:`ItemTower.forward`."""
        device = self.module.device
        frames = torch.cat([item.features[_FRAMES] for item in inputs], dim=1)
        lengths = torch.tensor([item.features[_FRAMES].shape[1] for item in inputs])
        output = self.module(frames.to(device, self.module.dtype), feature_lens=lengths.to(device))
        return list(output.last_hidden_state.split([item.num_rows for item in inputs]))


class Qwen2_5OmniThinker(MultiAxisModel):
    """A decoder that also emits its inputs; see the module docstring.

    Args:
        chunk: time positions per chunk in which video and its audio alternate; None: row by row.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        decoder: DecoderModel,
        towers: Mapping[Modality, ItemTower],
        chunk: int | None,
    ) -> None:
        config = checkpoint.config
        ids = {name: int(getattr(config, f"{name}_token_id")) for name in towers}
        super().__init__(decoder, towers, ids, checkpoint.weight_files)
        self.audio_in_video = AudioInVideo(
            int(config.audio_start_token_id), int(config.audio_end_token_id), chunk
        )

    def forward(
        self, inputs_embeds: Tensor, positions: Tensor, step: AttentionStep
    ) -> dict[str, Tensor]:
        """Run the decoder; see :meth:`MultiModalModel.forward`."""
        tensors = super().forward(inputs_embeds, positions, step)
        spoken = self.for_talker(tensors, inputs_embeds, step)
        if not spoken:
            return tensors
        places = positions.expand(self.num_position_axes, -1).T.contiguous()
        return tensors | spoken | {"position_ids": places}

    def for_talker(
        self, tensors: dict[str, Tensor], inputs_embeds: Tensor, step: AttentionStep
    ) -> dict[str, Tensor]:
        """Return further tensors for a talker, in addition to positions; empty without a talker."""
        if step.shows_item is None:
            return {"token_embeds": inputs_embeds}
        return {"token_embeds": inputs_embeds.masked_fill(step.shows_item.unsqueeze(1), 0)}


def build_qwen2_5_omni_thinker(
    checkpoint: Checkpoint, settings: ModelSettings
) -> Qwen2_5OmniThinker:
    """Build a thinker, its weights not yet loaded; see :data:`Builder`."""
    config = checkpoint.config
    vision = config.vision_config
    module = build_empty(Qwen2_5OmniVisionEncoder, vision, settings)
    return Qwen2_5OmniThinker(
        checkpoint,
        build_multi_axis_decoder(config, settings, qwen2_config(config.text_config)),
        {
            "image": ImageTower(module, vision),
            "audio": AudioTower(config.audio_config, settings),
            "video": VideoTower(module, vision, float(config.position_id_per_seconds)),
        },
        int(config.position_id_per_seconds * config.seconds_per_chunk),
    )

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
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeAudioEncoder,
    Qwen3OmniMoeVisionEncoder,
)

from engine.attention.layer import AttentionStep
from engine.checkpoints.checkpoint import Checkpoint
from engine.inputs.multimodal_inputs import AudioInVideo
from engine.models.base import ModelSettings
from engine.models.decoders.decoder import DecoderConfig
from engine.models.decoders.families import qwen3_moe_config
from engine.models.encoder_module import build_empty
from engine.models.multimodal import ItemTower, unique_prefix
from engine.models.qwen2_5_vl.qwen2_5_vl import MultiAxisModel
from engine.models.qwen3_vl.deepstack import (
    DeepstackDecoder,
    DeepstackImageTower,
    DeepstackVideoTower,
)
from engine.requests.encoder_input import MultiModalInput

__all__ = ["Qwen3AudioTower", "Qwen3OmniThinker", "build_qwen3_omni_thinker"]

_FRAMES = "input_features"


class Qwen3AudioTower(ItemTower):
    """Sound of any length to rows; ``input_features`` are ``(mel bins, frames)``, none padding."""

    feature_names = (_FRAMES,)
    hears_silence = False

    def __init__(self, audio: PreTrainedConfig, settings: ModelSettings) -> None:
        super().__init__()
        self.module = build_empty(Qwen3OmniMoeAudioEncoder, audio, settings)
        self.num_mel_bins: int = audio.num_mel_bins
        self.piece: int = 2 * audio.n_window

    def targets(self, stored: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`ItemTower.targets`."""
        prefix = unique_prefix(stored, "conv2d1.weight")
        for name, tensor in self.module.state_dict().items():
            yield f"{prefix}{name}", tensor

    def num_rows(self, features: Mapping[str, Tensor]) -> int:
        """See :meth:`ItemTower.num_rows`."""
        self.require_features(features)
        shape = tuple(features[_FRAMES].shape)
        if len(shape) != 2 or shape[0] != self.num_mel_bins or not shape[1]:
            raise ValueError(f"{_FRAMES} must be ({self.num_mel_bins}, frames), got {shape}")
        pieces, rest = divmod(shape[1], self.piece)
        return pieces * -(-self.piece // 8) + -(-rest // 8)

    def forward(self, inputs: Sequence[MultiModalInput]) -> list[Tensor]:
        """See :meth:`ItemTower.forward`."""
        return [self._encode(item.features[_FRAMES]) for item in inputs]

    def _encode(self, frames: Tensor) -> Tensor:
        """One sound by itself: what a last piece's convolutions see depends on what else ran."""
        device, length = self.module.device, torch.tensor([frames.shape[1]])
        frames = frames.to(device, self.module.dtype)
        rows: Tensor = self.module(frames, feature_lens=length.to(device)).last_hidden_state
        return rows


class Qwen3OmniThinker(MultiAxisModel):
    """A decoder that also emits what a talker reads; see the module's note."""

    pair_step = 1

    def forward(
        self, inputs_embeds: Tensor, positions: Tensor, step: AttentionStep
    ) -> dict[str, Tensor]:
        """Run the decoder; see :meth:`MultiModalModel.forward`."""
        tensors = super().forward(inputs_embeds, positions, step)
        rows, shown = tensors.pop("layer_states", None), step.shows_item
        if rows is None:
            return tensors
        if shown is None:
            rows = inputs_embeds
        else:
            rows = torch.where(shown.unsqueeze(1), rows, inputs_embeds)
        places = positions.expand(self.num_position_axes, -1).T.contiguous()
        assert step.token_ids is not None
        ids = step.token_ids
        return tensors | {"speech_rows": rows, "position_ids": places, "token_ids": ids}


def build_qwen3_omni_thinker(checkpoint: Checkpoint, settings: ModelSettings) -> Qwen3OmniThinker:
    """Build a thinker, its weights not yet loaded; see :data:`Builder`.

    One whose checkpoint has no talker emits nothing for it.
    """
    config, vision = checkpoint.config, checkpoint.config.vision_config

    def read_config(text: PreTrainedConfig) -> DecoderConfig:
        # Whether the head is the embedding is a matter of the whole, not of its text part.
        return replace(qwen3_moe_config(text), tie_word_embeddings=bool(config.tie_word_embeddings))

    module = build_empty(Qwen3OmniMoeVisionEncoder, vision, settings)
    places_per_second = float(config.position_id_per_seconds)
    kept = _kept_layer(checkpoint)
    model = Qwen3OmniThinker(
        DeepstackDecoder(read_config, config.text_config, settings, kept_layer=kept),
        {
            "image": DeepstackImageTower(module, vision),
            "audio": Qwen3AudioTower(config.audio_config, settings),
            "video": DeepstackVideoTower(module, vision, places_per_second),
        },
        {
            "image": int(config.image_token_id),
            "audio": int(config.audio_token_id),
            "video": int(config.video_token_id),
        },
        checkpoint.weight_files,
    )
    model.audio_in_video = AudioInVideo(
        int(config.audio_start_token_id), int(config.audio_end_token_id), None
    )
    return model


def _kept_layer(checkpoint: Checkpoint) -> int | None:
    """Whose stream a talker reads; None of a checkpoint that has none."""
    whole = checkpoint.whole_config
    if not getattr(whole, "enable_audio_output", False):
        return None
    return int(whole.talker_config.accept_hidden_layer)

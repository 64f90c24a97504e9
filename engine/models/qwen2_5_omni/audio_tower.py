"""The audio tower of Qwen2.5-Omni: log-mel frames in, a row for every four of them out.

::

    frames  | 0 1 2 3 4 5 6 7 8 9 | ...    10 ms each, any number of them
    conv    | .   .   .   .   .   |        every second frame, within pieces of 2 s that do not
    rows    | +       +           |        see each other; two make a row, a single one makes none

Source: Xu et al., "Qwen2.5-Omni Technical Report", 2025; transformers' ``qwen2_5_omni``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder

from engine.models.encoder_module import build_empty
from engine.models.model_settings import ModelSettings
from engine.models.multimodal import ItemTower, unique_prefix
from engine.requests.multimodal_input import MultiModalInput

__all__ = ["AudioTower"]

_FRAMES = "input_features"
_LEAST_FRAMES = 3


class AudioTower(ItemTower):
    """Sound of any length to rows; ``input_features`` are ``(mel bins, frames)``, none padding."""

    feature_names = (_FRAMES,)

    def __init__(self, audio: PreTrainedConfig, settings: ModelSettings) -> None:
        super().__init__()
        self.module = build_empty(Qwen2_5OmniAudioEncoder, audio, settings)
        self.num_mel_bins: int = audio.num_mel_bins

    def targets(self, stored: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`ItemTower.targets`."""
        prefix = unique_prefix(stored, "audio_bos_eos_token.weight")
        for name, tensor in self.module.state_dict().items():
            yield f"{prefix}{name}", tensor

    def num_rows(self, features: Mapping[str, Tensor]) -> int:
        """See :meth:`ItemTower.num_rows`."""
        self.require_features(features)
        shape = tuple(features[_FRAMES].shape)
        if len(shape) != 2 or shape[0] != self.num_mel_bins:
            raise ValueError(f"{_FRAMES} must be ({self.num_mel_bins}, frames), got {shape}")
        num_frames = shape[1]
        if num_frames < _LEAST_FRAMES:
            raise ValueError(
                f"the audio is too short: it has {num_frames} frames of log-mel features, and "
                f"{_LEAST_FRAMES} are needed to make a row"
            )
        return ((num_frames - 1) // 2 + 1) // 2

    def forward(self, inputs: Sequence[MultiModalInput]) -> list[Tensor]:
        """See :meth:`ItemTower.forward`."""
        device = self.module.device
        frames = torch.cat([item.features[_FRAMES] for item in inputs], dim=1)
        lengths = torch.tensor([item.features[_FRAMES].shape[1] for item in inputs])
        output = self.module(frames.to(device, self.module.dtype), feature_lens=lengths.to(device))
        return list(output.last_hidden_state.split([item.num_rows for item in inputs]))

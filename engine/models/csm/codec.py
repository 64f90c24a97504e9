"""CSM's codec, Mimi: frames of codes to sound from chunk to chunk, and sound to frames.

::

    codes ──► quantizer ──► upsample ──► decoder over a window ──► convolutions ──► samples
    12.5 frames a second    25 places a second                                      24,000

All of it is causal; see :mod:`engine.models.causal_vocoder`. The networks are transformers'.

Source: Defossez et al., "Moshi: a speech-text foundation model for real-time dialogue", 2024;
transformers' ``mimi``.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers.models.mimi.modeling_mimi import (
    MimiConv1d,
    MimiConvTranspose1d,
    MimiModel,
    apply_rotary_pos_emb,
)

from engine.checkpoints.checkpoint import Checkpoint
from engine.models.base import ModelSettings
from engine.models.causal_vocoder import CausalVocoder, Overlap
from engine.models.checked_loading import Places, load_checked
from engine.models.encoder_module import build_empty


def decoding_half(config: Any) -> MimiModel:
    """The codec without what hears."""
    config.encoder_config = None
    return MimiModel(config)


def hearing_half(config: Any) -> MimiModel:
    """The codec without what makes sound."""
    config.decoder_config = None
    return MimiModel(config)


def stored_name(name: str) -> str:
    """The name under which checkpoints have one of the codec's weights.

    Files are older than the class's halves: its ``decoder.decoder_seanet...`` is ``decoder...``
    there, its ``decoder.upsample...`` is ``upsample...``.
    """
    side, _, rest = name.partition(".")
    if side not in ("encoder", "decoder"):
        return name
    return rest.replace(f"{side}_seanet.", f"{side}.", 1)


class MimiCodec(CausalVocoder):
    """Makes sound of frames, in float32; see :class:`GeneratorModel`.

    Args:
        checkpoint: opened at its part ``mimi``.

    Raises:
        ValueError: the weights do not fit the config, or the codec is not causal.
    """

    rotate = staticmethod(apply_rotary_pos_emb)

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        super().__init__()
        config, whole = cast("Any", checkpoint.config), cast("Any", checkpoint.whole_config)
        if (
            not config.use_causal_conv
            or config.trim_right_ratio != 1
            or config.pad_mode != "constant"
        ):
            raise ValueError(
                f"{checkpoint.config_file}: codec_config must have use_causal_conv true, "
                f"trim_right_ratio 1 and pad_mode 'constant', got {config.use_causal_conv}, "
                f"{config.trim_right_ratio} and {config.pad_mode!r}"
            )
        self.device = device
        self.sampling_rate = config.sampling_rate
        self.num_codes, self.num_codebooks = config.codebook_size, whole.num_codebooks
        self.samples_per_code = int(config.sampling_rate / config.frame_rate)
        self.max_codes = whole.max_position_embeddings
        self.window = config.sliding_window
        self.network = load_checked(
            checkpoint,
            device,
            lambda where: build_empty(
                decoding_half, config, ModelSettings(torch.float32, where, 1, self.max_codes)
            ),
            lambda network: Places(
                {stored_name(name): tensor for name, tensor in network.state_dict().items()},
                frozenset(
                    name
                    for name in checkpoint.weight_files
                    if name.startswith(("encoder", "downsample."))
                ),
            ),
        )
        self.replace_convolutions(self.network, _overlap)

    def sound_of(self, codes: Tensor, starts: Tensor) -> Tensor:
        """See :meth:`CausalVocoder.sound_of`."""
        network: Any = self.network
        half = network.decoder
        hidden = half.upsample(network.quantizer.decode(codes)).transpose(1, 2)
        places = hidden.shape[1] // codes.shape[2]
        hidden = self.attend(half.decoder_transformer, hidden, starts * places)
        return cast("Tensor", half.decoder_seanet(hidden.transpose(1, 2)))


def _overlap(module: Any) -> Overlap | None:
    if isinstance(module, MimiConv1d):
        return Overlap(int(module.padding_total), is_padded=True)
    if isinstance(module, MimiConvTranspose1d):
        stride, right = module.conv.stride[0], module.padding_right
        return Overlap(min(right, 1), is_padded=False, trims=(0, stride, right))
    return None

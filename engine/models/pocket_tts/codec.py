"""Pocket TTS's codec: latents to audio, chunk by chunk, and audio to latents.

Mimi without codebooks: a position has ``latent_dim`` numbers. Where codes are expected, each number
is represented by the 32 bits of its float32, so that nothing is rounded.

Source: Rouard et al., "Continuous Audio Language Models", 2025; transformers'
``pocket_tts_audio_tokenizer``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.pocket_tts_audio_tokenizer.modeling_pocket_tts_audio_tokenizer import (
    PocketTTSAudioTokenizerConv1d,
    PocketTTSAudioTokenizerConvTranspose1d,
    PocketTTSAudioTokenizerModel,
)

from engine.checkpoints.checkpoint import Checkpoint
from engine.models.causal_vocoder import CausalVocoder
from engine.models.csm.codec import Half, check_codec, without
from engine.models.encoder_module import load_network

_CAUSAL = (PocketTTSAudioTokenizerConv1d, PocketTTSAudioTokenizerConvTranspose1d)
_FADE_IN_S = 0.005
"""A decoder without history begins with a step, which would be audible as a click."""


def bits_of(latents: Tensor) -> Tensor:
    """Convert latents to the bits of their float32 values, int64 from 0 to 2**32 - 1."""
    return latents.float().contiguous().view(torch.int32).to(torch.int64) & 0xFFFF_FFFF


def latents_of(bits: Tensor) -> Tensor:
    """Invert :func:`bits_of`."""
    return bits.to(torch.int32).view(torch.float32)


class PocketCodec(CausalVocoder):
    """The decoding half of a codec; see :class:`CausalVocoder`, for errors :func:`load_half`."""

    num_codes = 2**32

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        config: Any = checkpoint.config
        super().__init__(device, config.sliding_window)
        self.num_codebooks: int = config.latent_dim
        self.sampling_rate, self.samples_per_code = config.sampling_rate, config.frame_size
        self.max_codes = 2**20  # no learned positions, and sliding-window attention
        self.network = load_half("decoder", checkpoint, device)
        self.stream_convolutions(self.network, _CAUSAL)
        fade = torch.linspace(0, 1, int(_FADE_IN_S * self.sampling_rate))
        self._fade = fade[: self.samples_per_code].to(device)

    def forward(self, codes: Tensor, starts: Tensor) -> Tensor:
        """See :meth:`CausalVocoder.forward`."""
        decoder = self.network.decoder
        hidden = decoder.upsample(self.network.latent_proj(latents_of(codes))).transpose(1, 2)
        places = starts * decoder.config.latent_stride
        hidden = self.attend(decoder.decoder_transformer, hidden, places)
        sound: Tensor = decoder.decoder_seanet(hidden.transpose(1, 2))
        sound[starts == 0, :, : len(self._fade)] *= self._fade
        return sound


def load_half(
    half: Half, checkpoint: Checkpoint, device: torch.device
) -> PocketTTSAudioTokenizerModel:
    """Load one half of a codec, in float32.

    Raises:
        ValueError: the config is not supported, or the weights do not match it.
    """
    check_codec(checkpoint.config)
    other: Half = "decoder" if half == "encoder" else "encoder"
    make = without(other, PocketTTSAudioTokenizerModel)
    ignored = [name for name in checkpoint.weight_files if name.startswith(f"{other}.")]
    return load_network(checkpoint, device, make, ignored=ignored)

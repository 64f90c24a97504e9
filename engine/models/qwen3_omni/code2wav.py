"""Qwen3-Omni's vocoder: codes of several codebooks to audio, chunk by chunk.

Its transposed convolutions begin late; see :mod:`engine.models.causal_vocoder`.

Source: Xu et al., "Qwen3-Omni Technical Report", 2025; transformers' ``qwen3_omni_moe``.
"""

from __future__ import annotations

from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCausalConvNet,
    Qwen3OmniMoeCausalTransConvNet,
    Qwen3OmniMoeCode2Wav,
)

from engine.checkpoints.checkpoint import Checkpoint
from engine.models.causal_vocoder import CausalVocoder
from engine.models.encoder_module import load_network

# Samples per second of this family, which its configs do not contain.
_SAMPLING_RATE = 24_000
_CAUSAL = (Qwen3OmniMoeCausalConvNet, Qwen3OmniMoeCausalTransConvNet)


class Qwen3Code2Wav(CausalVocoder):
    """The vocoder of a checkpoint; see :class:`CausalVocoder`.

    Args:
        checkpoint: opened at its part ``code2wav``.

    Raises:
        ValueError: the weights do not match the config.
    """

    sampling_rate = _SAMPLING_RATE

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        config: Any = checkpoint.config
        super().__init__(device, config.sliding_window)
        self.num_codes, self.num_codebooks = config.codebook_size, config.num_quantizers
        self.max_codes = config.max_position_embeddings
        rates = (*config.upsampling_ratios, *config.upsample_rates)
        self.samples_per_code = prod(rates)
        # Each of the last rates drops the samples of one input, multiplied by the later rates.
        last = config.upsample_rates
        self.num_missing = sum(prod(last[n:]) for n in range(len(last)))
        self.network = load_network(checkpoint, device, Qwen3OmniMoeCode2Wav)
        self.stream_convolutions(self.network, _CAUSAL, begins_late=True)

    def forward(self, codes: Tensor, starts: Tensor) -> Tensor:
        """See :meth:`CausalVocoder.forward`."""
        network, decoder = self.network, self.network.pre_transformer
        hidden: Tensor = network.code_embedding(codes + network.code_offset).mean(1)
        hidden = decoder.norm(self.attend(decoder, hidden, starts)).transpose(1, 2)
        for block in (*chain.from_iterable(network.upsample), *network.decoder):
            hidden = block(hidden)
        return hidden

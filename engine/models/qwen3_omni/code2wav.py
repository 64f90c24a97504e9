"""Qwen3-Omni's vocoder: codes of several codebooks to sound, from chunk to chunk.

All of it is causal: a decoder whose tokens see a window of earlier ones, then convolutions that see
only what came before; see :mod:`engine.models.causal_vocoder`. The networks are transformers'.

Each transposed convolution gives one input's samples less than it gets, at the beginning::

    inputs    | a     | b     | c     |            sound | ab    | bc    |
    chunks    | a     | b     |  then  | c     |         | ab    |  then  | bc    |

Source: Xu et al., "Qwen3-Omni Technical Report", 2025; transformers' ``qwen3_omni_moe``.
"""

from __future__ import annotations

from itertools import chain
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCausalConvNet,
    Qwen3OmniMoeCausalTransConvNet,
    Qwen3OmniMoeCode2Wav,
    apply_rotary_pos_emb,
)

from engine.checkpoints.checkpoint import Checkpoint
from engine.models.base import ModelSettings
from engine.models.causal_vocoder import CausalVocoder, Overlap
from engine.models.checked_loading import Places, load_checked
from engine.models.encoder_module import build_empty

# Samples per second of this family; its configs do not tell.
_SAMPLING_RATE = 24_000


class Qwen3Code2Wav(CausalVocoder):
    """The vocoder of a checkpoint, in float32; see :class:`GeneratorModel`.

    Args:
        checkpoint: opened at its part ``code2wav``.

    Raises:
        ValueError: the weights do not fit the config.
    """

    sampling_rate = _SAMPLING_RATE
    rotate = staticmethod(apply_rotary_pos_emb)

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        super().__init__()
        config: Any = checkpoint.config
        self.device = device
        self.num_codes, self.num_codebooks = config.codebook_size, config.num_quantizers
        self.max_codes = config.max_position_embeddings
        rates = (*config.upsampling_ratios, *config.upsample_rates)
        self.samples_per_code = prod(rates)
        # Each of the last rates loses an input's samples, which the rates behind it multiply.
        behind = [prod(config.upsample_rates[n:]) for n in range(len(config.upsample_rates))]
        self.num_missing = sum(behind)
        self.window: int = config.sliding_window
        self.network = load_checked(
            checkpoint,
            device,
            lambda where: build_empty(
                Qwen3OmniMoeCode2Wav,
                config,
                ModelSettings(torch.float32, where, 1, self.max_codes),
            ),
            lambda network: Places(network.state_dict()),
        )
        self.replace_convolutions(self.network, _overlap)

    def sound_of(self, codes: Tensor, starts: Tensor) -> Tensor:
        """See :meth:`CausalVocoder.sound_of`."""
        network: Any = self.network
        hidden = network.code_embedding(codes + network.code_offset).mean(1)
        hidden = self.attend(network.pre_transformer, hidden, starts)
        hidden = network.pre_transformer.norm(hidden).transpose(1, 2)
        for block in (*chain.from_iterable(network.upsample), *network.decoder):
            hidden = block(hidden)
        return cast("Tensor", hidden)


def _overlap(module: Any) -> Overlap | None:
    if isinstance(module, Qwen3OmniMoeCausalConvNet):
        return Overlap(module.padding, is_padded=True)
    if isinstance(module, Qwen3OmniMoeCausalTransConvNet):
        left, right = module.left_pad, module.right_pad
        return Overlap(min(left, 1), is_padded=False, trims=(left, left, right))
    return None

"""Config values of talker and vocoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni.seeded.omni import codec_vocabulary

NUM_CODES = 1024
"""Codes 1 to 1023 are learnt; 0 is reserved for the flow's "no condition"."""

BIGVGAN: Mapping[str, Any] = {
    "mel_dim": 80,
    # Four upsamplers, 240 in all, leave 16 channels at 24 kHz; the published six would leave 4.
    "upsample_initial_channel": 256,
    "upsample_rates": [6, 5, 4, 2],
    "upsample_kernel_sizes": [12, 11, 8, 4],
    "resblock_kernel_sizes": [3, 7],
    "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5]],
}

DIT: Mapping[str, Any] = {
    "hidden_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 3,
    "head_dim": 64,
    "ff_mult": 2,
    "emb_dim": 96,
    "block_size": 24,
    "look_ahead_layers": [2],
    "look_backward_layers": [0, 5],
    "repeats": 2,
    # One more row than this: every codec token has a row.
    "num_embeds": NUM_CODES + 7,
    "mel_dim": 80,
    "enc_emb_dim": 16,
    "enc_dim": 32,
    "enc_channels": [32, 32, 32, 32, 96],
    "enc_kernel_sizes": [5, 3, 3, 3, 1],
    "enc_dilations": [1, 2, 3, 4, 1],
    "enc_attention_channels": 16,
    "enc_res2net_scale": 2,
    "enc_se_channels": 16,
    "dropout": 0.0,
}

TALKER: Mapping[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    **codec_vocabulary(NUM_CODES),
}

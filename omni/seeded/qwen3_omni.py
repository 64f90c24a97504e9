"""Seeded Qwen3-Omni: thinker, talker and vocoder in one folder, with the files real ones have."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeForConditionalGeneration,
)

from engine.checkpoints.config_file import quiet_config_log
from omni.seeded.building import (
    ATTENTION_GAIN,
    DecoderSettings,
    initialise,
    seeded_model,
)
from omni.seeded.multimodal import DEEP_VISION, rope
from omni.seeded.omni import (
    OMNI_SPEAKERS,
    SMALL_DECODER,
    SMALL_HEARING,
    marker_ids,
    omni_tokenizer,
    save_omni,
)

_ROLES = ("system", "user", "assistant")
_WIDTH = 64
_NUM_CODES, _NUM_CODEBOOKS = 64, 4
_ROPE = rope([4, 2, 2])
_AUDIO: Mapping[str, Any] = {**SMALL_HEARING, "downsample_hidden_size": 8}
_EXPERTS: Mapping[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
_TALKER: Mapping[str, Any] = {
    **_EXPERTS,
    **SMALL_DECODER,
    "shared_expert_intermediate_size": 48,
    # The published model's last 1,024 ids are signs, too.
    "vocab_size": _NUM_CODES + 1024,
    "rope_parameters": _ROPE,
}
_PREDICTOR: Mapping[str, Any] = {
    **SMALL_DECODER,
    "vocab_size": _NUM_CODES,
    "num_code_groups": _NUM_CODEBOOKS,
}
_CODE2WAV: Mapping[str, Any] = {
    "codebook_size": _NUM_CODES,
    "num_quantizers": _NUM_CODEBOOKS,
    **SMALL_DECODER,
    "num_key_value_heads": 2,
    "sliding_window": 8,
    "decoder_dim": 16,
    "upsample_rates": [5, 4, 3],
    "upsampling_ratios": [2, 2],
}
_GAINS = dict.fromkeys(("q_proj", "k_proj", "qkv"), ATTENTION_GAIN)
# The vocoder ends in a clamp; with full fan-in most of its samples lie beyond it.
_VOCODER_GAIN = 0.5


def build_qwen3_omni(directory: str | Path, *, speaks: bool = True) -> Path:
    """Write a seeded Qwen3-Omni with its processors' files and two voices.

    Args:
        speaks: False writes a thinker alone, as some published checkpoints are.
    """
    tokenizer = omni_tokenizer(768 - len(_ROLES))
    # Roles are single tokens, by which a talker tells turns apart.
    tokenizer.add_tokens(list(_ROLES))
    with quiet_config_log():
        config = _config(tokenizer, speaks)
        make = partial(Qwen3OmniMoeForConditionalGeneration, config)
        model = seeded_model(make, torch.Generator().manual_seed(0), _initialise)
        return save_omni(directory, model, tokenizer, "Qwen3OmniMoeProcessor")


def _config(tokenizer: PreTrainedTokenizerFast, speaks: bool) -> Qwen3OmniMoeConfig:
    vocabulary = tokenizer.get_vocab()
    markers = marker_ids(tokenizer, "id") | {
        "user_token_id": vocabulary["user"],
        "position_id_per_seconds": 13,
    }
    text = DecoderSettings(hidden_size=_WIDTH, num_layers=4, max_position_embeddings=4096)
    words = {**text.text_config(tokenizer), **_EXPERTS, "head_dim": 16, "rope_parameters": _ROPE}
    signs = ("pad", "bos", "eos", "nothink", "think_bos", "think_eos")
    codec = {
        f"codec_{sign}_{'token_id' if sign == 'eos' else 'id'}": _NUM_CODES + place
        for place, sign in enumerate(signs)
    }
    voices = enumerate(OMNI_SPEAKERS, _NUM_CODES + len(signs))
    seen = DEEP_VISION | {"out_hidden_size": _WIDTH}
    return Qwen3OmniMoeConfig(
        thinker_config={"text_config": words, "vision_config": seen, "audio_config": _AUDIO}
        | markers,
        talker_config={
            "text_config": _TALKER,
            "code_predictor_config": _PREDICTOR,
            "num_code_groups": _NUM_CODEBOOKS,
            "thinker_hidden_size": _WIDTH,
            "accept_hidden_layer": 2,
            "spatial_merge_size": 2,
            "speaker_id": {name.lower(): token_id for token_id, name in voices},
        }
        | codec
        | markers,
        code2wav_config=dict(_CODE2WAV),
        enable_audio_output=speaks,
        im_start_token_id=vocabulary["<|im_start|>"],
        im_end_token_id=vocabulary["<|im_end|>"],
        tts_pad_token_id=vocabulary["<tts_pad>"],
        tts_bos_token_id=vocabulary["<tts_bos>"],
        tts_eos_token_id=vocabulary["<tts_eos>"],
        **{f"{role}_token_id": vocabulary[role] for role in _ROLES},
    )


def _initialise(name: str, parameter: nn.Parameter, generator: torch.Generator) -> None:
    if name.endswith("embed.weight") or "embedding" in name:
        parameter.normal_(0.0, 1.0, generator=generator)
    elif "experts" in name or ("code2wav" in name and parameter.ndim == 3):
        # Experts are stacked; a transposed convolution has its inputs in the first dimension.
        rows = parameter if ".block.1." not in name else parameter.transpose(0, 1)
        fan_in = parameter.shape[-1] if "experts" in name else rows[0].numel()
        gain = 1.0 if "experts" in name else _VOCODER_GAIN
        parameter.normal_(0.0, gain * fan_in**-0.5, generator=generator)
    else:
        initialise(name, parameter, generator, tied=False, gains=_GAINS)

"""The sizes of all parts, in the published layout of Qwen2.5-Omni."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerFast, Qwen2_5OmniConfig

from omni.seeded.omni import marker_ids, spoken_ids
from training.spoken_sums.mouth_sizes import BIGVGAN, DIT, TALKER

WIDTH = 256
"""Width of the thinker, and so of the talker's input."""


def _rope(sections: list[int]) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}


TEXT: Mapping[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "rope_parameters": _rope([8, 12, 12]),
    "tie_word_embeddings": False,
}
AUDIO_TOWER: Mapping[str, Any] = {
    "num_mel_bins": 80,
    "d_model": 160,
    "encoder_layers": 3,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 640,
    "max_source_positions": 1500,
    # Rows attend to each other within 6 s: no question is that long.
    "n_window": 300,
    "output_dim": WIDTH,
}
# Vision is not trained; the layout requires a tower, and this is about the minimum.
VISION: Mapping[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 1,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "window_size": 56,
    "fullatt_block_indexes": [0],
    "out_hidden_size": WIDTH,
}


def omni_config(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5OmniConfig:
    """Return the config of the whole checkpoint."""
    markers = marker_ids(tokenizer)
    text = {
        **TEXT,
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    rope = {"rope_parameters": _rope([4, 6, 6])}
    talker = {**TALKER, **spoken_ids(tokenizer), **rope, "embedding_size": WIDTH}
    thinker = {"text_config": text, "vision_config": VISION, "audio_config": AUDIO_TOWER}
    return Qwen2_5OmniConfig(
        thinker_config=thinker | markers,
        talker_config=talker | markers,
        token2wav_config={"dit_config": DIT, "bigvgan_config": BIGVGAN},
        enable_audio_output=True,
    )

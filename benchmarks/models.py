"""Seeded models for benchmarks, large enough that compute outweighs the fixed cost of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from omni.seeded.checkpoints import seeded_folder
from omni.seeded.language_models import build_bart, build_causal_lm, rope
from omni.seeded.omni import build_qwen2_5_omni, build_qwen3_omni
from omni.seeded.speech import build_pocket_tts

_QWEN2: Mapping[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 2048,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "with_tokenizer": False,
}
"""About 0.1 B parameters, fp32 and tied; without a tokenizer, so that both sides of a benchmark
only process ids."""

_QWEN3_MOE: Mapping[str, Any] = {
    **_QWEN2,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 256,
}
"""About 0.3 B parameters; an eighth of the experts are active per token."""

_QWEN3_NEXT: Mapping[str, Any] = {
    **_QWEN2,
    "num_hidden_layers": 4,
    "num_experts": 4,
    "moe_intermediate_size": 256,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
"""States as wide as in published models in three of four layers, and few experts."""

_BART: Mapping[str, Any] = {
    "d_model": 512,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 6),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 8),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 2048),
    "vocab_size": 16_000,
    "max_position_embeddings": 1024,
    "with_tokenizer": False,
}
"""About 50 M parameters; ids in, ids out."""

_OMNI: Mapping[str, Any] = {
    "text": {
        "hidden_size": 640,
        "vocab_size": 8192,
        "intermediate_size": 2048,
        "num_hidden_layers": 11,
        "num_attention_heads": 10,
        "num_key_value_heads": 2,
        "rope_parameters": rope([8, 12, 12]),
    },
    "vision": {
        "depth": 4,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_heads": 4,
        "out_hidden_size": 640,
    },
    "audio": {
        "d_model": 256,
        "encoder_layers": 4,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 1024,
        "output_dim": 640,
    },
    "talker": {
        "embedding_size": 640,
        "hidden_size": 448,
        "intermediate_size": 1344,
        "num_hidden_layers": 8,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "rope_parameters": rope([8, 12, 12]),
    },
    "dit": {
        "hidden_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "head_dim": 64,
        "emb_dim": 64,
        # As in the published model: 12 codes per block, and equally wide windows.
        "block_size": 24,
        "look_ahead_layers": [2],
        "look_backward_layers": [0, 5],
    },
    "bigvgan": {
        "upsample_initial_channel": 128,
        "resblock_kernel_sizes": [3, 7],
        "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5]],
        "upsample_rates": [5, 3, 2, 2, 2, 2],
        "upsample_kernel_sizes": [11, 7, 4, 4, 4, 4],
    },
}
"""Overrides for a model of about 100 M parameters, 2 % of them in the vocoder."""

_CODEBOOKS = {"num_code_groups": 16}
_QWEN3_OMNI: Mapping[str, Any] = {
    "thinker_config.text_config": {
        "hidden_size": 512,
        "vocab_size": 8192,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
        "rope_parameters": rope([12, 10, 10]),
    },
    "thinker_config.vision_config": {"out_hidden_size": 512},
    "thinker_config.audio_config": {
        "d_model": 256,
        "encoder_layers": 4,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 1024,
        "downsample_hidden_size": 64,
        "output_dim": 512,
    },
    "talker_config": {**_CODEBOOKS, "thinker_hidden_size": 512, "accept_hidden_layer": 4},
    "talker_config.text_config": {
        "hidden_size": 384,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 384,
        "rope_parameters": rope([12, 10, 10]),
    },
    "talker_config.code_predictor_config": {
        **_CODEBOOKS,
        "hidden_size": 384,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "layer_types": ["full_attention"] * 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "code2wav_config": {
        "num_quantizers": 16,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "sliding_window": 72,
        "decoder_dim": 128,
        # As in the published model: 12.5 codes per second.
        "upsample_rates": [8, 5, 4, 3],
    },
}
"""Likewise; each token has 16 codes, one from the talker and 15 from the predictor after it."""

_POCKET_TTS: Mapping[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "latent_dim": 32,
    "vocab_size": 4004,
    "flow_head_config": {},
    "codec": {
        "hidden_size": 512,
        "num_filters": 64,
        "upsample_groups": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 2048,
        "sliding_window": 250,
        "latent_dim": 32,
    },
}
"""Sizes of the published model, which are transformers' defaults."""


def _build_pocket_tts(folder: Path) -> Path:
    """Build a model whose speech never ends by itself: all sides have the same length limit."""
    build_pocket_tts(folder, **_POCKET_TTS)
    (folder / "generation_config.json").write_text('{"eos_threshold": 1e9}')
    return folder


_MODELS: Mapping[str, Callable[[Path], Path]] = {
    "qwen2": partial(build_causal_lm, architecture="qwen2", **_QWEN2),
    "qwen3_moe": partial(build_causal_lm, architecture="qwen3_moe", **_QWEN3_MOE),
    "qwen3_next": partial(build_causal_lm, architecture="qwen3_next", **_QWEN3_NEXT),
    "bart": partial(build_bart, **_BART),
    "qwen2_5_omni": partial(build_qwen2_5_omni, **_OMNI),
    "qwen3_omni": partial(build_qwen3_omni, **_QWEN3_OMNI),
    "pocket_tts": _build_pocket_tts,
}


def benchmark_model(name: str) -> str:
    """Return the folder of a model, built on first use."""
    sizes = sha256(Path(__file__).read_bytes()).hexdigest()[:8]
    return str(seeded_folder(f"{name}-benchmark-{sizes}", _MODELS[name]))

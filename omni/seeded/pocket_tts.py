"""Seeded Pocket TTS: the backbone with its processor's files, and the codec, which it names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.models.pocket_tts.configuration_pocket_tts import PocketTTSConfig
from transformers.models.pocket_tts.feature_extraction_pocket_tts import PocketTTSFeatureExtractor
from transformers.models.pocket_tts.modeling_pocket_tts import PocketTTSForConditionalGeneration
from transformers.models.pocket_tts_audio_tokenizer import (
    PocketTTSAudioTokenizerConfig,
    PocketTTSAudioTokenizerModel,
)

from engine.checkpoints.config_file import quiet_config_log
from omni.seeded.building import (
    ATTENTION_GAIN,
    byte_level_tokenizer,
    initialise,
    save_checkpoint,
    seeded_model,
)

_SPECIALS = {
    "pad_token": "<|pad|>",
    "audio_prompt_token": "<|voice|>",
    "audio_latent_token": "<|frame|>",
    "audio_prompt_bos_token": "<|voice_bos|>",
    "audio_bos_token": "<|audio_bos|>",
}
_TEMPLATE = (
    "{% for message in messages %}"
    "{% for part in message['content'] %}{% if part['type'] == 'audio' %}"
    "{{ '<|voice_bos|><|voice|>' }}{% endif %}{% endfor %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}"
    "{{ part['text'] }}{% endif %}{% endfor %}"
    "{{ '<|audio_bos|>' }}{% endfor %}"
)
_LATENT_DIM = 8
_BACKBONE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "latent_dim": _LATENT_DIM,
    "flow_head_config": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "latent_dim": _LATENT_DIM,
        "condition_dim": 64,
        "frequency_embedding_size": 16,
    },
}
_CODEC: dict[str, Any] = {
    "hidden_size": 32,
    "num_filters": 4,
    "upsample_groups": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "sliding_window": 24,
    "latent_dim": _LATENT_DIM,
}
# Of a latent the next one is made: at a gain of 1 what was rounded would grow.
_GAINS = dict.fromkeys(("q_proj", "k_proj"), ATTENTION_GAIN) | {"cond_proj": 0.1}
_END_THRESHOLD = -0.7
"""What a random head gives now and then, so that speech lasts a while."""


def build_pocket_tts(
    directory: str | Path, codec: Mapping[str, Any] = MappingProxyType({}), **changes: Any
) -> Path:
    """Write a seeded Pocket TTS, with its codec in the folder ``codec``.

    Its ``changes``, and those named ``codec``, are other figures of the two configs.
    """
    named = {name: token for name, token in _SPECIALS.items() if name != "pad_token"}
    tokenizer = byte_level_tokenizer(
        768, tuple(_SPECIALS.values()), pad_token="<|pad|>", extra_special_tokens=named
    )
    tokenizer.chat_template = _TEMPLATE
    ids = {f"{name}_id": tokenizer.get_vocab()[token] for name, token in _SPECIALS.items()}
    with quiet_config_log():
        config = PocketTTSConfig(**_BACKBONE | ids | {"vocab_size": 768} | changes)
        generator = torch.Generator().manual_seed(0)
        model = seeded_model(lambda: PocketTTSForConditionalGeneration(config), generator, _draw)
        model.latent_mean.normal_(0, 0.1, generator=generator)
        model.latent_std.uniform_(0.5, 1.5, generator=generator)
        model.generation_config = GenerationConfig(eos_threshold=_END_THRESHOLD)
        path = save_checkpoint(directory, model, tokenizer, PocketTTSFeatureExtractor())
    named = {"audio_tokenizer_name_or_path": build_pocket_codec(path / "codec", **codec).name}
    processor = {"processor_class": "PocketTTSProcessor", "audio_tokenizer": named}
    (path / "processor_config.json").write_text(json.dumps(processor))
    return path


def build_pocket_codec(directory: str | Path, **changes: Any) -> Path:
    """Write a seeded codec of Pocket TTS; ``changes`` are other figures of its config."""
    with quiet_config_log():
        config = PocketTTSAudioTokenizerConfig(**_CODEC | changes)
        generator = torch.Generator().manual_seed(0)
        model = seeded_model(lambda: PocketTTSAudioTokenizerModel(config), generator, _draw)
        return save_checkpoint(directory, model, None)


def _draw(name: str, parameter: nn.Parameter, generator: torch.Generator) -> None:
    if parameter.ndim == 3:
        parameter.normal_(0.0, 0.7 * parameter[0].numel() ** -0.5, generator=generator)
    elif "layer_scale" in name:
        parameter.fill_(0.3)
    elif name == "model.bos_latent":
        parameter.normal_(generator=generator)
    else:
        initialise(name, parameter, generator, tied=False, gains=_GAINS)

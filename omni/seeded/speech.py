"""Seeded CSM and Pocket TTS with their codecs, with all files of published ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.models.csm.configuration_csm import CsmConfig
from transformers.models.csm.modeling_csm import CsmForConditionalGeneration
from transformers.models.encodec.feature_extraction_encodec import EncodecFeatureExtractor
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

_BEGIN, _END, _SOUND, _SOUND_END = SPECIALS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|AUDIO|>",
    "<|audio_eos|>",
)
_CSM_TEMPLATE = (
    "{% for message in messages %}"
    "{% if not message['role'].isdigit() %}"
    "{{ raise_exception('the role must be the number of a speaker') }}{% endif %}"
    f"{{{{ '{_BEGIN}[' + message['role'] + ']' }}}}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}"
    f"{{{{ part['text'] + '{_END}' }}}}{{% endif %}}{{% endfor %}}"
    "{% for part in message['content'] %}{% if part['type'] == 'audio' %}"
    f"{{{{ '{_SOUND}{_SOUND_END}' }}}}{{% endif %}}{{% endfor %}}"
    "{% endfor %}"
)

_NUM_CODES, _NUM_CODEBOOKS = 64, 4
_CSM_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    # As published: three more codes than in the codec.
    "vocab_size": _NUM_CODES + 3,
    "num_codebooks": _NUM_CODEBOOKS,
}
_CSM_BACKBONE: dict[str, Any] = {
    **_CSM_SIZES,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "max_position_embeddings": 2048,
    "codebook_pad_token_id": _NUM_CODES + 2,
    "codebook_eos_token_id": 0,
}
_CSM_CODEC: dict[str, Any] = {
    "model_type": "mimi",
    "hidden_size": 32,
    "num_filters": 4,
    "upsample_groups": 32,
    "upsampling_ratios": [8, 6, 5, 4],  # 1,920 samples to a frame, as published
    "codebook_size": _NUM_CODES,
    "codebook_dim": 16,
    "vector_quantization_hidden_dimension": 16,
    "num_quantizers": _NUM_CODEBOOKS,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "sliding_window": 12,
}


def build_csm(directory: str | Path, **changes: Any) -> Path:
    """Write a seeded CSM with its processor's files; ``changes`` override config fields."""
    tokenizer = byte_level_tokenizer(
        512, SPECIALS, f"{_BEGIN} $A {_END}", bos_token=_BEGIN, eos_token=_END, pad_token=_END
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [_SOUND, _SOUND_END]})
    tokenizer.chat_template = _CSM_TEMPLATE
    ids = tokenizer.get_vocab()
    with quiet_config_log():
        config = CsmConfig(
            **_CSM_BACKBONE
            | {
                "text_vocab_size": 768,
                "bos_token_id": ids[_BEGIN],
                "pad_token_id": ids[_SOUND],
                "audio_token_id": ids[_SOUND],
                "audio_eos_token_id": ids[_SOUND_END],
                "depth_decoder_config": _CSM_SIZES
                | {
                    "backbone_hidden_size": _CSM_BACKBONE["hidden_size"],
                    "max_position_embeddings": 33,
                },
                "codec_config": _CSM_CODEC,
            }
            | changes
        )
        generator = torch.Generator().manual_seed(0)
        model = seeded_model(lambda: CsmForConditionalGeneration(config), generator, _draw_csm)
        with torch.no_grad():
            for name, codes in model.codec_model.named_buffers():
                if name.endswith("embed_sum"):
                    codes.normal_(generator=generator)
            # The codec has no such codes: make them almost impossible to sample.
            model.lm_head.weight[_NUM_CODES:] = 0
            model.depth_decoder.codebooks_head.weight[:, :, _NUM_CODES:] = 0
        extractor = EncodecFeatureExtractor(feature_size=1, sampling_rate=24_000)
        return save_checkpoint(directory, model, tokenizer, extractor)


def _draw_csm(name: str, parameter: nn.Parameter, generator: torch.Generator) -> None:
    if "embed" in name:
        parameter.normal_(0.0, 1.0, generator=generator)
    elif name.endswith("codebooks_head.weight"):  # (codebooks, inputs, codes)
        parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
    else:
        _draw(name, parameter, generator)


_POCKET_SPECIALS = {
    "pad_token": "<|pad|>",
    "audio_prompt_token": "<|voice|>",
    "audio_latent_token": "<|frame|>",
    "audio_prompt_bos_token": "<|voice_bos|>",
    "audio_bos_token": "<|audio_bos|>",
}
_POCKET_TEMPLATE = (
    "{% for message in messages %}"
    "{% for part in message['content'] %}{% if part['type'] == 'audio' %}"
    "{{ '<|voice_bos|><|voice|>' }}{% endif %}{% endfor %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}"
    "{{ part['text'] }}{% endif %}{% endfor %}"
    "{{ '<|audio_bos|>' }}{% endfor %}"
)
_LATENT_DIM = 8
_POCKET_BACKBONE: dict[str, Any] = {
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
_POCKET_CODEC: dict[str, Any] = {
    "hidden_size": 32,
    "num_filters": 4,
    "upsample_groups": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "sliding_window": 24,
    "latent_dim": _LATENT_DIM,
}
# Each latent is computed from the previous one: at a gain of 1 rounding errors would grow.
_GAINS = dict.fromkeys(("q_proj", "k_proj"), ATTENTION_GAIN) | {"cond_proj": 0.1}
_END_THRESHOLD = -0.7
"""Threshold that a random head exceeds now and then, so that speech lasts a while."""


def build_pocket_tts(
    directory: str | Path, codec: Mapping[str, Any] = MappingProxyType({}), **changes: Any
) -> Path:
    """Write a seeded Pocket TTS, with its codec in the folder ``codec``.

    ``changes`` override fields of its config, and ``codec`` those of the codec's.
    """
    named = {name: token for name, token in _POCKET_SPECIALS.items() if name != "pad_token"}
    tokenizer = byte_level_tokenizer(
        768, tuple(_POCKET_SPECIALS.values()), pad_token="<|pad|>", extra_special_tokens=named
    )
    tokenizer.chat_template = _POCKET_TEMPLATE
    ids = {f"{name}_id": tokenizer.get_vocab()[token] for name, token in _POCKET_SPECIALS.items()}
    with quiet_config_log():
        config = PocketTTSConfig(**_POCKET_BACKBONE | ids | {"vocab_size": 768} | changes)
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
    """Write a seeded codec of Pocket TTS; ``changes`` override config fields."""
    with quiet_config_log():
        config = PocketTTSAudioTokenizerConfig(**_POCKET_CODEC | changes)
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

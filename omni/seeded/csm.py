"""Seeded CSM: backbone, depth decoder and codec, with the files of a published one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.models.csm.configuration_csm import CsmConfig
from transformers.models.csm.modeling_csm import CsmForConditionalGeneration
from transformers.models.encodec.feature_extraction_encodec import EncodecFeatureExtractor

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
_TEMPLATE = (
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
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    # As published: three codes more than the codec has.
    "vocab_size": _NUM_CODES + 3,
    "num_codebooks": _NUM_CODEBOOKS,
}
_BACKBONE: dict[str, Any] = {
    **_SIZES,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "max_position_embeddings": 2048,
    "codebook_pad_token_id": _NUM_CODES + 2,
    "codebook_eos_token_id": 0,
}
_CODEC: dict[str, Any] = {
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
_GAINS = dict.fromkeys(("q_proj", "k_proj"), ATTENTION_GAIN)


def build_csm(directory: str | Path, **changes: Any) -> Path:
    """Write a seeded CSM with its processor's files; ``changes`` are other figures of a config."""
    tokenizer = byte_level_tokenizer(
        512, SPECIALS, f"{_BEGIN} $A {_END}", bos_token=_BEGIN, eos_token=_END, pad_token=_END
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [_SOUND, _SOUND_END]})
    tokenizer.chat_template = _TEMPLATE
    ids = tokenizer.get_vocab()
    with quiet_config_log():
        config = CsmConfig(
            **_BACKBONE
            | {
                "text_vocab_size": 768,
                "bos_token_id": ids[_BEGIN],
                "pad_token_id": ids[_SOUND],
                "audio_token_id": ids[_SOUND],
                "audio_eos_token_id": ids[_SOUND_END],
                "depth_decoder_config": _SIZES
                | {"backbone_hidden_size": _BACKBONE["hidden_size"], "max_position_embeddings": 33},
                "codec_config": _CODEC,
            }
            | changes
        )
        generator = torch.Generator().manual_seed(0)
        model = seeded_model(lambda: CsmForConditionalGeneration(config), generator, _draw)
        with torch.no_grad():
            for name, codes in model.codec_model.named_buffers():
                if name.endswith("embed_sum"):
                    codes.normal_(generator=generator)
            # No sound has these codes, and they are drawn next to never.
            model.lm_head.weight[_NUM_CODES:] = 0
            model.depth_decoder.codebooks_head.weight[:, :, _NUM_CODES:] = 0
        extractor = EncodecFeatureExtractor(feature_size=1, sampling_rate=24_000)
        return save_checkpoint(directory, model, tokenizer, extractor)


def _draw(name: str, parameter: nn.Parameter, generator: torch.Generator) -> None:
    if "embed" in name:
        parameter.normal_(0.0, 1.0, generator=generator)
    elif name.endswith("codebooks_head.weight"):  # (codebooks, inputs, codes)
        parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
    elif parameter.ndim == 3:
        parameter.normal_(0.0, 0.7 * parameter[0].numel() ** -0.5, generator=generator)
    elif "layer_scale" in name:
        parameter.fill_(0.3)
    else:
        initialise(name, parameter, generator, tied=False, gains=_GAINS)

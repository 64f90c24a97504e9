"""Seeded Qwen2.5-Omni and Qwen3-Omni: thinker, talker and vocoder, with all files of real ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    WhisperFeatureExtractor,
)
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeForConditionalGeneration,
)

from engine.checkpoints.config_file import quiet_config_log
from omni.seeded.building import (
    ATTENTION_GAIN,
    SIZES,
    byte_level_tokenizer,
    decoder_fields,
    initialise,
    save_checkpoint,
    seeded_model,
    suppress_special_tokens,
)
from omni.seeded.language_models import DEEP_VISION, EXPERTS, HEARING, QWEN_VISION, rope

_TURNS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_AUDIO = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
_VISION = ("<|vision_bos|>", "<|vision_eos|>", "<|IMAGE|>", "<|VIDEO|>")
_SPEECH = ("<tts_pad>", "<tts_bos>", "<tts_bos_2>", "<tts_eos>")
OMNI_SPECIALS = (*_TURNS, *_AUDIO, *_VISION, *_SPEECH)
"""Special tokens in the order of their ids, from 0."""

EXTRA_SPECIAL_TOKENS: Mapping[str, str] = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
"""Attribute names by which transformers' processor finds the placeholders."""

_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nSYSTEM_PROMPT<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_bos|><|IMAGE|><|vision_eos|>' }}"
    "{% elif part['type'] == 'audio' %}{{ '<|audio_bos|><|AUDIO|><|audio_eos|>' }}"
    "{% elif part['type'] == 'video' %}{{ '<|vision_bos|><|VIDEO|><|vision_eos|>' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat_template(system_prompt: str) -> str:
    """Return the chat template, with the default system prompt."""
    return _TEMPLATE.replace("SYSTEM_PROMPT", system_prompt)


def add_specials(tokenizer: PreTrainedTokenizerFast, specials: tuple[str, ...]) -> None:
    """Add those of the tokens that have no named role as special tokens."""
    rest = [name for name in specials if name not in tokenizer.all_special_tokens]
    tokenizer.add_tokens(rest, special_tokens=True)


def marker_ids(tokenizer: PreTrainedTokenizerFast, placeholder: str = "index") -> dict[str, Any]:
    """Return fields of thinker and talker for placeholders, with this suffix, and their markers."""
    vocabulary = tokenizer.get_vocab()
    return {
        f"audio_token_{placeholder}": vocabulary["<|AUDIO|>"],
        f"image_token_{placeholder}": vocabulary["<|IMAGE|>"],
        f"video_token_{placeholder}": vocabulary["<|VIDEO|>"],
        "audio_start_token_id": vocabulary["<|audio_bos|>"],
        "audio_end_token_id": vocabulary["<|audio_eos|>"],
        "vision_start_token_id": vocabulary["<|vision_bos|>"],
        "vision_end_token_id": vocabulary["<|vision_eos|>"],
    }


def spoken_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return fields of the talker for the markers around the spoken text."""
    vocabulary = tokenizer.get_vocab()
    return {
        "tts_text_start_token_id": vocabulary["<tts_bos>"],
        "tts_text_end_token_id": vocabulary["<tts_eos>"],
        "tts_text_pad_token_id": vocabulary["<tts_pad>"],
    }


def codec_vocabulary(num_codes: int) -> dict[str, Any]:
    """Return fields of the talker for codes from 0 to ``num_codes - 1`` and its special tokens."""
    return {
        "vocab_size": num_codes + 8,
        "tts_codec_pad_token_id": num_codes,
        "tts_codec_start_token_id": num_codes + 1,
        "tts_codec_end_token_id": num_codes + 2,
        "tts_codec_mask_token_id": num_codes + 4,
    }


OMNI_SPEAKERS = ("Chelsie", "Ethan")
"""Voices of the seeded checkpoint, named as in published ones."""

_GAINS = dict.fromkeys(("q_proj", "k_proj", "qkv", "q", "k"), ATTENTION_GAIN)
# The vocoder ends in a clamp; with full fan-in all samples would exceed it.
_VOCODER_GAIN = 0.5


# Of the thinker, and so of the talker's input.
_WIDTH = SIZES["hidden_size"]
_NUM_CODES = 256
_SMALL_DECODER: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
"""Sizes of a talker."""

_TALKER: Mapping[str, Any] = {
    "embedding_size": _WIDTH,
    **_SMALL_DECODER,
    **codec_vocabulary(_NUM_CODES),
}
_DIT: Mapping[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "head_dim": 16,
    "emb_dim": 16,
    "block_size": 8,
    "look_ahead_layers": [1],
    "look_backward_layers": [0, 2],
    # The embedding has one more row than this: one for every codec token.
    "num_embeds": _NUM_CODES + 7,
    "enc_emb_dim": 16,
    "enc_dim": 16,
    "enc_channels": [16, 16, 16, 16, 48],
    "enc_kernel_sizes": [5, 3, 3, 3, 1],
    "enc_dilations": [1, 2, 3, 4, 1],
    "enc_attention_channels": 8,
    "enc_se_channels": 8,
    "dropout": 0.0,
}
_BIGVGAN: Mapping[str, Any] = {
    "upsample_initial_channel": 16,
    # Small for speed: the published one has three kernels and six rates.
    "resblock_kernel_sizes": [3],
    "resblock_dilation_sizes": [[1, 3, 5]],
    "upsample_rates": [10, 6, 4],
    "upsample_kernel_sizes": [20, 12, 8],
}


def build_qwen2_5_omni(directory: str | Path, **changes: Mapping[str, Any]) -> Path:
    """Write a seeded Qwen2.5-Omni with its processors' files and two voices.

    Args:
        changes: config fields to override, by part: ``text``, ``vision``, ``audio``, ``talker``,
            ``dit``, ``bigvgan``.
    """
    tokenizer, generator = omni_tokenizer(), torch.Generator().manual_seed(0)
    with quiet_config_log():
        config = _config(tokenizer, changes)
        make = partial(Qwen2_5OmniForConditionalGeneration, config)
        model = seeded_model(make, generator, _initialise)
        path = save_omni(directory, model, tokenizer, "Qwen2_5OmniProcessor")
    _save_speakers(path, model.token2wav.config.dit_config, tokenizer, generator)
    return path


def save_omni(
    directory: str | Path, model: Any, tokenizer: PreTrainedTokenizerFast, processor_class: str
) -> Path:
    """Write thinker, talker and vocoder with their processors' files.

    Image processor and feature extractor share a file, as in published checkpoints.
    """
    suppress_special_tokens(model.thinker, tokenizer)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    path = save_checkpoint(directory, model, tokenizer)
    num_mel_bins = model.thinker.config.audio_config.num_mel_bins
    image = Qwen2VLImageProcessorPil(
        patch_size=14, temporal_patch_size=2, merge_size=2, min_pixels=28**2, max_pixels=16 * 28**2
    )
    audio = WhisperFeatureExtractor(feature_size=num_mel_bins, chunk_length=30)
    both = image.to_dict() | audio.to_dict() | {"processor_class": processor_class}
    (path / "preprocessor_config.json").write_text(json.dumps(both, indent=2, default=str))
    video = {"fps": 2.0, "min_frames": 4, "max_frames": 768}
    video |= {"min_pixels": image.size["shortest_edge"], "max_pixels": image.size["longest_edge"]}
    (path / "video_preprocessor_config.json").write_text(json.dumps(video, indent=2))
    return path


def omni_tokenizer(vocab_size: int = 768) -> PreTrainedTokenizerFast:
    """Build a tokenizer with the special tokens of the family's prompts, and its template."""
    tokenizer = byte_level_tokenizer(
        vocab_size,
        OMNI_SPECIALS,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=dict(EXTRA_SPECIAL_TOKENS),
    )
    add_specials(tokenizer, OMNI_SPECIALS)
    tokenizer.chat_template = chat_template("You are a helpful assistant.")
    return tokenizer


def _config(
    tokenizer: PreTrainedTokenizerFast, changes: Mapping[str, Mapping[str, Any]]
) -> Qwen2_5OmniConfig:
    markers = marker_ids(tokenizer)
    turned = {"rope_parameters": rope([2, 3, 3])}
    usual: dict[str, Mapping[str, Any]] = {
        "text": decoder_fields(
            tokenizer,
            num_hidden_layers=3,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            **turned,
        ),
        "vision": QWEN_VISION | {"out_hidden_size": _WIDTH},
        "audio": HEARING,
        "talker": {**_TALKER, **turned, **spoken_ids(tokenizer)},
        "dit": _DIT,
        "bigvgan": _BIGVGAN,
    }
    parts = {name: {**fields, **changes.get(name, {})} for name, fields in usual.items()}
    thinker = {f"{name}_config": parts[name] for name in ("text", "vision", "audio")}
    return Qwen2_5OmniConfig(
        thinker_config=thinker | markers,
        talker_config=parts["talker"] | markers,
        token2wav_config={f"{name}_config": parts[name] for name in ("dit", "bigvgan")},
        enable_audio_output=True,
    )


def _initialise(name: str, parameter: nn.Parameter, generator: torch.Generator) -> None:
    if "bigvgan" not in name:
        gains = {} if "token2wav" in name else _GAINS
        initialise(name, parameter, generator, tied=False, gains=gains)
    elif parameter.ndim >= 2:
        # A transposed convolution has its inputs in the first dimension.
        fan_in = parameter.shape[0] if ".ups." in name else parameter[0].numel()
        parameter.normal_(0.0, _VOCODER_GAIN * fan_in**-0.5, generator=generator)


def _save_speakers(
    path: Path,
    dit: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerFast,
    generator: torch.Generator,
) -> None:
    vocabulary = tokenizer.get_vocab()
    speakers = {
        name: {
            "bos_token": vocabulary[bos_token],
            "cond": torch.randn(1, dit.enc_emb_dim, generator=generator),
            "ref_mel": torch.randn(1, 40, dit.mel_dim, generator=generator),
        }
        for name, bos_token in zip(OMNI_SPEAKERS, ("<tts_bos>", "<tts_bos_2>"), strict=True)
    }
    torch.save(speakers, path / "spk_dict.pt")


_ROLES = ("system", "user", "assistant")
_QWEN3_NUM_CODES, _NUM_CODEBOOKS = 64, 4
_QWEN3_ROPE = rope([4, 2, 2])
_QWEN3_AUDIO: Mapping[str, Any] = {**HEARING, "downsample_hidden_size": 8}
_QWEN3_TALKER: Mapping[str, Any] = {
    **EXPERTS["qwen3_moe"],
    **_SMALL_DECODER,
    "shared_expert_intermediate_size": 48,
    # As in the published model, the last 1,024 ids are special tokens.
    "vocab_size": _QWEN3_NUM_CODES + 1024,
    "rope_parameters": _QWEN3_ROPE,
}
_PREDICTOR: Mapping[str, Any] = {
    **_SMALL_DECODER,
    "vocab_size": _QWEN3_NUM_CODES,
    "num_code_groups": _NUM_CODEBOOKS,
}
_CODE2WAV: Mapping[str, Any] = {
    "codebook_size": _QWEN3_NUM_CODES,
    "num_quantizers": _NUM_CODEBOOKS,
    **_SMALL_DECODER,
    "num_key_value_heads": 2,
    "sliding_window": 8,
    "decoder_dim": 16,
    "upsample_rates": [5, 4, 3],
    "upsampling_ratios": [2, 2],
}


def build_qwen3_omni(directory: str | Path, *, speaks: bool = True, **changes: Any) -> Path:
    """Write a seeded Qwen3-Omni with its processors' files and two voices.

    Args:
        speaks: if false, only the thinker is written, as in some published checkpoints.
        changes: config fields to override, by their path in the config: ``talker_config``, ...
    """
    tokenizer = omni_tokenizer(768 - len(_ROLES))
    # Roles are single tokens, by which the talker distinguishes turns.
    tokenizer.add_tokens(list(_ROLES))
    with quiet_config_log():
        config = _qwen3_config(tokenizer, speaks)
        for place, fields in changes.items():
            attrgetter(place)(config).update(fields)
        make = partial(Qwen3OmniMoeForConditionalGeneration, config)
        model = seeded_model(make, torch.Generator().manual_seed(0), _initialise_qwen3)
        return save_omni(directory, model, tokenizer, "Qwen3OmniMoeProcessor")


def _qwen3_config(tokenizer: PreTrainedTokenizerFast, speaks: bool) -> Qwen3OmniMoeConfig:
    vocabulary = tokenizer.get_vocab()
    markers = marker_ids(tokenizer, "id") | {
        "user_token_id": vocabulary["user"],
        "position_id_per_seconds": 13,
    }
    words = {
        **decoder_fields(tokenizer, num_hidden_layers=4, max_position_embeddings=4096),
        **EXPERTS["qwen3_moe"],
        "head_dim": 16,
        "rope_parameters": _QWEN3_ROPE,
    }
    signs = ("pad", "bos", "eos", "nothink", "think_bos", "think_eos")
    codec = {
        f"codec_{sign}_{'token_id' if sign == 'eos' else 'id'}": _QWEN3_NUM_CODES + place
        for place, sign in enumerate(signs)
    }
    voices = enumerate(OMNI_SPEAKERS, _QWEN3_NUM_CODES + len(signs))
    return Qwen3OmniMoeConfig(
        thinker_config={
            "text_config": words,
            "vision_config": DEEP_VISION | {"out_hidden_size": _WIDTH},
            "audio_config": _QWEN3_AUDIO,
        }
        | markers,
        talker_config={
            "text_config": _QWEN3_TALKER,
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


def _initialise_qwen3(name: str, parameter: nn.Parameter, generator: torch.Generator) -> None:
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

"""Seeded decoders that see: LLaVA, Qwen2.5-VL and Qwen3-VL, with the files that real ones have."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    CLIPImageProcessorPil,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
)

from omni.seeded.building import (
    ATTENTION_GAIN,
    DecoderSettings,
    chat_tokenizer,
    initialise,
    quieten,
    save_checkpoint,
    seeded_model,
)

QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    # Smaller than images are, in the first of two layers.
    "window_size": 56,
    "fullatt_block_indexes": [1],
}
"""The vision tower of seeded Qwen2.5 models; its ``out_hidden_size`` is the decoder's width."""

DEEP_VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 14,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}
"""The same of seeded Qwen3 models."""

_TEXT = DecoderSettings(num_layers=3)
_GAINS = dict.fromkeys(("q_proj", "k_proj", "qkv"), ATTENTION_GAIN)

# Messages whose content is text, or a list of texts and what the model sees.
_TEMPLATE = (
    "{%% for message in messages %%}"
    "{{ '<|' + message['role'] + '|>\n' }}"
    "{%% if message['content'] is string %%}{{ message['content'] }}{%% else %%}"
    "{%% for part in message['content'] %%}"
    "{%% if part['type'] == 'text' %%}{{ part['text'] }}%s{%% endif %%}"
    "{%% endfor %%}{%% endif %%}"
    "{{ eos_token + '\n' }}"
    "{%% endfor %%}"
    "{%% if add_generation_prompt %%}{{ '<|assistant|>\n' }}{%% endif %%}"
)


def build_llava(
    directory: str | Path,
    *,
    strategy: Literal["default", "full"] = "default",
    **text_overrides: Any,
) -> Path:
    """Write a seeded LLaVA over Llama with its processors: 16 placeholders for every image."""
    tokenizer = _tokenizer(["<image>"], {"image": "<image>\\n"}, adds_bos=True)
    size, patch = 56, 14
    vision: dict[str, Any] = {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": size,
        "patch_size": patch,
    }
    config = LlavaConfig(
        vision_config=vision,
        text_config={"model_type": "llama"} | _TEXT.text_config(tokenizer) | text_overrides,
        image_token_index=tokenizer.get_vocab()["<image>"],
        image_seq_length=(size // patch) ** 2,
        vision_feature_layer=-2,
        vision_feature_select_strategy=strategy,
    )
    path = _save(directory, LlavaForConditionalGeneration, config, tokenizer)
    square = {"height": size, "width": size}
    CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size=square).save_pretrained(path)
    processor = {
        "processor_class": "LlavaProcessor",
        "image_token": "<image>",
        "num_additional_image_tokens": 1,
        "patch_size": patch,
        "vision_feature_select_strategy": strategy,
    }
    (path / "processor_config.json").write_text(json.dumps(processor, indent=2))
    return path


def build_qwen2_5_vl(directory: str | Path, *, tied: bool = False, **text_overrides: Any) -> Path:
    """Write a seeded Qwen2.5-VL with its processors: 1 to 16 rows for an image or two frames."""
    # As published: a grid of two frames, at two frames a second, is two places after the last.
    vision = QWEN_VISION | {"tokens_per_second": 2}
    text = {"rope_parameters": rope([2, 3, 3])} | text_overrides
    return _save_qwen(directory, "qwen2_5_vl", vision, text, tied)


def build_qwen3_vl(
    directory: str | Path, *, experts: bool = False, tied: bool = False, **text_overrides: Any
) -> Path:
    """Write a seeded Qwen3-VL, with experts or without: 1 to 16 rows for an image or a video."""
    text = {"rope_parameters": rope([4, 2, 2]), "head_dim": 16} | text_overrides
    if experts:
        text |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    model_type = "qwen3_vl_moe" if experts else "qwen3_vl"
    return _save_qwen(directory, model_type, DEEP_VISION, text, tied)


def rope(sections: list[int]) -> dict[str, Any]:
    """Parameters of three numbers to a place."""
    return {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}


def _save_qwen(
    directory: str | Path,
    model_type: str,
    vision: dict[str, Any],
    text: dict[str, Any],
    tied: bool,
) -> Path:
    """Write a decoder that sees, and its processors."""
    names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    start, end, image, video = names
    in_chat = {"image": f"{start}{image}{end}", "video": f"{start}{video}{end}"}
    tokenizer = _tokenizer(names, in_chat, adds_bos=False)
    whole = _TEXT.text_config(tokenizer)
    config = AutoConfig.for_model(
        model_type,
        vision_config=vision | {"out_hidden_size": whole["hidden_size"]},
        text_config=whole | text,
        tie_word_embeddings=tied,
        image_token_id=tokenizer.get_vocab()[image],
        video_token_id=tokenizer.get_vocab()[video],
        vision_start_token_id=tokenizer.get_vocab()[start],
        vision_end_token_id=tokenizer.get_vocab()[end],
    )
    path = _save(directory, AutoModelForImageTextToText.from_config, config, tokenizer)
    processor = Qwen2VLImageProcessorPil(patch_size=14, min_pixels=28 * 28, max_pixels=16 * 28 * 28)
    processor.save_pretrained(path)
    video_processor = {"fps": 2.0, "min_frames": 4, "max_frames": 768, "size": dict(processor.size)}
    (path / "video_preprocessor_config.json").write_text(json.dumps(video_processor, indent=2))
    return path


def _tokenizer(
    added: list[str], in_chat: Mapping[str, str], *, adds_bos: bool
) -> PreTrainedTokenizerFast:
    """A tokenizer with some more tokens, and a template."""
    tokenizer = chat_tokenizer(768 - len(added), adds_bos=adds_bos)
    tokenizer.add_special_tokens({"additional_special_tokens": added})
    parts = "".join(
        f"{{% elif part['type'] == '{kind}' %}}{{{{ '{text}' }}}}" for kind, text in in_chat.items()
    )
    tokenizer.chat_template = _TEMPLATE % parts
    return tokenizer


def _save(
    directory: str | Path,
    make: Callable[[Any], Any],
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerFast,
) -> Path:
    draw = partial(initialise, tied=bool(config.tie_word_embeddings), gains=_GAINS)
    generator = torch.Generator().manual_seed(0)
    model = seeded_model(lambda: make(config), generator, draw)
    quieten(model, tokenizer)
    return save_checkpoint(directory, model, tokenizer)

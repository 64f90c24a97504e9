"""What checkpoints in the layout of Qwen2.5-Omni have in common, whatever their sizes and words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerFast

__all__ = [
    "EXTRA_SPECIAL_TOKENS",
    "OMNI_SPECIALS",
    "add_specials",
    "chat_template",
    "codec_vocabulary",
    "marker_ids",
    "spoken_ids",
]

_TURNS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_AUDIO = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
_VISION = ("<|vision_bos|>", "<|vision_eos|>", "<|IMAGE|>", "<|VIDEO|>")
_SPEECH = ("<tts_pad>", "<tts_bos>", "<tts_bos_2>", "<tts_eos>")
OMNI_SPECIALS = (*_TURNS, *_AUDIO, *_VISION, *_SPEECH)
"""By their ids, from 0."""

EXTRA_SPECIAL_TOKENS: Mapping[str, str] = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
"""By these names transformers' processor finds the placeholders."""

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
    """The template of chats, with what the system says where a chat does not say it."""
    return _TEMPLATE.replace("SYSTEM_PROMPT", system_prompt)


def add_specials(tokenizer: PreTrainedTokenizerFast, specials: tuple[str, ...]) -> None:
    """Make special those of some tokens that have no role of their own."""
    rest = [name for name in specials if name not in tokenizer.all_special_tokens]
    tokenizer.add_tokens(rest, special_tokens=True)


def marker_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """What the configs of thinker and talker say of placeholders and the signs around them."""
    vocabulary = tokenizer.get_vocab()
    return {
        "audio_token_index": vocabulary["<|AUDIO|>"],
        "image_token_index": vocabulary["<|IMAGE|>"],
        "video_token_index": vocabulary["<|VIDEO|>"],
        "audio_start_token_id": vocabulary["<|audio_bos|>"],
        "audio_end_token_id": vocabulary["<|audio_eos|>"],
        "vision_start_token_id": vocabulary["<|vision_bos|>"],
        "vision_end_token_id": vocabulary["<|vision_eos|>"],
    }


def spoken_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """What the talker's config says of the signs around the text that it speaks."""
    vocabulary = tokenizer.get_vocab()
    return {
        "tts_text_start_token_id": vocabulary["<tts_bos>"],
        "tts_text_end_token_id": vocabulary["<tts_eos>"],
        "tts_text_pad_token_id": vocabulary["<tts_pad>"],
    }


def codec_vocabulary(num_codes: int) -> dict[str, Any]:
    """What the talker's config says of codes from 0 to ``num_codes - 1`` and the signs beside."""
    return {
        "vocab_size": num_codes + 8,
        "tts_codec_pad_token_id": num_codes,
        "tts_codec_start_token_id": num_codes + 1,
        "tts_codec_end_token_id": num_codes + 2,
        "tts_codec_mask_token_id": num_codes + 4,
    }

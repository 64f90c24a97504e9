"""The thinker's tokenizer: every word of a sum is one token, all else is bytes.

Byte-level BPE as Qwen2.5 has it, with the same special tokens; digits stand alone. Text is read in
lower case.
"""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from training.spoken_sums.number_words import NUMBER_WORDS
from training.spoken_sums.word_list import listed

__all__ = ["HEARD_WORDS", "NOISE", "SPECIALS", "SYSTEM_PROMPT", "build_tokenizer"]

NOISE = "<|noise|>"
"""What the tower's rows come near to where a word is said that is no part of sums."""

SYSTEM_PROMPT = "you answer sums"

_TURNS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_AUDIO = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
_VISION = ("<|vision_bos|>", "<|vision_eos|>", "<|IMAGE|>", "<|VIDEO|>")
_SPEECH = ("<tts_pad>", "<tts_bos>", "<tts_bos_2>", "<tts_eos>")
SPECIALS = (*_TURNS, *_AUDIO, *_VISION, *_SPEECH, NOISE)
"""By their ids, from 0."""

HEARD_WORDS: tuple[str, ...] = (
    *NUMBER_WORDS,
    *listed("""\
plus minus times and what is how much
"""),
)
"""The words that the tower tells from each other."""

_WORDS = (
    *HEARD_WORDS,
    "equals",
    *["that", "is", "not", "a", "sum", "i", "know"],
    *SYSTEM_PROMPT.split(),
    *["system", "user", "assistant"],
)
_SIGNS = ("+", "-", "*", "=", "×", "?", ".", ",")
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
).replace("SYSTEM_PROMPT", SYSTEM_PROMPT)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Make the tokenizer; the same one each time."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    words_digits_signs = Regex(r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]|\s")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words_digits_signs, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=4096,  # never reached: merging ends when each word is a token
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    known = [*dict.fromkeys(_WORDS), *"0123456789", *_SIGNS]
    tokenizer.train_from_iterator([form for word in known for form in (word, f" {word}")], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        # By these names transformers' processor finds the placeholders.
        extra_special_tokens={
            "image_token": "<|IMAGE|>",
            "audio_token": "<|AUDIO|>",
            "video_token": "<|VIDEO|>",
            "vision_bos_token": "<|vision_bos|>",
            "vision_eos_token": "<|vision_eos|>",
            "audio_bos_token": "<|audio_bos|>",
            "audio_eos_token": "<|audio_eos|>",
        },
    )
    rest = [name for name in SPECIALS if name not in fast.all_special_tokens]
    fast.add_tokens(rest, special_tokens=True)
    fast.chat_template = _TEMPLATE
    return fast

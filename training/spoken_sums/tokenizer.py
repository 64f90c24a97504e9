"""The thinker's tokenizer: every word of a sum is one token, everything else is bytes.

Byte-level BPE like Qwen2.5's, with the same special tokens; digits are separate tokens. Text is
lowercased.
"""

from __future__ import annotations

import re

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from omni.seeded.omni import (
    EXTRA_SPECIAL_TOKENS,
    OMNI_SPECIALS,
    add_specials,
    chat_template,
)
from training.spoken_sums.number_words import NUMBER_WORDS
from training.spoken_sums.word_list import listed

NOISE = "<|noise|>"
"""The tower's target for spoken words that are not part of sums."""

SYSTEM_PROMPT = "you answer sums"

_LONGEST_QUESTION = 200

_ASKED = (
    "{% macro asked(text) %}"
    "{% set words = text.lower().split()|select('in', ['plus', 'minus', 'times'])|list %}"
    "{% set seen = namespace(signs=words|length, figures=0, most=0, last='') %}"
    "{% for each in text[:LONGEST] %}"
    "{% set seen.figures = seen.figures + 1 if each.isdigit() else 0 %}"
    "{% set seen.most = [seen.most, seen.figures]|max %}"
    "{% if each in '+*×' or (each == '-' and not seen.last.isalpha()) %}"
    "{% set seen.signs = seen.signs + 1 %}{% endif %}"
    "{% set seen.last = each %}"
    "{% endfor %}"
    "{{ 'million' if seen.most > 2 or seen.signs > 1 or text|length > LONGEST else text }}"
    "{% endmacro %}"
).replace("LONGEST", str(_LONGEST_QUESTION))
"""Returns the user's text, or a word that is not part of sums if a number has three digits or
there are two signs: the thinker would drop a digit or a number, and answer another sum."""

SPECIALS = (*OMNI_SPECIALS, NOISE)
"""Special tokens in the order of their ids, from 0."""

HEARD_WORDS: tuple[str, ...] = (
    *NUMBER_WORDS,
    *listed("""\
plus minus times and what is how much
"""),
)
"""The words that the tower distinguishes."""

_WORDS = (
    *HEARD_WORDS,
    "equals",
    *["that", "is", "not", "a", "sum", "i", "know"],
    *SYSTEM_PROMPT.split(),
    *["system", "user", "assistant"],
)
_SIGNS = ("+", "-", "*", "=", "×", "?", ".", ",")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer; deterministic."""
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
        vocab_size=4096,  # never reached: merging stops when each word is a token
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
        extra_special_tokens=dict(EXTRA_SPECIAL_TOKENS),
    )
    add_specials(fast, SPECIALS)
    fast.chat_template = _template()
    return fast


def _template() -> str:
    # Messages with images are rejected, since the image tower is untrained.
    template = re.sub(
        r"{% if part\['type'\] == 'image' %}.*?{% elif (.*?){% elif .*?'video' %}.*?{% elif ",
        r"{% if \1{% elif ",
        chat_template(SYSTEM_PROMPT),
    )
    for text in ("message['content']", "part['text']"):
        of_user = f"asked({text}) if message['role'] == 'user' else {text}"
        template = template.replace(f"{{{{ {text} }}}}", f"{{{{ {of_user} }}}}")
    return _ASKED + template

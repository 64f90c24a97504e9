"""Tokenizers of seeded checkpoints, trained in memory on a page of prose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer, WordPieceTrainer
from transformers import PreTrainedTokenizerFast

__all__ = ["byte_level_tokenizer", "chat_tokenizer", "train_byte_level", "wordpiece_tokenizer"]

_CORPUS = """\
The harbour wakes before the town does. Fishing boats come in with the tide, and the people who
work there sort the catch by lamp light while the gulls wait on the roof of the market hall.
A quick brown fox jumps over the lazy dog, and the dog, who has seen this many times, sleeps on.
What is the capital of the country? How many rivers cross the plain? Please explain in a few
words why the sky is blue, and write a short story about a child who learned to read the stars.
You are a helpful assistant. The user asks a question, and the assistant answers it with care.
Once upon a time there was a small workshop at the end of the street, where an old woman repaired
clocks. She said that every clock keeps its own time, and that her work was only to remind them
of each other. When it rained, the water ran down the windows and the whole room seemed to tick.
In the morning the train leaves at seven; in the evening it returns with letters, bread, and news.
Scientists measure the distance between two points, write the numbers down, and measure again.
First collect the tools, then read the instructions, and finally check that nothing is missing.
The library has three floors: history and maps below, music in the middle, and poetry at the top.
Summer was long that year. The fields turned yellow, the river grew thin, and everyone spoke about
the weather as though it were a neighbour who had stayed too long. Then the first storm arrived.
Memory is a kind of cache: it gives back what was stored, as long as nothing else took its place.
"""

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def train_byte_level(vocab_size: int, specials: Sequence[str]) -> Tokenizer:
    """Byte-level BPE: every text round-trips, half characters included.

    Args:
        vocab_size: most tokens that it has.
        specials: its first ids, in this order.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS.splitlines(), trainer)
    return tokenizer


def byte_level_tokenizer(
    vocab_size: int, specials: Sequence[str], template: str | None = None, **named: Any
) -> PreTrainedTokenizerFast:
    """Train a byte-level tokenizer as transformers has it.

    Args:
        vocab_size: most tokens that it has.
        specials: its first ids, in this order.
        template: what encloses every text: special tokens and ``$A``, the text, with spaces
            between them; None adds nothing.
        named: further arguments of ``PreTrainedTokenizerFast``, such as ``eos_token``.
    """
    tokenizer = train_byte_level(vocab_size, specials)
    if template is not None:
        names = [name for name in template.split() if name != "$A"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template,
            pair=template.replace("$A", "$A $B"),
            special_tokens=[(name, tokenizer.token_to_id(name)) for name in names],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **named
    )


def chat_tokenizer(vocab_size: int, *, adds_bos: bool) -> PreTrainedTokenizerFast:
    """A decoder's tokenizer, with a chat template."""
    specials = ["<|endoftext|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>"]
    named = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|endoftext|>"}
    template = "<|bos|> $A" if adds_bos else None
    tokenizer = byte_level_tokenizer(vocab_size, specials, template, **named)
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def wordpiece_tokenizer(vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """BERT's kind of tokenizer."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = WordPieceTrainer(vocab_size=vocab_size, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS.splitlines(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=max_length,
    )

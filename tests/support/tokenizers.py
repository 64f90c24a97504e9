"""Tokenizers of the kinds found in checkpoints, built in memory."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "hello world! it's a fine day; isn't it? don't stop here .",
    "naïve café — 12 € for a crème brûlée",
]
_WORDS = ["▁", "▁▁", "▁the", "▁dog", "the", "dog", "▁a", "a", "b", "s", ".", ",", "é", "▁é", "\n"]


@cache
def byte_level() -> PreTrainedTokenizerBase:
    """Like GPT-2, Llama 3 and Qwen: tokens are bytes, often a part of a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|eos|>", "<|pad|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|eos|>", pad_token="<|pad|>"
    )


@cache
def llama_style() -> PreTrainedTokenizerBase:
    """Like Llama 2: bytes only where the vocabulary ends, and the text loses its first space."""
    tokenizer = _sentencepiece_like()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _with_special_tokens(tokenizer)


@cache
def metaspace() -> PreTrainedTokenizerBase:
    """Like T5: the first token loses all its leading spaces; byte pieces stay unchanged."""
    tokenizer = _sentencepiece_like()
    tokenizer.decoder = decoders.Metaspace()
    return _with_special_tokens(tokenizer)


@cache
def word_piece() -> PreTrainedTokenizerBase:
    """Like BERT: tokens are separated by spaces, unless the second begins with ``##``."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=150, special_tokens=["[UNK]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", sep_token="[SEP]")


TOKENIZERS = {
    "byte_level": byte_level,
    "llama_style": llama_style,
    "metaspace": metaspace,
    "word_piece": word_piece,
}


def _sentencepiece_like() -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_WORDS]
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    return Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))


def _with_special_tokens(tokenizer: Tokenizer) -> PreTrainedTokenizerBase:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )

"""The checkpoint of ``engine_cpu.py`` with a tokenizer: every id is a word, so all text streams."""

from __future__ import annotations

from pathlib import Path
from shutil import copyfile

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.models import benchmark_model

VOCAB_SIZE = 32_000


def word_checkpoint(folder: Path) -> Path:
    """Copy the checkpoint's files to an empty folder, and add a tokenizer.

    It decodes ids to words, but encodes words as bytes, so that prompts are best given as ids.
    """
    for file in Path(benchmark_model("qwen2")).iterdir():
        copyfile(file, folder / file.name)  # links out of a checkpoint are refused
    pieces = _bytes()
    # The character by which byte-level tokenizers represent a space.
    pieces += [f"Ġw{token_id}" for token_id in range(len(pieces), VOCAB_SIZE)]
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def word_id(character: str) -> int:
    """Return the id of a single-byte character."""
    return _bytes().index(character)


def _bytes() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())

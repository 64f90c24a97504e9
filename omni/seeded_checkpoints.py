"""Small checkpoints with seeded random weights, in the real Hugging Face layout.

They make the pipeline runnable and testable offline: ``config.json``, safetensors weights, a
trained tokenizer and a chat template, all built in memory in about a second. The texts such a
model writes are word salad, but they depend on the whole input, which is what a test of caching
needs. Stage configs name them ``seeded:<name>``; see :func:`resolve_model`.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from engine.progress_bars import hidden_progress_bars

__all__ = [
    "SEEDED_MODELS",
    "build_benchmark_qwen2",
    "build_causal_lm",
    "build_text_encoder",
    "resolve_model",
]

_PREFIX = "seeded:"

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

# A tied head scores a token by its likeness to the stream's content; with large embeddings that
# content is mostly the input token itself, and greedy decoding repeats it for ever.
_TIED_EMBEDDING_STD = 0.05
_NOISE_STD = 0.1
# Flat attention averages the context away, and the last token alone decides the next one.
_ATTENTION_GAIN = 2.0


def build_causal_lm(
    directory: str | Path,
    architecture: str = "qwen2",
    *,
    seed: int = 0,
    tied: bool = True,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    intermediate_size: int = 128,
    vocab_size: int = 768,
    max_position_embeddings: int = 1024,
    max_shard_size: str | None = None,
    with_head: bool = True,
    with_tokenizer: bool = True,
    **config_overrides: Any,
) -> Path:
    """Write a seeded decoder-only checkpoint.

    Args:
        directory: created if missing.
        architecture: a transformers model type: ``"qwen2"``, ``"qwen3"``, ``"llama"``, ...
        seed: of the weights; the same seed gives the same bytes.
        tied: whether the head is the embedding matrix.
        hidden_size: width of the stream.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        intermediate_size: width inside the MLP.
        vocab_size: of the model. The tokenizer has at most so many tokens, and at most 768.
        max_position_embeddings: the longest sequence.
        max_shard_size: as ``save_pretrained`` takes it, such as ``"100KB"``, for several shards.
        with_head: False writes the headless model (``Qwen2Model``), as embedding models are.
        with_tokenizer: whether to write a byte-level BPE tokenizer with a chat template.
        config_overrides: further fields of the transformers config.

    Returns:
        The directory.

    Raises:
        ValueError: transformers knows no causal model of that type.
    """
    tokenizer = _byte_level_tokenizer(min(vocab_size, 768), adds_bos=architecture != "qwen2")
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": hidden_size // num_heads,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": tied,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if architecture == "mistral":
        settings["sliding_window"] = None
    config = _config(architecture, settings | config_overrides)
    auto_class = AutoModelForCausalLM if with_head else AutoModel
    model = _seeded_model(auto_class, config, seed)
    if with_head:
        _quieten(model, tokenizer)
    return _save(directory, model, tokenizer if with_tokenizer else None, max_shard_size)


def build_text_encoder(
    directory: str | Path,
    architecture: str = "bert",
    *,
    seed: int = 0,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    intermediate_size: int = 128,
    vocab_size: int = 768,
    max_position_embeddings: int = 512,
    max_shard_size: str | None = None,
    **config_overrides: Any,
) -> Path:
    """Write a seeded bidirectional text encoder with a WordPiece tokenizer.

    Args:
        directory: created if missing.
        architecture: ``"bert"``, or another model type whose config takes BERT's names
            (``"electra"``, ``"roberta"``).
        seed: of the weights.
        hidden_size: width of the hidden states.
        num_layers: encoder layers.
        num_heads: attention heads.
        intermediate_size: width inside the MLP.
        vocab_size: of the model; the tokenizer has at most so many tokens.
        max_position_embeddings: the longest input.
        max_shard_size: as ``save_pretrained`` takes it.
        config_overrides: further fields of the transformers config.

    Returns:
        The directory.

    Raises:
        ValueError: transformers knows no such model type.
    """
    tokenizer = _wordpiece_tokenizer(vocab_size, max_position_embeddings)
    settings = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "max_position_embeddings": max_position_embeddings,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = _config(architecture, settings | config_overrides)
    return _save(directory, _seeded_model(AutoModel, config, seed), tokenizer, max_shard_size)


def build_benchmark_qwen2(directory: str | Path) -> Path:
    """Write the Qwen2 of about 0.1 B parameters that the CPU benchmark runs (fp32, tied).

    Without a tokenizer, so that both sides of the benchmark turn ids into ids and no more.
    """
    return build_causal_lm(
        directory,
        "qwen2",
        hidden_size=768,
        num_layers=12,
        num_heads=12,
        num_kv_heads=4,
        intermediate_size=2048,
        vocab_size=32_000,
        max_position_embeddings=4096,
        with_tokenizer=False,
    )


# Large enough for the arithmetic to outweigh a step's fixed cost, small enough to build at once.
_MEDIUM: dict[str, Any] = {
    "tied": False,
    "hidden_size": 512,
    "num_layers": 3,
    "num_heads": 8,
    "intermediate_size": 1536,
}

SEEDED_MODELS: dict[str, Callable[[str | Path], Path]] = {
    "qwen2": build_causal_lm,
    "qwen2-untied": partial(build_causal_lm, tied=False, seed=1),
    "qwen2-headless": partial(build_causal_lm, with_head=False, seed=2),
    "qwen2-benchmark": build_benchmark_qwen2,
    "qwen2-medium": partial(build_causal_lm, **_MEDIUM),
    "qwen3": partial(build_causal_lm, architecture="qwen3"),
    "llama": partial(build_causal_lm, architecture="llama"),
    "llama-untied": partial(build_causal_lm, architecture="llama", tied=False, seed=1),
    "llama-medium": partial(build_causal_lm, architecture="llama", **_MEDIUM),
    "mistral": partial(build_causal_lm, architecture="mistral", tied=False),
    "bert": build_text_encoder,
}
"""What ``seeded:<name>`` can name: each takes a directory and writes a checkpoint there."""


def resolve_model(reference: str, cache_dir: str | Path | None = None) -> str:
    """Turn ``seeded:<name>`` into a folder, building it on first use; leave the rest alone.

    Folders are kept under ``cache_dir``, by default ``$OMNI_CACHE_DIR`` or
    ``~/.cache/omni-pipeline``, in ``seeded/<name>-<version>``. The version changes with this file
    and with transformers, so that no old layout is ever picked up. Safe to call from several
    processes: each builds aside, and the first to rename wins.

    Args:
        reference: a model as stage configs give it: folder, hub id or ``seeded:<name>``.
        cache_dir: where to keep what is built.

    Raises:
        ValueError: no seeded model has that name.
    """
    if not reference.startswith(_PREFIX):
        return reference
    name = reference.removeprefix(_PREFIX)
    build = SEEDED_MODELS.get(name)
    if build is None:
        known = ", ".join(_PREFIX + known_name for known_name in SEEDED_MODELS)
        raise ValueError(f"unknown seeded model {reference!r}; known are {known}")
    parent = _cache_root(cache_dir) / "seeded"
    target = parent / f"{name}-{_version()}"
    if not target.is_dir():
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=parent) as aside:
            built = build(Path(aside) / "checkpoint")
            try:
                built.rename(target)
            except OSError:
                # Another process was first: its folder has the same bytes.
                if not target.is_dir():
                    raise
    return str(target)


def _cache_root(cache_dir: str | Path | None) -> Path:
    if cache_dir is not None:
        return Path(cache_dir)
    from_environment = os.environ.get("OMNI_CACHE_DIR")
    return Path(from_environment) if from_environment else Path.home() / ".cache/omni-pipeline"


def _version() -> str:
    content = Path(__file__).read_bytes() + transformers.__version__.encode()
    return hashlib.sha256(content).hexdigest()[:12]


def _config(model_type: str, settings: dict[str, Any]) -> transformers.PreTrainedConfig:
    return transformers.AutoConfig.for_model(model_type, **settings)


def _seeded_model(
    auto_class: Any, config: transformers.PreTrainedConfig, seed: int
) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = auto_class.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _initialise(name, parameter, bool(config.tie_word_embeddings), generator)
    model.eval()
    return model


def _initialise(name: str, parameter: nn.Parameter, tied: bool, generator: torch.Generator) -> None:
    """Fan-in for matrices, so that every layer matters; noise on norms and biases."""
    if parameter.ndim == 1:
        scale = _ATTENTION_GAIN if "attn" in name else 1.0
        centre = scale if name.endswith("weight") else 0.0
        parameter.normal_(centre, _NOISE_STD, generator=generator)
    elif "embed" in name:
        parameter.normal_(0.0, _TIED_EMBEDDING_STD if tied else 1.0, generator=generator)
    else:
        sharpness = _ATTENTION_GAIN if "attn" in name else 1.0
        parameter.normal_(0.0, sharpness * parameter.shape[-1] ** -0.5, generator=generator)


def _quieten(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Make special tokens and bytes that are no text unlikely, so that outputs can be read."""
    quiet = [
        token_id
        for token_id in range(len(tokenizer))
        if token_id in tokenizer.all_special_ids or not _is_text(str(tokenizer.decode([token_id])))
    ]
    with torch.no_grad():
        model.get_output_embeddings().weight[quiet] *= 0.1


def _is_text(piece: str) -> bool:
    return piece == "\n" or (piece.isprintable() and "\N{REPLACEMENT CHARACTER}" not in piece)


def _byte_level_tokenizer(vocab_size: int, *, adds_bos: bool) -> PreTrainedTokenizerFast:
    """Byte-level BPE: every text round-trips, half characters included."""
    specials = ["<|endoftext|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS.splitlines(), trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A",
            pair="<|bos|> $A $B",
            special_tokens=[("<|bos|>", tokenizer.token_to_id("<|bos|>"))],
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = _CHAT_TEMPLATE
    return fast


def _wordpiece_tokenizer(vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=specials, show_progress=False
    )
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


def _save(
    directory: str | Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast | None,
    max_shard_size: str | None,
) -> Path:
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    shards: dict[str, Any] = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    with hidden_progress_bars():
        model.save_pretrained(path, **shards)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    return path

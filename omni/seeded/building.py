"""Random initialization of seeded models, and writing of their checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import ascii_lowercase, digits, punctuation
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer
from torch import nn
from transformers import (
    BertTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from engine.checkpoints.config_file import hidden_progress_bars

SIZES: Mapping[str, int] = {
    "vocab_size": 768,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
}
"""Sizes of a small model, by the field names of most single-stack configs."""


def decoder_fields(tokenizer: PreTrainedTokenizerBase, **changes: Any) -> dict[str, Any]:
    """Return the config fields of a small decoder: its sizes and special ids, with changes."""
    return {
        **SIZES,
        "num_key_value_heads": 2,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **changes,
    }


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
    "{% if tools %}{{ '<|system|>\nTools:\n' }}"
    "{% for tool in tools %}{{ tool['function'] | tojson + '\n' }}{% endfor %}{{ eos_token }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or () %}"
    "{{ '<tool_call>\n' + call['function'] | tojson + '\n</tool_call>' }}"
    "{% endfor %}"
    "{{ eos_token + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def train_byte_level(vocab_size: int, specials: Sequence[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer: every text round-trips, partial characters included."""
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
    """Train a byte-level tokenizer for transformers.

    Args:
        vocab_size: maximum number of tokens.
        specials: special tokens, which get the first ids in this order.
        template: special tokens around every text: their names and ``$A``, the text, separated by
            spaces; None adds nothing.
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
    """Train a decoder's tokenizer, with a chat template."""
    specials = ["<|endoftext|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>"]
    named = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|endoftext|>"}
    template = "<|bos|> $A" if adds_bos else None
    tokenizer = byte_level_tokenizer(vocab_size, specials, template, **named)
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def wordpiece_tokenizer(vocab_size: int, max_length: int) -> BertTokenizer:
    """Build a BERT tokenizer of letters and the most common words of a small corpus.

    It is not trained, because WordPieceTrainer breaks ties differently each time.
    """
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    normalizer = normalizers.BertNormalizer(lowercase=True)
    splitter = pre_tokenizers.BertPreTokenizer()
    split = splitter.pre_tokenize_str(normalizer.normalize_str(_CORPUS))
    words = Counter(word for word, _ in split)
    letters = sorted(set(ascii_lowercase + digits + punctuation).union(*words))
    common = sorted(words, key=lambda word: (-words[word], word))
    pieces = dict.fromkeys([*specials, *letters, *(f"##{letter}" for letter in letters), *common])
    vocab = {piece: token_id for token_id, piece in enumerate([*pieces][:vocab_size])}
    return BertTokenizer(vocab=vocab, do_lower_case=True, model_max_length=max_length)


NOISE_STD = 0.1
"""Standard deviation of norms and biases."""

TIED_EMBEDDING_STD = 0.05
"""Standard deviation of tied embeddings. A tied head scores tokens by similarity to the residual
stream; with large embeddings that is mostly the input token, which greedy decoding then repeats."""

ATTENTION_GAIN = 2.0
"""Gain of attention: flat attention averages the context away, leaving only the last token."""

# Mllama's gates are initialized closed, so that its image layers would do nothing.
_OPEN_GATE = 0.7
_EMBEDDINGS = ("embed_tokens", "shared", "codec_embed", "audio_bos_eos_token")


def seeded_model(
    make: Callable[[], Any],
    generator: torch.Generator,
    draw: Callable[[str, nn.Parameter, torch.Generator], None],
) -> Any:
    """Build a model in eval mode, with weights that depend only on the generator."""
    with torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = make()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw(name, parameter, generator)
    return model.eval()


def initialise(
    name: str,
    parameter: nn.Parameter,
    generator: torch.Generator,
    *,
    tied: bool,
    gains: Mapping[str, float],
) -> None:
    """Initialize matrices by fan-in, so that every layer matters; norms and biases by noise."""
    owner = name.split(".")[-2]
    if "gate" in name and parameter.numel() == 1:
        parameter.fill_(_OPEN_GATE)
    elif parameter.ndim < 2:
        is_scale = name.endswith("weight") and ("norm" in owner or owner.startswith("ln"))
        # 1, or 0 for norms that scale by 1 + weight.
        centre = float(parameter.mean()) if is_scale else 0.0
        parameter.normal_(centre, NOISE_STD, generator=generator)
    elif owner in _EMBEDDINGS:
        parameter.normal_(0.0, TIED_EMBEDDING_STD if tied else 1.0, generator=generator)
    elif "position" in name or "relative_attention_bias" in name:
        # Position parameters must matter as well, compared with small embeddings.
        parameter.normal_(0.0, 1.0, generator=generator)
    else:
        fan_in = parameter[0].numel()
        parameter.normal_(0.0, fan_in**-0.5, generator=generator).mul_(gains.get(owner, 1.0))


def suppress_special_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make special tokens and bytes that are not text unlikely, so that outputs are readable."""
    quiet = [
        token_id
        for token_id in range(len(tokenizer))
        if token_id in tokenizer.all_special_ids or not _is_text(str(tokenizer.decode([token_id])))
    ]
    with torch.no_grad():
        model.get_output_embeddings().weight[quiet] *= 0.1


def save_checkpoint(
    directory: str | Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    *processors: Any,
) -> Path:
    """Write the config, weights, tokenizer, and the files of image and audio processors."""
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    with hidden_progress_bars():
        model.save_pretrained(path)
    for each in (tokenizer, *processors):
        if each is not None:
            each.save_pretrained(path)
    return path


def _is_text(piece: str) -> bool:
    return piece == "\n" or (piece.isprintable() and "\N{REPLACEMENT CHARACTER}" not in piece)

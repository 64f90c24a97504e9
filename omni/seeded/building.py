"""The random weights of seeded models, and the folders that they are written to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from string import ascii_lowercase, digits, punctuation
from typing import Any, Self

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SeededSettings:
    """Settings of a model whose layers are all alike.

    Attributes:
        seed: of the weights; the same seed gives the same bytes.
        hidden_size: width of the stream, or of both streams.
        num_layers: layers; of the encoder, and of the decoder.
        num_heads: heads of every attention; of queries.
        intermediate_size: width inside the MLPs.
        vocab_size: of the model. The tokenizer has at most so many tokens, and at most 768.
        max_position_embeddings: the longest sequence.
        with_tokenizer: whether to write a tokenizer.
        max_shard_size: as ``save_pretrained`` takes it, such as ``"100KB"``, for several shards.
    """

    seed: int = 0
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    intermediate_size: int = 128
    vocab_size: int = 768
    max_position_embeddings: int = 1024
    with_tokenizer: bool = True
    max_shard_size: str | None = None

    @classmethod
    def split(cls, given: Mapping[str, Any], **defaults: Any) -> tuple[Self, dict[str, Any]]:
        """Part what was given into these settings, with other defaults, and what is a config's."""
        own = {field.name for field in fields(cls)}
        settings = cls(**defaults | {name: value for name, value in given.items() if name in own})
        return settings, {name: value for name, value in given.items() if name not in own}

    def sizes(self) -> dict[str, Any]:
        """The sizes, by the names that most configs of one stack have for them."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "max_position_embeddings": self.max_position_embeddings,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSettings(SeededSettings):
    """Settings of a decoder-only model.

    Attributes:
        tied: whether the head is the embedding matrix.
        num_kv_heads: key and value heads.
        with_head: False writes the headless model (``Qwen2Model``), as embedding models are.
    """

    tied: bool = True
    num_kv_heads: int = 2
    with_head: bool = True

    def text_config(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """The sizes and the special ids, by the names that decoders' configs have for them."""
        return self.sizes() | {
            "num_key_value_heads": self.num_kv_heads,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
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
    """Byte-level BPE: every text round-trips, half characters included."""
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


def wordpiece_tokenizer(vocab_size: int, max_length: int) -> BertTokenizer:
    """BERT's kind of tokenizer: letters, and the commonest words of a small corpus.

    Not trained: WordPieceTrainer breaks ties in another way each time.
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
"""A tied head scores a token by its likeness to the stream's content; with large embeddings that
content is mostly the input token itself, and greedy decoding repeats it for ever."""

ATTENTION_GAIN = 2.0
"""Flat attention averages the context away, and the last token alone decides the next one."""

# Mllama's gates start shut, and its image layers would do nothing.
_OPEN_GATE = 0.7
_EMBEDDINGS = ("embed_tokens", "shared", "codec_embed", "audio_bos_eos_token")


def seeded_model(
    make: Callable[[], Any],
    generator: torch.Generator,
    draw: Callable[[str, nn.Parameter, torch.Generator], None],
) -> Any:
    """Make a model, ready to run, with weights that depend on the generator alone."""
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
    """Fan-in for matrices, so that every layer matters; noise on norms and biases."""
    owner = name.split(".")[-2]
    if "gate" in name and parameter.numel() == 1:
        parameter.fill_(_OPEN_GATE)
    elif parameter.ndim < 2:
        is_scale = name.endswith("weight") and ("norm" in owner or owner.startswith("ln"))
        # 1, or 0 where rows are scaled by 1 + it.
        centre = float(parameter.mean()) if is_scale else 0.0
        parameter.normal_(centre, NOISE_STD, generator=generator)
    elif owner in _EMBEDDINGS:
        parameter.normal_(0.0, TIED_EMBEDDING_STD if tied else 1.0, generator=generator)
    elif "position" in name or "relative_attention_bias" in name:
        # Beside small embeddings, what is learned per position has to matter as well.
        parameter.normal_(0.0, 1.0, generator=generator)
    else:
        fan_in = parameter[0].numel()
        parameter.normal_(0.0, fan_in**-0.5, generator=generator).mul_(gains.get(owner, 1.0))


def quieten(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make special tokens and bytes that are no text unlikely, so that outputs can be read."""
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
    max_shard_size: str | None = None,
) -> Path:
    """Write config, weights, tokenizer, and the files of what reads images and sound."""
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    shards: dict[str, Any] = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    with hidden_progress_bars():
        model.save_pretrained(path, **shards)
    for each in (tokenizer, *processors):
        if each is not None:
            each.save_pretrained(path)
    return path


def _is_text(piece: str) -> bool:
    return piece == "\n" or (piece.isprintable() and "\N{REPLACEMENT CHARACTER}" not in piece)

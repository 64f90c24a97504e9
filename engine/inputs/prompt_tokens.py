"""Conversion of prompts of a decoder or text encoder to token ids or embeddings."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice, repeat
from operator import index
from typing import SupportsIndex, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from engine.interface.arguments import check_dense
from engine.interface.config import RequestLimits
from engine.interface.placed_error import PlacedError
from engine.interface.prompts import (
    AudioPrompt,
    ChatPrompt,
    CodecPrompt,
    EmbedsPrompt,
    ExplicitEncoderDecoderPrompt,
    ImagePrompt,
    Prompt,
    SpeechPrompt,
    TextPrompt,
    TokensPrompt,
)
from engine.interface.sampling_params import SamplingParams
from engine.requests.encoder_input import PromptPositions
from engine.resources.memory_plan import format_bytes
from engine.text.tokenizer import TemplateLimits, render_chat, token_ids
from prefix_cache import KVCacheManager

_DEFAULTS = RequestLimits()


@dataclass(frozen=True, slots=True)
class InputLimits:
    """Limits of a request.

    Attributes:
        vocab_size: bound of prompt ids, which start at 0.
        num_logits: bound of generated ids, which start at 0; an image's placeholder may lie beyond
            it. 0 for a checkpoint that cannot generate.
        dtype: type of prompt embeddings inside the model.
        max_prompt_chars: maximum, see :func:`~engine.text.tokenizer.max_prompt_chars`.
        max_num_batched_tokens: token budget of a step; 0 if no input has to fit into one.
    """

    max_model_len: int
    hidden_size: int
    vocab_size: int
    num_logits: int
    block_size: int
    usable_tokens: int
    dtype: torch.dtype
    max_prompt_chars: int = 2**22
    requests: RequestLimits = _DEFAULTS
    max_num_batched_tokens: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of embeddings inside the model."""
        return self.hidden_size * self.dtype.itemsize

    def check_length(self, num_prompt_tokens: int, num_wanted: int = 0) -> None:
        """Refuse a prompt that is too long for the model with ``num_wanted`` generated tokens."""
        if num_prompt_tokens + num_wanted > self.max_model_len:
            room = f", and {num_wanted} to generate" if num_wanted else ""
            raise ValueError(
                f"the prompt has {num_prompt_tokens} tokens{room}, but max_model_len is "
                f"{self.max_model_len}; shorten the prompt or raise max_model_len"
            )

    def num_kept_tokens(self, params: SamplingParams) -> int:
        """Return the number of prompt tokens that ``truncate_prompt_tokens`` keeps.

        Raises:
            PlacedError: it exceeds the model's length, or ``max_tokens`` leaves no room.
        """
        asked, longest = params.truncate_prompt_tokens, self.max_model_len
        kept = longest - (1 if params.max_tokens is None else params.max_tokens)
        kept = kept if asked is None or asked < 0 else asked
        if 0 < kept <= longest:
            return kept
        beside = f" and max_tokens {params.max_tokens}" if kept <= 0 else ""
        raise PlacedError(
            ("truncate_prompt_tokens",),
            f"truncate_prompt_tokens is {asked}, but max_model_len is {longest}{beside}",
        )

    def check_chars(self, num_chars: int) -> None:
        """Raise ``ValueError`` for a text that is too long."""
        if num_chars > self.max_prompt_chars:
            raise ValueError(
                f"the prompt has {num_chars} characters, but at most {self.max_prompt_chars} are "
                "read; shorten it, or raise engine.limits.max_prompt_chars"
            )


class FitCheck:
    """Computes the maximum length of a request, and refuses it if it can never run.

    Args:
        kv_cache: computes the pages of encoder tokens next to those of the decoder; None if no
            encoder uses pages.
    """

    def __init__(self, limits: InputLimits, kv_cache: KVCacheManager | None = None) -> None:
        self.limits = limits
        self._kv_cache = kv_cache

    def check_head(self, params: SamplingParams) -> None:
        """Raise ``PlacedError`` if tokens are requested from a checkpoint that cannot generate."""
        if params.max_tokens != 0 and not self.limits.num_logits:
            raise PlacedError(
                ("max_tokens",),
                "the checkpoint has no language-model head and cannot generate; "
                f"use max_tokens=0, got {params.max_tokens}",
            )

    def max_num_tokens(
        self,
        num_prompt_tokens: int,
        params: SamplingParams,
        positions: PromptPositions | None = None,
        num_encoder_tokens: int = 0,
        num_item_rows: int = 0,
    ) -> int:
        """Return the maximum length of a request's sequence.

        Args:
            positions: token positions on several axes; None if positions are indices.
            num_item_rows: rows of the prompt's largest item, in the width of embeddings.

        Raises:
            ValueError: the request can never run.
        """
        limits, wanted = self.limits, params.max_tokens
        ahead = self._check_length(num_prompt_tokens, 0 if wanted == 0 else 1, positions)
        self.check_head(params)
        max_num_tokens = limits.max_model_len - ahead
        if wanted is None:
            wanted = max_num_tokens - num_prompt_tokens
        max_num_tokens = min(num_prompt_tokens + wanted, max_num_tokens)
        # The last token is never computed, so it needs no slot.
        num_slots = max(num_prompt_tokens, max_num_tokens - 1)
        if num_slots > limits.usable_tokens:
            raise ValueError(
                f"the request can never fit: {num_prompt_tokens} prompt tokens and "
                f"{wanted} to generate need slots for {num_slots} tokens, the whole "
                f"KV cache holds {limits.usable_tokens}; lower max_tokens or raise num_blocks"
            )
        if self._kv_cache is not None and (num_encoder_tokens or num_item_rows):
            self._check_fits(self._kv_cache, num_slots, num_encoder_tokens, num_item_rows)
        return max_num_tokens

    def _check_fits(
        self, kv_cache: KVCacheManager, num_slots: int, num_encoder_tokens: int, num_item_rows: int
    ) -> None:
        num_pages = kv_cache.config.item_pages(num_item_rows * self.limits.row_bytes)
        num_blocks = kv_cache.pages_for(num_slots, num_encoder_tokens, 1, num_pages)
        if num_blocks >= kv_cache.config.num_large_pages:
            beside = f"{num_encoder_tokens} encoder tokens"
            if num_item_rows:
                beside = f"the {num_item_rows} rows of the largest item"
            raise ValueError(
                f"the request can never fit: {num_slots} decoder tokens and {beside} "
                f"take {num_blocks} blocks, the pool has "
                f"{kv_cache.config.num_large_pages - 1}; shorten the input, lower max_tokens or "
                "raise num_blocks"
            )

    def _check_length(
        self, num_prompt_tokens: int, wanted: int, positions: PromptPositions | None
    ) -> int:
        """Refuse a prompt that is too long; return by how much positions exceed indices."""
        # max_model_len bounds both positions and indices.
        ahead, reach = 0, num_prompt_tokens - 1
        if positions is not None:
            ahead = max(0, positions.shift)
            reach = max(reach + ahead, positions.largest)
        limit = self.limits.max_model_len
        if reach >= num_prompt_tokens and reach + wanted >= limit:
            raise ValueError(
                f"what the prompt shows reaches place {reach} on an axis, "
                f"but max_model_len is {limit}; shorten it or raise max_model_len"
            )
        self.limits.check_length(num_prompt_tokens, wanted)
        return ahead


def check_item(num_rows: int, row_bytes: int, encoder_cache_bytes: int | None) -> None:
    """Refuse an item whose rows the encoder cache could never hold."""
    if encoder_cache_bytes is None:
        return
    room = encoder_cache_bytes // row_bytes
    if num_rows > room:
        raise ValueError(
            f"{num_rows} rows take {format_bytes(num_rows * row_bytes)} of the encoder cache, "
            f"which has room for {room} rows; raise encoder_cache_bytes"
        )


_MAX_DEPTH = 64
"""Maximum nesting of plain data in a chat message."""

WrittenPrompt: TypeAlias = str | TextPrompt | ChatPrompt
"""Prompts that a tokenizer converts to ids."""


def tokenize(
    prompt: WrittenPrompt,
    tokenizer: PreTrainedTokenizerBase | None,
    limits: InputLimits,
    *,
    as_it_is: bool = False,
) -> list[int]:
    """Convert text or chat messages to token ids.

    Args:
        limits: limits of the text, checked first, and of a chat template.
        as_it_is: True to leave out the special tokens that the tokenizer adds.

    Raises:
        ValueError: the checkpoint has no tokenizer or no chat template, or the text is invalid or
            too long.
    """
    text, add_special_tokens = written(prompt, tokenizer, limits)
    assert tokenizer is not None
    return token_ids(
        tokenizer,
        text,
        add_special_tokens=add_special_tokens and not as_it_is,
        seconds=limits.requests.tokenizer_seconds,
    )


def written(
    prompt: WrittenPrompt, tokenizer: PreTrainedTokenizerBase | None, limits: InputLimits
) -> tuple[str, bool]:
    """Return a prompt's text, and True if special tokens are added; see :func:`tokenize`."""
    if tokenizer is None:
        raise ValueError(
            "the checkpoint has no tokenizer: give prompt_token_ids or prompt_embeds, not text"
        )
    if isinstance(prompt, ChatPrompt):
        given = (prompt.messages, prompt.tools, prompt.chat_template_kwargs)
        limits.check_chars(_num_chars(given))
        template = limits.requests.template_seconds, limits.requests.template_bytes
        bounds = TemplateLimits(limits.max_prompt_chars, *template)
        text, add_special_tokens = render_chat(tokenizer, *given, limits=bounds), False
    elif isinstance(prompt, TextPrompt):
        text, add_special_tokens = prompt.prompt, prompt.add_special_tokens
        if not isinstance(add_special_tokens, bool):
            raise ValueError(
                "add_special_tokens must be True or False, got "
                f"{type(add_special_tokens).__name__}; name the argument that was meant, such as "
                "multi_modal_data="
            )
    else:
        text, add_special_tokens = prompt, True
    if not isinstance(text, str):
        raise ValueError(f"the prompt's text must be a str, got {type(text).__name__}")
    limits.check_chars(len(text))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the prompt has half of a surrogate pair at character {error.start}, which is no text"
        ) from error
    return text, add_special_tokens


def truncated(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase | None,
    limits: InputLimits,
    num_tokens: int,
    *,
    keeps_end: bool,
) -> Prompt:
    """Truncate a prompt to some of its tokens, keeping special tokens that the tokenizer adds.

    ::

        tokens      [CLS] 7 8 9 4 5 [SEP]
        4 of them   [CLS] 7 8 [SEP]          or, of the end, [CLS] 4 5 [SEP]

    Args:
        prompt: text, chat messages, token ids or embeddings.
        limits: at most ``max_prompt_chars`` of a longer text are read, from the kept end.

    Raises:
        ValueError: the prompt is of another form, has items, or cannot be tokenized.
    """
    if getattr(prompt, "multi_modal_data", None):
        raise ValueError("truncate_prompt_tokens: a prompt with images or sound is not cut")
    kept = slice(-num_tokens, None) if keeps_end else slice(num_tokens)
    if isinstance(prompt, EmbedsPrompt):
        rows: object = prompt.prompt_embeds  # a user's, of any type
        return EmbedsPrompt(rows[kept]) if isinstance(rows, Tensor) and rows.ndim else prompt
    if isinstance(prompt, TokensPrompt):
        ids = tuple(first_ids(prompt.prompt_token_ids, limits.max_prompt_chars))
        return TokensPrompt(ids[kept])  # type: ignore[arg-type]  # checked by resolve_prompt
    if not isinstance(prompt, WrittenPrompt):
        raise ValueError(
            "truncate_prompt_tokens: only text, chat messages, token ids and embeddings are cut, "
            f"not a {type(prompt).__name__}"
        )
    read = slice(-limits.max_prompt_chars, None) if keeps_end else slice(limits.max_prompt_chars)
    if isinstance(prompt, str):
        prompt = prompt[read]
    elif isinstance(prompt, TextPrompt) and isinstance(prompt.prompt, str):
        prompt = replace(prompt, prompt=prompt.prompt[read])
    ids_of_all = tokenize(prompt, tokenizer, limits)
    if len(ids_of_all) <= num_tokens:
        return TokensPrompt(tuple(ids_of_all))
    own = tokenize(prompt, tokenizer, limits, as_it_is=True)
    return TokensPrompt(_cut_between(ids_of_all, own, num_tokens, keeps_end=keeps_end))


def _cut_between(
    ids: list[int], text_ids: list[int], num_tokens: int, *, keeps_end: bool
) -> tuple[int, ...]:
    """Cut a text's ids, and keep the special ones before and after them."""
    num_special = len(ids) - len(text_ids)
    places = range(num_special + 1)
    first = next((at for at in places if ids[at : at + len(text_ids)] == text_ids), None)
    if first is None:  # the special tokens change the tokenization of the text
        return tuple(ids[-num_tokens:] if keeps_end else ids[:num_tokens])
    room = num_tokens - num_special
    if room < 1:
        raise ValueError(
            f"truncate_prompt_tokens is {num_tokens}, but the tokenizer adds {num_special} special "
            "tokens to each text"
        )
    kept = text_ids[-room:] if keeps_end else text_ids[:room]
    return (*ids[:first], *kept, *ids[first + len(text_ids) :])


def _num_chars(value: object) -> int:
    """Count the characters of all texts in plain data; ``ValueError`` if it nests too deep."""
    total, left = 0, [(value, 0)]
    while left:
        each, depth = left.pop()
        if isinstance(each, str):
            total += len(each)
        elif isinstance(each, Mapping | list | tuple):
            if depth > _MAX_DEPTH:
                raise ValueError(f"a chat message nests deeper than {_MAX_DEPTH} levels")
            inner = each.values() if isinstance(each, Mapping) else each
            left += zip(inner, repeat(depth + 1))
    return total


def resolve_prompt(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None, limits: InputLimits
) -> tuple[list[int], Tensor | None]:
    """Convert any form of prompt to token ids, or to zeros with embeddings instead.

    Args:
        limits: limits of the prompt, and the type that embeddings are cast to.

    Returns:
        ``num_tokens`` ids, and ``(num_tokens, hidden_size)`` embeddings or None.

    Raises:
        ValueError: the prompt is empty, of an unknown form, too long, of the wrong width or type,
            holds unknown ids or numbers that are not finite, or needs a missing tokenizer.
    """
    if isinstance(prompt, EmbedsPrompt):
        rows: object = prompt.prompt_embeds  # a user's, of any type
        if isinstance(rows, Tensor) and rows.ndim:
            limits.check_length(rows.shape[0])
        embeds = check_rows(rows, "prompt_embeds", limits.hidden_size, limits.dtype)
        if not len(embeds):
            raise ValueError("the prompt is empty: at least one embedding row is needed")
        return [0] * len(embeds), embeds
    if isinstance(prompt, TokensPrompt | WrittenPrompt):
        if isinstance(prompt, TokensPrompt):
            given = first_ids(prompt.prompt_token_ids, limits.max_model_len)
        else:
            given = tokenize(prompt, tokenizer, limits)
        limits.check_length(len(given))
        return check_token_ids(given, limits.vocab_size), None
    kind = type(prompt).__name__
    if isinstance(prompt, AudioPrompt | ImagePrompt):
        what = "sound" if isinstance(prompt, AudioPrompt) else "images"
        raise ValueError(
            f"this model reads text and takes no {what}; give it text, chat messages, token ids or "
            "embeddings"
        )
    if isinstance(prompt, ExplicitEncoderDecoderPrompt):
        encoder, decoder = prompt.encoder_prompt, prompt.decoder_prompt
        if decoder is None and isinstance(encoder, AudioPrompt | ImagePrompt):
            return resolve_prompt(encoder, tokenizer, limits)
        raise ValueError(
            "this model has no encoder beside its decoder: give it one prompt of text, chat "
            "messages, token ids or embeddings, not an encoder prompt or a decoder prompt"
        )
    if isinstance(prompt, SpeechPrompt | CodecPrompt):
        reader = "a model that speaks" if isinstance(prompt, SpeechPrompt) else "a generator"
        raise ValueError(f"a {kind} is what {reader} reads, but this model reads text")
    raise ValueError(
        f"a prompt is a str, TextPrompt, ChatPrompt, TokensPrompt or EmbedsPrompt, got {kind}"
    )


def first_ids(token_ids: Iterable[SupportsIndex], longest: int) -> Collection[SupportsIndex]:
    """Return a collection of ids, from an iterator at most one too many; else ``ValueError``."""
    if isinstance(token_ids, Collection):
        return token_ids
    try:
        return list(islice(token_ids, longest + 1))
    except TypeError as error:
        raise ValueError(f"prompt_token_ids must be integers: {error}") from error


def check_token_ids(token_ids: Iterable[SupportsIndex], vocab_size: int) -> list[int]:
    """Return token ids as a list; ``ValueError`` if empty or not integers of the vocabulary."""
    try:
        ids = [index(token_id) for token_id in token_ids]
    except TypeError as error:
        raise ValueError(f"prompt_token_ids must be integers: {error}") from error
    if not ids:
        raise ValueError("the prompt is empty: at least one token is needed")
    for position, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise ValueError(
                f"prompt token {position} is {token_id}, but the vocabulary has ids "
                f"0 to {vocab_size - 1}"
            )
    return ids


def check_rows(rows: object, name: str, width: int, dtype: torch.dtype) -> Tensor:
    """Return finite rows, ``(num_tokens, width)``, in the model's type; else ``ValueError``."""
    if not isinstance(rows, Tensor):
        raise ValueError(f"{name} must be a dense tensor, got {type(rows).__name__}")
    check_dense(name, rows)
    if rows.ndim != 2 or rows.shape[1] != width:
        raise ValueError(
            f"{name} must be (num_tokens, {width}) for this model, got {tuple(rows.shape)}"
        )
    if not rows.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {rows.dtype}")
    # Check in the model's type, in which a finite number may become infinite.
    rows = rows.detach().to(dtype)
    if not bool(torch.isfinite(rows).all()):
        raise ValueError(f"{name} hold NaN or values that are infinite in {dtype}")
    return rows

"""Turns what a user gives into a request that is known to fit, or says why it does not."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import count
from operator import index
from typing import SupportsIndex

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from engine.prompts import ChatPrompt, EmbedsPrompt, Prompt, TextPrompt, TokensPrompt
from engine.request import Request, embeds_spans
from engine.sampler import SamplingState
from engine.sampling_params import SamplingParams
from engine.stop_checker import CompletionText
from engine.tokenizer import render_chat

__all__ = ["InputLimits", "InputProcessor", "resolve_prompt", "tokenize"]


@dataclass(frozen=True, slots=True)
class InputLimits:
    """What a request has to stay within.

    Attributes:
        max_model_len: longest sequence.
        hidden_size: width of prompt embeddings.
        vocab_size: ids run from 0 to this.
        has_lm_head: whether the checkpoint can generate.
        block_size: tokens per block.
        usable_tokens: tokens that the whole pool holds.
        dtype: type of prompt embeddings inside the model.
    """

    max_model_len: int
    hidden_size: int
    vocab_size: int
    has_lm_head: bool
    block_size: int
    usable_tokens: int
    dtype: torch.dtype


def tokenize(
    prompt: str | TextPrompt | ChatPrompt, tokenizer: PreTrainedTokenizerBase | None
) -> list[int]:
    """Text or chat messages to token ids.

    Raises:
        ValueError: the checkpoint has no tokenizer, or no chat template, or the text is none.
    """
    if tokenizer is None:
        raise ValueError(
            "the checkpoint has no tokenizer: give prompt_token_ids or prompt_embeds, not text"
        )
    if isinstance(prompt, ChatPrompt):
        text, add_special_tokens = render_chat(tokenizer, prompt.messages), False
    elif isinstance(prompt, TextPrompt):
        text, add_special_tokens = prompt.prompt, prompt.add_special_tokens
    else:
        text, add_special_tokens = prompt, True
    _check_text(text)
    ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    return ids


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise ValueError(f"the prompt's text must be a str, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the prompt has half of a surrogate pair at character {error.start}, which is no text"
        ) from error


def resolve_prompt(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    vocab_size: int,
    hidden_size: int,
    dtype: torch.dtype,
) -> tuple[list[int], Tensor | None]:
    """Turn any form of prompt into token ids, or into zeros and the embeddings in their place.

    Args:
        prompt: what the user gave.
        tokenizer: of the checkpoint, or None.
        vocab_size: ids run from 0 to this.
        hidden_size: width of embeddings.
        dtype: type that embeddings are cast to.

    Returns:
        ``num_tokens`` ids, and ``(num_tokens, hidden_size)`` embeddings or None.

    Raises:
        ValueError: the prompt is empty, of an unknown form, of the wrong width or type, holds
            unknown ids or numbers that are not finite, or needs a tokenizer that is not there.
    """
    if isinstance(prompt, EmbedsPrompt):
        embeds = _check_embeds(prompt.prompt_embeds, hidden_size, dtype)
        return [0] * embeds.shape[0], embeds
    if isinstance(prompt, TokensPrompt):
        token_ids = _check_integers(prompt.prompt_token_ids)
    elif isinstance(prompt, str | TextPrompt | ChatPrompt):
        token_ids = tokenize(prompt, tokenizer)
    else:
        raise ValueError(
            "a prompt is a str, TextPrompt, ChatPrompt, TokensPrompt or EmbedsPrompt, "
            f"got {type(prompt).__name__}"
        )
    if not token_ids:
        raise ValueError("the prompt is empty: at least one token is needed")
    for position, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise ValueError(
                f"prompt token {position} is {token_id}, but the vocabulary has ids "
                f"0 to {vocab_size - 1}"
            )
    return token_ids, None


def _check_integers(token_ids: Iterable[SupportsIndex]) -> list[int]:
    try:
        return [index(token_id) for token_id in token_ids]
    except TypeError as error:
        raise ValueError(f"prompt_token_ids must be integers: {error}") from error


def _check_embeds(embeds: object, width: int, dtype: torch.dtype) -> Tensor:
    if not isinstance(embeds, Tensor) or embeds.layout is not torch.strided:
        kind = str(embeds.layout) if isinstance(embeds, Tensor) else type(embeds).__name__
        raise ValueError(f"prompt_embeds must be a dense tensor, got {kind}")
    if embeds.ndim != 2 or embeds.shape[1] != width:
        raise ValueError(
            f"prompt_embeds must be (num_tokens, {width}) for this model, got {tuple(embeds.shape)}"
        )
    if not embeds.is_floating_point():
        raise ValueError(f"prompt_embeds must be floating point, got {embeds.dtype}")
    if embeds.shape[0] == 0:
        raise ValueError("the prompt is empty: at least one embedding row is needed")
    # In the model's type, in which a number may be infinite that was not in its own.
    embeds = embeds.detach().to(dtype)
    if not bool(torch.isfinite(embeds).all()):
        raise ValueError(f"prompt_embeds hold NaN or values that are infinite in {dtype}")
    return embeds


class InputProcessor:
    """Validates and builds requests.

    Args:
        tokenizer: of the checkpoint, or None.
        limits: what a request has to stay within.
        eos_token_ids: the checkpoint's end-of-sequence ids.
        seed: of the generator that seeds requests without one.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        limits: InputLimits,
        *,
        eos_token_ids: Collection[int],
        seed: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._eos_token_ids = frozenset(eos_token_ids)
        self._seeds = torch.Generator().manual_seed(seed)
        self._arrivals = count()

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[Request]:
        """Build one request per completion (``params.n``).

        Raises:
            ValueError: the prompt is empty, too long, of the wrong width or type, holds unknown
                ids, or could never fit the pool; or the parameters ask for what the checkpoint
                cannot do.
        """
        token_ids, embeds = resolve_prompt(
            prompt,
            self._tokenizer,
            vocab_size=self._limits.vocab_size,
            hidden_size=self._limits.hidden_size,
            dtype=self._limits.dtype,
        )
        max_num_tokens = self._max_num_tokens(len(token_ids), params)
        spans = () if embeds is None else embeds_spans(embeds, self._limits.block_size)
        seed = params.seed if params.seed is not None else self._draw_seed()
        return [
            Request(
                request_id=_completion_id(request_id, index, params.n),
                token_ids=list(token_ids),
                num_prompt_tokens=len(token_ids),
                prompt_embeds=embeds,
                params=params,
                max_num_tokens=max_num_tokens,
                priority=priority,
                arrival_index=next(self._arrivals),
                cache_salt=cache_salt,
                sampling=SamplingState(
                    params,
                    prompt_token_ids=() if embeds is not None else token_ids,
                    seed=(seed + index) % 2**63,
                    eos_token_ids=self._eos_token_ids,
                    vocab_size=self._limits.vocab_size,
                ),
                text=CompletionText(self._tokenizer, params, self._eos_token_ids),
                spans=spans,
            )
            for index in range(params.n)
        ]

    def _draw_seed(self) -> int:
        return int(torch.randint(2**62, (), generator=self._seeds))

    def _max_num_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """How long the sequence may get; also refuses what could never run."""
        limits = self._limits
        wanted = min(params.max_tokens, 1)
        if num_prompt_tokens + wanted > limits.max_model_len:
            room = f", and {wanted} to generate" if wanted else ""
            raise ValueError(
                f"the prompt has {num_prompt_tokens} tokens{room}, but max_model_len is "
                f"{limits.max_model_len}; shorten the prompt or raise max_model_len"
            )
        if params.max_tokens and not limits.has_lm_head:
            raise ValueError(
                "the checkpoint has no language-model head and cannot generate; "
                f"use max_tokens=0, got {params.max_tokens}"
            )
        max_num_tokens = min(num_prompt_tokens + params.max_tokens, limits.max_model_len)
        # The last token is never computed, so it needs no slot.
        num_slots = max(num_prompt_tokens, max_num_tokens - 1)
        if num_slots > limits.usable_tokens:
            raise ValueError(
                f"the request can never fit: {num_prompt_tokens} prompt tokens and "
                f"{params.max_tokens} to generate need slots for {num_slots} tokens, the whole "
                f"KV cache holds {limits.usable_tokens}; lower max_tokens or raise num_blocks"
            )
        return max_num_tokens


def _completion_id(request_id: str, index: int, n: int) -> str:
    return request_id if n == 1 else f"{request_id}\x00{index}"

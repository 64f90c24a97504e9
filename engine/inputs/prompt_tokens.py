"""Prompts of a decoder, or of a text encoder, to token ids or embeddings."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import SupportsIndex, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

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
from engine.text.chat_template import render_chat

__all__ = ["WrittenPrompt", "check_rows", "check_token_ids", "resolve_prompt", "tokenize"]


WrittenPrompt: TypeAlias = str | TextPrompt | ChatPrompt
"""What a tokenizer makes ids of."""


def tokenize(
    prompt: WrittenPrompt, tokenizer: PreTrainedTokenizerBase | None, *, as_it_is: bool = False
) -> list[int]:
    """Text or chat messages to token ids.

    Args:
        prompt: text or messages.
        tokenizer: of the checkpoint, or None.
        as_it_is: whether to leave out the special tokens that the tokenizer adds.

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
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the prompt has half of a surrogate pair at character {error.start}, which is no text"
        ) from error
    add_special_tokens = add_special_tokens and not as_it_is
    ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    return ids


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
        embeds = check_rows(prompt.prompt_embeds, "prompt_embeds", hidden_size, dtype)
        if not len(embeds):
            raise ValueError("the prompt is empty: at least one embedding row is needed")
        return [0] * len(embeds), embeds
    if isinstance(prompt, TokensPrompt):
        return check_token_ids(prompt.prompt_token_ids, vocab_size), None
    if isinstance(prompt, WrittenPrompt):
        return check_token_ids(tokenize(prompt, tokenizer), vocab_size), None
    kind = type(prompt).__name__
    if isinstance(prompt, ExplicitEncoderDecoderPrompt | AudioPrompt | ImagePrompt):
        if isinstance(prompt, ExplicitEncoderDecoderPrompt):
            kind = f"{type(prompt.encoder_prompt).__name__} for an encoder"
        raise ValueError(
            f"this model is not an encoder-decoder model, so it takes no {kind}; "
            "give it one prompt of text, chat messages, token ids or embeddings; sound and images, "
            "where a model takes them, stand beside such a prompt"
        )
    if isinstance(prompt, SpeechPrompt | CodecPrompt):
        reader = "a talker" if isinstance(prompt, SpeechPrompt) else "a vocoder"
        raise ValueError(f"a {kind} is what {reader} reads, but this model reads text")
    raise ValueError(
        f"a prompt is a str, TextPrompt, ChatPrompt, TokensPrompt or EmbedsPrompt, got {kind}"
    )


def check_token_ids(token_ids: Iterable[SupportsIndex], vocab_size: int) -> list[int]:
    """Give token ids as a list.

    Raises:
        ValueError: there are none, one is no integer, or one is outside the vocabulary.
    """
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
    """Give ``(num_tokens, width)`` rows in a model's type; there may be none.

    Args:
        rows: what the user gave.
        name: of it, for messages.
        width: of a row.
        dtype: type that they are cast to.

    Raises:
        ValueError: it is no such tensor, or holds numbers that are not finite.
    """
    if not isinstance(rows, Tensor) or rows.layout is not torch.strided:
        kind = str(rows.layout) if isinstance(rows, Tensor) else type(rows).__name__
        raise ValueError(f"{name} must be a dense tensor, got {kind}")
    if rows.ndim != 2 or rows.shape[1] != width:
        raise ValueError(
            f"{name} must be (num_tokens, {width}) for this model, got {tuple(rows.shape)}"
        )
    if not rows.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {rows.dtype}")
    # In the model's type, in which a number may be infinite that was not in its own.
    rows = rows.detach().to(dtype)
    if not bool(torch.isfinite(rows).all()):
        raise ValueError(f"{name} hold NaN or values that are infinite in {dtype}")
    return rows

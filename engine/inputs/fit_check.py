"""Decides which requests can run; the one place where what could never fit is refused."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.interface.config import RequestLimits
from engine.interface.placed_error import PlacedError
from engine.interface.sampling_params import SamplingParams
from engine.requests.encoder_input import PromptPositions
from engine.resources.memory_plan import format_bytes
from prefix_cache import KVCacheManager

__all__ = [
    "FitCheck",
    "InputLimits",
    "check_encoder_prompt",
    "check_item",
    "check_utterance",
    "check_whole_input",
]

_DEFAULTS = RequestLimits()


@dataclass(frozen=True, slots=True)
class InputLimits:
    """What a request has to stay within.

    Attributes:
        max_model_len: longest sequence.
        hidden_size: width of prompt embeddings.
        vocab_size: ids of prompts run from 0 to this.
        num_logits: ids that can be generated, from 0 to this; an image's placeholder may lie
            beyond it. 0 for a checkpoint that cannot generate.
        block_size: tokens per block.
        usable_tokens: tokens that the whole pool holds.
        dtype: type of prompt embeddings inside the model.
        max_prompt_chars: of a prompt's text, see :func:`~engine.text.tokenizer.max_prompt_chars`.
        requests: what the user set.
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

    def check_length(self, num_prompt_tokens: int, num_wanted: int = 0) -> None:
        """Refuse a prompt that is too long for the model, with so many tokens to generate."""
        if num_prompt_tokens + num_wanted > self.max_model_len:
            room = f", and {num_wanted} to generate" if num_wanted else ""
            raise ValueError(
                f"the prompt has {num_prompt_tokens} tokens{room}, but max_model_len is "
                f"{self.max_model_len}; shorten the prompt or raise max_model_len"
            )

    def num_kept_tokens(self, params: SamplingParams) -> int:
        """How many tokens of a prompt ``truncate_prompt_tokens`` keeps.

        Raises:
            PlacedError: they are more than the model takes, or ``max_tokens`` leaves no room.
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
        """Refuse a text that is too long to be read; ``ValueError``."""
        if num_chars > self.max_prompt_chars:
            raise ValueError(
                f"the prompt has {num_chars} characters, but at most {self.max_prompt_chars} are "
                "read; shorten it, or raise engine.limits.max_prompt_chars"
            )


class FitCheck:
    """Works out how long a request may get, and refuses it if it can never run.

    Args:
        limits: what a request has to stay within.
        kv_cache: says what the tokens of an encoder take beside those of the decoder; None where
            no encoder has any.
    """

    def __init__(self, limits: InputLimits, kv_cache: KVCacheManager | None = None) -> None:
        self.limits = limits
        self._kv_cache = kv_cache

    def check_head(self, params: SamplingParams) -> None:
        """Raise ``PlacedError`` if tokens are asked of a checkpoint that cannot generate."""
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
    ) -> int:
        """How long the sequence of a request may get.

        Args:
            num_prompt_tokens: of the whole prompt.
            params: how many tokens are to follow it.
            positions: where tokens lie on several axes; None where places are indices.
            num_encoder_tokens: rows of the encoder's output.

        Raises:
            ValueError: the request could never run.
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
        kv_cache = self._kv_cache
        if kv_cache and num_encoder_tokens and not kv_cache.fits(num_slots, num_encoder_tokens):
            num_blocks = kv_cache.pages_for(num_slots, num_encoder_tokens)
            raise ValueError(
                f"the request can never fit: {num_slots} decoder tokens and {num_encoder_tokens} "
                f"encoder tokens take {num_blocks} blocks, the pool has "
                f"{kv_cache.config.num_large_pages - 1}; shorten the input, lower max_tokens or "
                "raise num_blocks"
            )
        return max_num_tokens

    def _check_length(
        self, num_prompt_tokens: int, wanted: int, positions: PromptPositions | None
    ) -> int:
        """Refuse what is too long; returns how far places run ahead of indices."""
        # There are max_model_len of either.
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


def check_encoder_prompt(num_tokens: int, longest: int) -> None:
    """Refuse a prompt that is too long for the encoder of an encoder-decoder model."""
    if num_tokens > longest:
        raise ValueError(
            f"the encoder prompt has {num_tokens} tokens, but the model's encoder takes "
            f"{longest} at most; shorten it"
        )


def check_item(num_rows: int, row_bytes: int, encoder_cache_bytes: int) -> None:
    """Refuse an image or the like whose rows the encoder cache could never hold."""
    room = encoder_cache_bytes // row_bytes
    if num_rows > room:
        raise ValueError(
            f"{num_rows} rows take {format_bytes(num_rows * row_bytes)} of the encoder cache, "
            f"which has room for {room} rows; raise encoder_cache_bytes"
        )


def check_utterance(num_codes: int, longest: int) -> None:
    """Refuse an utterance that is too long for its generator.

    Args:
        num_codes: of the utterance, as far as they have come.
        longest: that the generator takes.

    Raises:
        ValueError: says by how much.
    """
    if num_codes > longest:
        raise ValueError(
            f"the utterance has {num_codes} codes; this generator takes {longest} at most"
        )


def check_whole_input(num_tokens: int, budget: int, usable_tokens: int) -> None:
    """Refuse an input of an encoder engine that can never run, though its model could read it.

    Args:
        num_tokens: of the input.
        budget: most tokens of a step.
        usable_tokens: tokens that the whole store of outputs holds.

    Raises:
        ValueError: it is longer than one of these.
    """
    if num_tokens > budget:
        raise ValueError(
            f"the input has {num_tokens} tokens, but max_num_batched_tokens is {budget}: a "
            "bidirectional encoder needs its whole input in one step"
        )
    if num_tokens > usable_tokens:
        raise ValueError(
            f"the request can never fit: {num_tokens} tokens, the whole cache holds "
            f"{usable_tokens}; raise num_blocks"
        )

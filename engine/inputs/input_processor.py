"""Turns what a user gives into a request that is known to fit, or says why it does not."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from engine.inputs.encoder_decoder_inputs import EncoderDecoderInputProcessor
from engine.inputs.multimodal_data import refuse_items
from engine.inputs.multimodal_inputs import MultiModalInputProcessor
from engine.inputs.prompt_tokens import resolve_prompt
from engine.interface.prompts import Prompt
from engine.interface.sampling_params import SamplingParams
from engine.models.qwen2_5_omni.speech_prompt import SpeechPromptProcessor
from engine.requests.content_spans import (
    embeds_spans,
    encoder_spans,
    item_spans,
    position_spans,
)
from engine.requests.encoder_input import EncoderInput, EncoderView
from engine.requests.multimodal_input import MultiModalInput
from engine.requests.prompt_choice import PromptChoice
from engine.requests.prompt_positions import PromptPositions
from engine.requests.request import Request
from engine.requests.streamed_rows import StreamedRows
from engine.sampling.sampler import SamplingState
from engine.sampling.sampling_state import LogitsProcessor
from engine.text.stop_checker import CompletionText
from prefix_cache import ContentSpan

__all__ = ["InputLimits", "InputProcessor"]


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
    """

    max_model_len: int
    hidden_size: int
    vocab_size: int
    num_logits: int
    block_size: int
    usable_tokens: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Content:
    """A prompt, resolved: what the sequence begins with and what its hashes cover beside it."""

    token_ids: list[int]
    spans: tuple[ContentSpan, ...]
    embeds: Tensor | None = None
    encoder_input: EncoderInput | None = None
    encoder_view: EncoderView | None = None
    logits_processor: LogitsProcessor | None = None
    prompt_choice: PromptChoice | None = None
    multimodal_inputs: tuple[MultiModalInput, ...] = ()
    positions: PromptPositions | None = None
    streamed_rows: StreamedRows | None = None


class InputProcessor:
    """Validates and builds requests.

    Args:
        tokenizer: of the checkpoint, or None.
        limits: what a request has to stay within.
        eos_token_ids: the checkpoint's end-of-sequence ids.
        seed: of the generator that seeds requests without one.
        encoder_decoder: splits the prompts of an encoder-decoder model; None for other models.
        multimodal: puts what prompts show into the tokens of a model that takes it; None for
            other models.
        speech: lays out what a talker reads; None for other models.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        limits: InputLimits,
        *,
        eos_token_ids: Collection[int],
        seed: int,
        encoder_decoder: EncoderDecoderInputProcessor | None = None,
        multimodal: MultiModalInputProcessor | None = None,
        speech: SpeechPromptProcessor | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._eos_token_ids = frozenset(eos_token_ids)
        self._seeds = torch.Generator().manual_seed(seed)
        self._encoder_decoder = encoder_decoder
        self._multimodal = multimodal
        self._speech = speech
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
                ids, shows images that cannot be read or to a model that sees none, or could never
                fit the pool; or the parameters ask for what the checkpoint
                cannot do.
        """
        content = self._resolve(prompt, cache_salt)
        token_ids, params = content.token_ids, self._with_suppressed(params)
        choice = content.prompt_choice
        num_prompt_tokens = len(token_ids) + (0 if choice is None else choice.num_tokens)
        max_num_tokens = self._max_num_tokens(num_prompt_tokens, params, content.positions)
        seed = params.seed if params.seed is not None else self._draw_seed()
        return [
            Request(
                request_id=_completion_id(request_id, index, params.n),
                token_ids=list(token_ids),
                num_prompt_tokens=len(token_ids),
                prompt_embeds=content.embeds,
                params=params,
                max_num_tokens=max_num_tokens,
                priority=priority,
                arrival_index=next(self._arrivals),
                cache_salt=cache_salt,
                sampling=self._sampling_state(
                    params,
                    () if content.embeds is not None else token_ids,
                    (seed + index) % 2**63,
                    content.logits_processor,
                ),
                text=CompletionText(self._tokenizer, params, self._eos_token_ids),
                spans=content.spans,
                encoder_input=content.encoder_input,
                encoder_view=content.encoder_view,
                multimodal_inputs=content.multimodal_inputs,
                positions=content.positions,
                streamed_rows=content.streamed_rows,
                prompt_choice=content.prompt_choice,
            )
            for index in range(params.n)
        ]

    def check_sampling(self, params: SamplingParams) -> None:
        """Refuse what no request could run with.

        Raises:
            ValueError: the model has no such tokens, no tokenizer for stop strings, or no head.
        """
        self._sampling_state(self._with_suppressed(params))
        CompletionText(self._tokenizer, params, self._eos_token_ids)
        self._check_head(params)

    def _sampling_state(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] = (),
        seed: int = 0,
        logits_processor: LogitsProcessor | None = None,
    ) -> SamplingState:
        return SamplingState(
            params,
            prompt_token_ids,
            seed,
            self._eos_token_ids,
            self._num_choices,
            logits_processor=logits_processor,
            begin_suppress_token_ids=self._begin_suppressed,
        )

    @property
    def speakers(self) -> tuple[str, ...] | None:
        """Voices of a talker; None of other models."""
        return None if self._speech is None else self._speech.speakers.names

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether prompts have two sides."""
        return self._encoder_decoder is not None

    def extend(self, request: Request, prompt: Prompt) -> None:
        """Take the next chunk of a request's prompt, which its other completions share.

        Raises:
            ValueError: the model takes prompts whole, or not this chunk; nothing has changed.
        """
        if self._speech is None or request.streamed_rows is None:
            raise ValueError("this model is no talker: it takes its prompts whole, not in chunks")
        self._speech.extend(request.streamed_rows, prompt)

    def _resolve(self, prompt: Prompt, cache_salt: str | None) -> _Content:
        limits = self._limits
        if self._multimodal is None:
            refuse_items(prompt)
        if self._speech is not None:
            return self._resolve_speech(self._speech, prompt)
        if self._encoder_decoder is not None:
            inputs = self._encoder_decoder.process(prompt, cache_salt=cache_salt)
            spans = () if inputs.encoder_input is None else encoder_spans(inputs.encoder_input)
            return _Content(
                inputs.prompt_token_ids,
                spans,
                encoder_input=inputs.encoder_input,
                encoder_view=inputs.encoder_view,
                logits_processor=inputs.logits_processor,
                prompt_choice=inputs.prompt_choice,
            )
        token_ids, embeds = resolve_prompt(
            prompt,
            self._tokenizer,
            vocab_size=limits.vocab_size,
            hidden_size=limits.hidden_size,
            dtype=limits.dtype,
        )
        if self._multimodal is not None and embeds is None:
            shown = self._multimodal.process(token_ids, prompt, cache_salt=cache_salt)
            return _Content(
                shown.token_ids,
                item_spans(shown.items),
                multimodal_inputs=shown.items,
                positions=shown.positions,
            )
        spans = () if embeds is None else embeds_spans(embeds, limits.block_size)
        return _Content(token_ids, spans, embeds=embeds)

    def _resolve_speech(self, speech: SpeechPromptProcessor, prompt: Prompt) -> _Content:
        inputs, block_size = speech.process(prompt), self._limits.block_size
        return _Content(
            inputs.token_ids,
            () if inputs.positions is None else position_spans(inputs.positions, block_size),
            positions=inputs.positions,
            streamed_rows=inputs.streamed_rows,
        )

    def _with_suppressed(self, params: SamplingParams) -> SamplingParams:
        """Add what an encoder-decoder or speech checkpoint never wants to see generated."""
        processor = self._encoder_decoder or self._speech
        named = () if processor is None else processor.suppress_token_ids
        own = [token_id for token_id in named if token_id < self._num_choices]
        if not own:
            return params
        both = tuple(dict.fromkeys((*params.suppress_token_ids, *own)))
        return params.model_copy(update={"suppress_token_ids": both})

    @property
    def _num_choices(self) -> int:
        """Ids that parameters may name; a checkpoint without a head only checks them."""
        return self._limits.num_logits or self._limits.vocab_size

    @property
    def _begin_suppressed(self) -> tuple[int, ...]:
        if self._encoder_decoder is None:
            return ()
        return self._encoder_decoder.begin_suppress_token_ids

    def _draw_seed(self) -> int:
        return int(torch.randint(2**62, (), generator=self._seeds))

    def _check_head(self, params: SamplingParams) -> None:
        if params.max_tokens and not self._limits.num_logits:
            raise ValueError(
                "the checkpoint has no language-model head and cannot generate; "
                f"use max_tokens=0, got {params.max_tokens}"
            )

    def _max_num_tokens(
        self, num_prompt_tokens: int, params: SamplingParams, positions: PromptPositions | None
    ) -> int:
        """How long the sequence may get; also refuses what could never run."""
        limits = self._limits
        wanted = min(params.max_tokens, 1)
        # Places may run ahead of indices, and there are max_model_len of either.
        ahead, reach = 0, num_prompt_tokens - 1
        if positions is not None:
            ahead = max(0, positions.shift)
            reach = max(reach + ahead, positions.largest)
        if reach >= num_prompt_tokens and reach + wanted >= limits.max_model_len:
            raise ValueError(
                f"what the prompt shows reaches place {reach} on an axis, "
                f"but max_model_len is {limits.max_model_len}; shorten it or raise max_model_len"
            )
        if num_prompt_tokens + wanted > limits.max_model_len:
            room = f", and {wanted} to generate" if wanted else ""
            raise ValueError(
                f"the prompt has {num_prompt_tokens} tokens{room}, but max_model_len is "
                f"{limits.max_model_len}; shorten the prompt or raise max_model_len"
            )
        self._check_head(params)
        max_num_tokens = min(num_prompt_tokens + params.max_tokens, limits.max_model_len - ahead)
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

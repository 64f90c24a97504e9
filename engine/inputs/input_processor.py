"""Converts a user's input into a request that is known to fit, or raises the reason."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from engine.inputs.prompt_processor import PromptContent, PromptProcessor
from engine.inputs.prompt_tokens import FitCheck, truncated
from engine.interface.engine import NewRequest
from engine.interface.placed_error import PlacedError
from engine.interface.sampling_params import RequestSeeds, SamplingParams, checkpoint_defaults
from engine.requests.encoder_input import EncoderInput, encoder_spans
from engine.requests.request import Continuation, Request, RequestStatus, RequestTimes, Sequel
from engine.sampling.sampler import BadWords, LogitsProcessor, SamplingState
from engine.sampling.token_grammar import GrammarCompiler
from engine.text.stop_checker import CompletionText, check_stop_strings
from prefix_cache import EncoderBlocks

_GENERATION_FILE = "generation_config.json"
_SEED_STEP = 2**40
"""Seed distance between sequences of a completion: greater than that between completions."""


class InputProcessor:
    """Validates and builds requests.

    Args:
        prompts: resolves the prompts of this kind of model.
        seed: seed of the generator for requests without a seed.
        generation: the checkpoint's ``generation_config.json``; empty if there is none.

    Attributes:
        sampling_defaults: the checkpoint's defaults of ``SamplingParams`` fields.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        prompts: PromptProcessor,
        fit_check: FitCheck,
        *,
        eos_token_ids: Collection[int],
        seed: int,
        generation: Mapping[str, Any],
    ) -> None:
        self._tokenizer = tokenizer
        self.prompts = prompts
        self._fit_check = fit_check
        self._eos_token_ids = frozenset(eos_token_ids)
        self._seeds = RequestSeeds(seed)
        self.sampling_defaults = checkpoint_defaults(generation)
        words = generation.get("bad_words_ids") or ()
        self._bad_words = BadWords(words, self._eos_token_ids)
        # A tokenizer may know more ids than the model's head.
        self._suppressed = self._only_generable(
            *prompts.suppress_token_ids,
            *(generation.get("suppress_tokens") or ()),
            *self._bad_words.single_ids,
        )
        self._begin_suppressed = self._only_generable(
            *prompts.begin_suppress_token_ids, *(generation.get("begin_suppress_tokens") or ())
        )
        self._generation = generation
        self._grammars = GrammarCompiler(tokenizer, self._eos_token_ids, self._num_choices)

    def process(self, new: NewRequest) -> list[Request]:
        """Build one request per completion (``sampling.n``). Thread-safe.

        Args:
            new: the new request; its id is, or begins, the id of each built request.

        Raises:
            ValueError: the prompt is empty, too long, of the wrong width or type, holds unknown
                ids or unreadable or unsupported items, or can never fit the pool; or the
                parameters exceed limits, or are not supported by the checkpoint.
        """
        params, limits = new.sampling or SamplingParams(), self._fit_check.limits.requests
        limits.check_sampling(params)
        seed = self._seeds.draw() if params.seed is None else params.seed
        params = self._resolve(params)
        prompt = self.prompts.as_message(new.prompt)
        if params.truncate_prompt_tokens is not None:
            kept, keeps_end = self._num_kept_tokens(params), params.max_tokens != 0
            # As in vLLM: generation needs a prompt's end, an embedding its beginning.
            length_limits = self._fit_check.limits
            prompt = truncated(prompt, self._tokenizer, length_limits, kept, keeps_end=keeps_end)
        content = self.prompts.process(prompt, cache_salt=new.cache_salt)
        if content.continuation is not None:
            if params.seed is None and params.is_greedy:
                seed = 0  # makes retries of greedy text at another temperature deterministic
            params = _with_temperature(params, content.continuation)
        make = self._make_factory(content, params, new)
        prompt_ids = () if content.embeds is not None else content.token_ids
        sampling = self._sampling_state(
            params,
            prompt_ids,
            seed,
            self._bad_words.behind(prompt_ids, content.logits_processor),
            content.continuation,
        )
        return [
            make(
                request_id=new.request_id if params.n == 1 else f"{new.request_id}\x00{index}",
                token_ids=list(content.token_ids),
                queue_key=(new.priority, new.order * limits.max_completions + index),
                sampling=sampling.with_seed((seed + index) % 2**63),
                text=CompletionText(self._tokenizer, params, self._eos_token_ids),
            )
            for index in range(params.n)
        ]

    def _num_kept_tokens(self, params: SamplingParams) -> int:
        if self.prompts.is_encoder_decoder:
            raise PlacedError(
                ("truncate_prompt_tokens",),
                "truncate_prompt_tokens: prompts of encoder-decoder models are not cut",
            )
        return self._fit_check.limits.num_kept_tokens(params)

    def _make_factory(
        self, content: PromptContent, params: SamplingParams, new: NewRequest
    ) -> Callable[..., Request]:
        """Return a factory of a prompt's completions, with their shared fields checked to fit."""
        entry, choice = content.encoder_input, content.prompt_choice
        num_prompt_tokens = len(content.token_ids)
        num_encoder_tokens = 0 if entry is None else entry.num_tokens
        if content.continuation is not None:
            _check_continued(params)
            longest = max(num_prompt_tokens, content.continuation.longest_prompt)
            self._fit_check.max_num_tokens(longest, params, None, num_encoder_tokens)
        max_num_tokens = self._fit_check.max_num_tokens(
            num_prompt_tokens + (0 if choice is None else choice.num_tokens),
            params,
            content.positions,
            num_encoder_tokens,
            max((item.num_rows * item.row_parts for item in content.multimodal_inputs), default=0),
        )
        return partial(
            Request,
            num_prompt_tokens=num_prompt_tokens,
            prompt_embeds=content.embeds,
            params=params,
            max_num_tokens=max_num_tokens,
            cache_salt=new.cache_salt,
            spans=content.spans,
            encoder_input=entry,
            encoder_view=content.encoder_view,
            encoder_blocks=None if entry is None else self._encoder_blocks(entry),
            multimodal_inputs=content.multimodal_inputs,
            positions=content.positions,
            streamed_rows=content.streamed_rows,
            prompt_choice=choice,
            continuation=content.continuation,
        )

    def next_sequence(self, request: Request, sequel: Sequel) -> Request:
        """Build the sequence that follows an ended one: another input, or a retry.

        It is known to fit, and replaces the ended one in the queues.
        """
        entry, continuation = sequel.encoder_input, sequel.continuation
        if entry is None or continuation is None:
            raise RuntimeError(f"nothing follows on request {request.request_id!r}")
        ended = request.token_ids[: request.num_prompt_tokens]
        prompt_ids, choice = continuation.opening(ended)
        num_prompt_tokens = len(prompt_ids) + (0 if choice is None else choice.num_tokens)
        params = _with_temperature(request.params, continuation)
        return replace(
            request,
            token_ids=prompt_ids,
            num_prompt_tokens=len(prompt_ids),
            prompt_choice=choice,
            params=params,
            max_num_tokens=self._fit_check.max_num_tokens(
                num_prompt_tokens, params, None, entry.num_tokens
            ),
            spans=encoder_spans(entry),
            encoder_input=entry,
            encoder_blocks=self._encoder_blocks(entry),
            sampling=self._sampling_state(
                params,
                prompt_ids,
                (request.sampling.seed + _SEED_STEP) % 2**63,
                request.sampling.logits_processor,
                continuation,
            ),
            text=CompletionText(self._tokenizer, params, self._eos_token_ids),
            continuation=continuation,
            times=RequestTimes(request.times.arrival),
            status=RequestStatus.WAITING,
            num_computed_tokens=0,
            num_cached_tokens=None,
            alone_until=0,
            block_hashes=[],
            logprobs=[],
            judgements=[],
            queries={},
        )

    def _encoder_blocks(self, entry: EncoderInput) -> EncoderBlocks:
        block_size = self._fit_check.limits.block_size
        return EncoderBlocks.of(entry.content_hash, entry.num_tokens, block_size)

    def check_sampling(self, params: SamplingParams) -> None:
        """Refuse parameters that no request could run with."""
        self._fit_check.limits.requests.check_sampling(params)
        if params.truncate_prompt_tokens is not None:
            self._num_kept_tokens(params)
        self._sampling_state(self._resolve(params))
        check_stop_strings(params, self._tokenizer)
        self._fit_check.check_head(params)

    def _sampling_state(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] = (),
        seed: int = 0,
        logits_processor: LogitsProcessor | None = None,
        continuation: Continuation | None = None,
    ) -> SamplingState:
        return SamplingState(
            params,
            prompt_token_ids,
            seed,
            self._eos_token_ids,
            self._num_choices,
            logits_processor=logits_processor,
            begin_suppress_token_ids=self._begin_suppressed,
            grammar=self._grammars.compile(params.structured_output),
            judged_id=None if continuation is None else continuation.judged_id,
        )

    @property
    def checkpoint_token_ids(self) -> dict[str, str]:
        """Token ids that the checkpoint ends at, suppresses or forbids, with their source."""
        ids = {
            "eos_token_ids": ("eos_token_id", sorted(self._eos_token_ids)),
            "suppress_token_ids": ("suppress_tokens", self._suppressed),
            "begin_suppress_token_ids": ("begin_suppress_tokens", self._begin_suppressed),
            "bad_words_ids": ("bad_words_ids", self._generation.get("bad_words_ids")),
        }
        stated = {key for key, value in self._generation.items() if value is not None}
        if "bad_words_ids" in stated:
            stated.add("suppress_tokens")  # includes bad words of one token
        return {
            name: f"{list(found)} ({_GENERATION_FILE if key in stated else 'checkpoint'})"
            for name, (key, found) in ids.items()
            if found
        }

    def _resolve(self, params: SamplingParams) -> SamplingParams:
        """Add the checkpoint's defaults and suppressed tokens."""
        params = params.with_defaults(self.sampling_defaults)
        if not self._suppressed:
            return params
        both = tuple(dict.fromkeys((*params.suppress_token_ids, *self._suppressed)))
        return params.model_copy(update={"suppress_token_ids": both})

    def _only_generable(self, *token_ids: int) -> tuple[int, ...]:
        """Return the distinct ids that can be generated, in order."""
        return tuple(each for each in dict.fromkeys(token_ids) if 0 <= each < self._num_choices)

    @property
    def _num_choices(self) -> int:
        """Ids that parameters may name; a checkpoint without a head only checks them."""
        return self._fit_check.limits.num_logits or self._fit_check.limits.vocab_size


def _with_temperature(params: SamplingParams, continuation: Continuation) -> SamplingParams:
    """Return the parameters of a sequence, which may have a separate temperature."""
    own = continuation.temperature
    return params if own is None else params.model_copy(update={"temperature": own})


def _check_continued(params: SamplingParams) -> None:
    """Refuse parameters that are not supported for an input of several sequences."""
    if params.max_tokens == 0:
        raise ValueError(
            "max_tokens is 0, but the input takes several windows, and where one ends is given by "
            "what is generated for it; set max_tokens, or cut the input into shorter pieces"
        )
    if params.structured_output is not None:
        raise ValueError(
            "structured_output does not go with an input that takes several windows; cut the input "
            "into shorter pieces"
        )
    if params.stop:
        raise ValueError(
            "stop strings do not go with an input that takes several windows; use stop_token_ids"
        )

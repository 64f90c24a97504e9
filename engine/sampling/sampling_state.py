"""What the sampler remembers of one request."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from copy import copy, deepcopy
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, inf

from engine.interface.placed_error import PlacedError
from engine.interface.sampling_params import SamplingParams

__all__ = ["BadWords", "LogitsProcessor", "SamplingState"]

_SPARE = 64


class TokenCounts:
    """Sparse counts: one entry per distinct token of the prompt and the output."""

    def __init__(self, prompt_token_ids: Iterable[int]) -> None:
        distinct = np.array(sorted(set(prompt_token_ids)), dtype=np.int64)
        self._slots = {int(token_id): slot for slot, token_id in enumerate(distinct)}
        self._ids = np.concatenate([distinct, np.zeros(_SPARE, dtype=np.int64)])
        self._generated = np.zeros(len(self._ids), dtype=np.float32)

    def see(self, token_ids: Iterable[int]) -> None:
        """Take note of more tokens of the prompt."""
        for token_id in token_ids:
            if token_id not in self._slots:
                self._add(token_id)

    def append(self, token_id: int) -> None:
        """Count one generated token."""
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._add(token_id)
        self._generated[slot] += 1

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """``(num_distinct,)`` ids, each once."""
        return self._ids[: len(self._slots)]

    @property
    def generated(self) -> NDArray[np.float32]:
        """``(num_distinct,)``: how often each was generated; 0 for one of the prompt only."""
        return self._generated[: len(self._slots)]

    def _add(self, token_id: int) -> int:
        slot = len(self._slots)
        if slot == len(self._ids):
            # Doubled, so that appending stays cheap however long the output gets.
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._generated = np.concatenate([self._generated, np.zeros_like(self._generated)])
        self._ids[slot] = token_id
        self._slots[token_id] = slot
        return slot


_UNIFORM_BITS = 53  # what a float64 holds


class LogitsProcessor(Protocol):
    """A rule about what may follow what."""

    def apply(self, logits: Tensor, generated: Sequence[int]) -> None:
        """Mask in the logits ``(vocab,)`` what must not follow the generated ids."""


class Bias(NamedTuple):
    """What is added to some tokens' logits.

    Attributes:
        token_ids: ``(num_tokens,)``, each once.
        values: ``(num_tokens,)``.
    """

    token_ids: NDArray[np.int64]
    values: NDArray[np.float32]


class SamplingState:
    """What the sampler remembers of one request; it lives as long, across preemptions.

    Args:
        params: how tokens are chosen.
        prompt_token_ids: for the repetition penalty; empty for a prompt of embeddings.
        seed: of this request's draws, ``0 <= seed < 2**63``.
        eos_token_ids: kept out until ``min_tokens``, unless ``ignore_eos``.
        vocab_size: of the logits.
        logits_processor: what else the checkpoint's kind of model asks of its output, or None.
        begin_suppress_token_ids: not to be chosen as the first token, by the checkpoint's own
            rules; ids outside the vocabulary are ignored.

    Raises:
        ValueError: an id is outside the vocabulary, or nothing is left to choose from.

    Attributes:
        num_generated: tokens accepted so far.
        counts: of the tokens seen, or None when no penalty asks for them.
        bias: of single tokens, at every position; None when there is none.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        seed: int,
        eos_token_ids: Collection[int],
        vocab_size: int,
        *,
        logits_processor: LogitsProcessor | None = None,
        begin_suppress_token_ids: Collection[int] = (),
    ) -> None:
        _check_ids("suppress_token_ids", params.suppress_token_ids, vocab_size)
        _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
        _check_ids("logit_bias", params.logit_bias, vocab_size)
        self.params = params
        self.num_generated = 0
        self.counts: TokenCounts | None = None
        if (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        ):
            # Placeholders of other modalities may have ids beyond the head's.
            self.counts = TokenCounts(i for i in prompt_token_ids if i < vocab_size)
        self.bias = _bias(params)
        self._seed = seed
        begin = [i for i in begin_suppress_token_ids if i < vocab_size]
        self._masked, self._masked_early, self._masked_first = _masks(
            params, eos_token_ids, begin, vocab_size
        )
        self._plain = (
            params.is_greedy
            and self.counts is None
            and self.bias is None
            and params.logprobs is None
            and logits_processor is None
        )
        self.logits_processor = logits_processor
        self._generated: list[int] = []

    def with_seed(self, seed: int) -> SamplingState:
        """The same for another completion of the prompt, as long as nothing was generated.

        What is masked is worked out once for all completions.
        """
        other = copy(self)
        other._seed, other._generated = seed, []
        other.counts = deepcopy(self.counts)
        return other

    @property
    def seed(self) -> int:
        """Of the request's draws."""
        return self._seed

    def extend_prompt(self, token_ids: Sequence[int]) -> None:
        """Take note of tokens by which the prompt turned out to go on."""
        if self.counts is not None:
            self.counts.see(token_ids)

    def append(self, token_id: int) -> None:
        """Take note of an accepted token."""
        self.num_generated += 1
        if self.logits_processor is not None:
            self._generated.append(token_id)
        if self.counts is not None:
            self.counts.append(token_id)

    @property
    def masked_ids(self) -> NDArray[np.int64] | None:
        """Ids that must not be chosen at this position, each once; None when all may be."""
        if self.num_generated == 0:
            return self._masked_first
        if self.num_generated < self.params.min_tokens:
            return self._masked_early
        return self._masked

    @property
    def is_plain(self) -> bool:
        """Whether this position is the largest of the unchanged logits and no more."""
        return self._plain and self.masked_ids is None

    def apply_logits_processor(self, logits: Tensor) -> None:
        """Mask, in place, what the model's own rule forbids at this position; ``(vocab,)``."""
        if self.logits_processor is not None:
            self.logits_processor.apply(logits, self._generated)

    def next_uniform(self) -> float:
        """The number in ``(0, 1]`` that draws the next token; asking again gives it again."""
        return _uniform(self._seed, self.num_generated)


_Mask: TypeAlias = NDArray[np.int64] | None


def _masks(
    params: SamplingParams,
    eos_token_ids: Collection[int],
    begin_suppress_token_ids: Collection[int],
    vocab_size: int,
) -> tuple[_Mask, _Mask, _Mask]:
    """Ids to mask always, before ``min_tokens``, and at the first position."""
    always = set(params.suppress_token_ids)
    early = always | set(params.stop_token_ids)
    if not params.ignore_eos:
        # A tokenizer may know more ids than the model's head.
        early.update(i for i in eos_token_ids if i < vocab_size)
    first = (early if params.min_tokens else always) | set(begin_suppress_token_ids)
    if len(first) >= vocab_size:
        raise ValueError(
            f"all {vocab_size} ids of the vocabulary are suppressed or would end the text "
            "before min_tokens: no token is left to choose"
        )
    return _id_array(always), _id_array(early), _id_array(first)


def _id_array(ids: set[int]) -> _Mask:
    return np.array(sorted(ids), dtype=np.int64) if ids else None


def _bias(params: SamplingParams) -> Bias | None:
    if not params.logit_bias:
        return None
    ids, values = zip(*params.logit_bias.items(), strict=True)
    return Bias(np.array(ids, dtype=np.int64), np.array(values, dtype=np.float32))


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise PlacedError(
                (name,),
                f"{name} holds {token_id}, but the vocabulary has ids 0 to {vocab_size - 1}",
            )


def _uniform(seed: int, position: int) -> float:
    """The number that draws one token.

    There is no stream to keep: a request that was preempted and computed again, or that runs
    beside other requests, meets the same number at the same position. Neighbouring seeds and
    positions are as independent as BLAKE2b can make them.
    """
    message = seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    digest = hashlib.blake2b(message, digest_size=8).digest()
    return ((int.from_bytes(digest, "little") >> (64 - _UNIFORM_BITS)) + 1) * 2.0**-_UNIFORM_BITS


class BadWords:
    """Masks the last token of a bad word behind its others, as transformers' processor does.

    Args:
        words: token ids of each, as ``bad_words_ids`` of a generation config has them.
        eos_token_ids: words that are one of these alone are allowed.

    Attributes:
        single_ids: words of one token, which are masked wherever they stand.
        longest: tokens before the last of a word, at most.
    """

    def __init__(self, words: Collection[Sequence[int]], eos_token_ids: Collection[int]) -> None:
        single = [word[0] for word in words if len(word) == 1]
        self.single_ids = tuple(each for each in single if each not in eos_token_ids)
        self._ends: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for word in words:
            if len(word) > 1:
                self._ends[tuple(word[:-1])].append(word[-1])
        self._lengths = sorted({len(begin) for begin in self._ends})
        self.longest = max(self._lengths, default=0)

    def behind(
        self, prompt_token_ids: Sequence[int], rule: LogitsProcessor | None
    ) -> LogitsProcessor | None:
        """A processor for a request, which applies another rule as well; None if neither is."""
        if not self._lengths:
            return rule
        return _Behind(self, tuple(prompt_token_ids[-self.longest :]), rule)

    def mask(self, logits: Tensor, token_ids: tuple[int, ...]) -> None:
        """Mask in the logits ``(vocab,)`` what would end a word that the ids have begun."""
        for length in self._lengths:
            ends = self._ends.get(token_ids[-length:], ())
            logits[[each for each in ends if 0 <= each < len(logits)]] = -inf


class _Behind:
    def __init__(
        self, words: BadWords, prompt: tuple[int, ...], rule: LogitsProcessor | None
    ) -> None:
        self._words, self._prompt, self._rule = words, prompt, rule

    def apply(self, logits: Tensor, generated: Sequence[int]) -> None:
        """See ``LogitsProcessor``."""
        if self._rule is not None:
            self._rule.apply(logits, generated)
        self._words.mask(logits, (*self._prompt, *generated[-self._words.longest :]))

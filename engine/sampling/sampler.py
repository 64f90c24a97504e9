"""Chooses the next token of every request of a batch.

Changes to single logits of a batch: biases, masks and penalties, without a loop over tokens.

Every row brings a short list of ids. All rows' lists are joined into one list of places in the
flat ``(n * vocab,)`` view, so that a whole batch is one gather and one scatter::

    row 0: ids 7, 9    row 2: ids 0, 7, 8        vocab = 10
    places = [7, 9,            20, 27, 28]

From logits to a drawn token: temperature, the filters, and the draw itself.

Everything is float64 and row by row, so that a row's token does not depend on what else is in
the batch: the last bits in which kernels may differ between batch sizes are then far too small
to move a draw. The filters work with thresholds, not with ranks: equal logits stay or go
together, and no result depends on the order in which a sort leaves ties."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, inf

from engine.interface.outputs import TokenLogprobs
from engine.interface.placed_error import PlacedError
from engine.interface.sampling_params import SamplingParams
from engine.resources.device import upload
from engine.sampling.token_grammar import TokenGrammar, apply_grammars

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


class SamplingState:
    """What the sampler remembers of one request; it lives as long, across preemptions.

    Args:
        prompt_token_ids: for the repetition penalty; empty for a prompt of embeddings.
        seed: of this request's draws, ``0 <= seed < 2**63``.
        eos_token_ids: kept out until ``min_tokens``, unless ``ignore_eos``.
        logits_processor: what else the checkpoint's kind of model asks of its output, or None.
        begin_suppress_token_ids: not to be chosen as the first token, by the checkpoint's own
            rules; ids outside the vocabulary are ignored.
        grammar: of ``params.structured_output``, at its beginning; or None.
        judged_id: a token whose probability is reported, with how likely what is chosen is among
            what could be; None if it is not asked for.

    Raises:
        ValueError: an id is outside the vocabulary, or nothing is left to choose from.

    Attributes:
        counts: of the tokens seen, or None when no penalty asks for them.
        grammar: at the place that the output has come to; None where the output is free.
        bias: ids, each once, and what is added to their logits; None when there is none.
        generated: the accepted ids; none are kept without a ``logits_processor``.
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
        grammar: TokenGrammar | None = None,
        judged_id: int | None = None,
    ) -> None:
        _check_ids(params, vocab_size)
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
        self.bias: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None
        if params.logit_bias:
            ids, values = zip(*params.logit_bias.items(), strict=True)
            self.bias = np.array(ids, dtype=np.int64), np.array(values, dtype=np.float32)
        self.seed = seed
        begin = [i for i in begin_suppress_token_ids if i < vocab_size]
        self._masked, self._masked_early, self._masked_first = _masks(
            params, eos_token_ids, begin, vocab_size
        )
        self.logits_processor = logits_processor
        self.grammar = grammar
        self.judged_id = judged_id
        self.generated: list[int] = []

    def with_seed(self, seed: int) -> SamplingState:
        """The same for another completion of the prompt, as long as nothing was generated.

        What is masked is worked out once for all completions.
        """
        other = copy(self)
        other.seed, other.generated = seed, []
        other.counts = deepcopy(self.counts)
        other.grammar = self.grammar.copy() if self.grammar is not None else None
        return other

    def extend_prompt(self, token_ids: Sequence[int]) -> None:
        """Take note of tokens by which the prompt turned out to go on."""
        if self.counts is not None:
            self.counts.see(token_ids)

    def append(self, token_id: int) -> None:
        """Take note of an accepted token."""
        self.num_generated += 1
        if self.logits_processor is not None:
            self.generated.append(token_id)
        if self.grammar is not None:
            self.grammar.accept(token_id)
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
    def changes_logits(self) -> bool:
        """Whether anything is to be added to, or masked in, the logits of this position."""
        return (
            self.bias is not None
            or self.counts is not None
            or self.logits_processor is not None
            or self.grammar is not None
            or self.masked_ids is not None
        )

    def next_uniform(self, codebook: int = 0) -> float:
        """The number in ``(0, 1]`` that draws the next token; asking again gives it again.

        Of several codebooks each has numbers of its own, the first those of other models' tokens.

        There is no stream to keep: a request that was preempted and computed again, or that runs
        beside other requests, meets the same number at the same position. Neighbouring seeds and
        positions are as independent as BLAKE2b can make them.
        """
        message = self.seed.to_bytes(8, "little") + self.num_generated.to_bytes(8, "little")
        if codebook:
            message += codebook.to_bytes(8, "little")
        digest = hashlib.blake2b(message, digest_size=8).digest()
        number = int.from_bytes(digest, "little") >> (64 - _UNIFORM_BITS)
        return (number + 1) * 2.0**-_UNIFORM_BITS


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
        early.update([i for i in eos_token_ids if i < vocab_size])
    first = (early if params.min_tokens else always) | set(begin_suppress_token_ids)
    if len(first) >= vocab_size:
        raise ValueError(
            f"all {vocab_size} ids of the vocabulary are suppressed or would end the text "
            "before min_tokens: no token is left to choose"
        )
    return _id_array(always), _id_array(early), _id_array(first)


def _id_array(ids: set[int]) -> _Mask:
    return np.array(sorted(ids), dtype=np.int64) if ids else None


def _check_ids(params: SamplingParams, vocab_size: int) -> None:
    for name in ("suppress_token_ids", "stop_token_ids", "logit_bias"):
        for token_id in getattr(params, name):
            if not 0 <= token_id < vocab_size:
                raise PlacedError(
                    (name,),
                    f"{name} holds {token_id}, but the vocabulary has ids 0 to {vocab_size - 1}",
                )


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


class _Behind(NamedTuple):
    words: BadWords
    prompt: tuple[int, ...]
    rule: LogitsProcessor | None

    def apply(self, logits: Tensor, generated: Sequence[int]) -> None:
        """See ``LogitsProcessor``."""
        if self.rule is not None:
            self.rule.apply(logits, generated)
        self.words.mask(logits, (*self.prompt, *generated[-self.words.longest :]))


def apply_biases(logits: Tensor, states: Sequence[SamplingState]) -> None:
    """Add what requests want to logits ``(n, vocab)``, float32 and contiguous, in place."""
    biased = [(row, state.bias) for row, state in enumerate(states) if state.bias is not None]
    if not biased:
        return
    places = _places([row for row, _ in biased], [ids for _, (ids, _) in biased], logits)
    values = np.concatenate([values for _, (_, values) in biased])
    there = upload({"places": places, "values": values}, logits.device)
    logits.view(-1)[there["places"]] += there["values"]


def apply_masks(logits: Tensor, states: Sequence[SamplingState]) -> None:
    """Set in logits ``(n, vocab)``, contiguous, what must not be chosen to minus infinity."""
    masked = [
        (row, ids) for row, state in enumerate(states) if (ids := state.masked_ids) is not None
    ]
    if masked:
        places = _places([row for row, _ in masked], [ids for _, ids in masked], logits)
        there = upload({"places": places}, logits.device)
        logits.view(-1).index_fill_(0, there["places"], -torch.inf)


def apply_penalties(logits: Tensor, states: Sequence[SamplingState]) -> None:
    """Apply repetition, then frequency and presence penalties, in place.

    The first looks at prompt and output (CTRL, Keskar et al. 2019), the others at the output only.

    Args:
        logits: ``(n, vocab)`` float32, contiguous.
    """
    penalised = [
        (row, state.params, state.counts)
        for row, state in enumerate(states)
        if state.counts is not None
    ]
    if not penalised:
        return
    ids = [counts.token_ids for _, _, counts in penalised]
    joined = _places([row for row, _, _ in penalised], ids, logits)
    lengths = [len(row_ids) for row_ids in ids]

    def per_token(values: list[float]) -> NDArray[np.float32]:
        return np.repeat(np.array(values, dtype=np.float32), lengths)

    places, repetition, frequency, presence, generated = upload(
        {
            "places": joined,
            "repetition": per_token([params.repetition_penalty for _, params, _ in penalised]),
            "frequency": per_token([params.frequency_penalty for _, params, _ in penalised]),
            "presence": per_token([params.presence_penalty for _, params, _ in penalised]),
            "generated": np.concatenate([counts.generated for _, _, counts in penalised]),
        },
        logits.device,
    ).values()
    values = logits.view(-1)[places]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * generated + presence * (generated > 0)
    logits.view(-1)[places] = values


def _places(rows: list[int], ids: list[NDArray[np.int64]], logits: Tensor) -> NDArray[np.int64]:
    vocab_size = logits.shape[1]
    return np.concatenate(
        [row * vocab_size + row_ids for row, row_ids in zip(rows, ids, strict=True)]
    )


# Top-p nearly always keeps fewer tokens than this; a full sort costs some ten times more.
_FIRST_LOOK = 1024


def shape_distribution(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Apply temperature, min-p, top-k and top-p, in this order.

    Args:
        logits: ``(n, vocab)`` floating point; each row's largest is finite. Left as it is.
        params: one per row, none of them greedy.

    Returns:
        ``(n, vocab)`` float64 logits; what is not to be drawn is minus infinity.
    """
    looked = _FIRST_LOOK
    while True:
        shaped, is_enough = _shape(logits, params, looked)
        if is_enough is None or bool(is_enough.all()):
            return shaped
        looked = logits.shape[1]


def _shape(
    logits: Tensor, params: Sequence[SamplingParams], looked: int
) -> tuple[Tensor, Tensor | None]:
    """See :func:`shape_distribution`, and :func:`keep_top_p` for what comes beside it."""
    asked = np.array([(p.temperature, p.min_p, p.top_k, p.top_p) for p in params])
    there = upload({"asked": asked, "top_k": asked[:, 2].astype(np.int64)}, logits.device)
    temperature, min_p, _, top_p = there["asked"].split(1, dim=1)
    shaped = logits.double()
    # The largest becomes 0 first: a tiny temperature then overflows to minus infinity only.
    shaped = shaped - shaped.amax(dim=-1, keepdim=True)
    shaped /= temperature
    if asked[:, 1].any():
        # Those at least so many times as likely as the likeliest.
        shaped = shaped.masked_fill(shaped < min_p.log(), -torch.inf)
    most = int(asked[:, 2].max())
    if most:
        shaped = keep_top_k(shaped, there["top_k"][:, None], most)
    if asked[:, 3].min() < 1.0:
        return keep_top_p(shaped, top_p, looked)
    return shaped, None


def keep_top_k(logits: Tensor, top_k: Tensor, most: int) -> Tensor:
    """Keep each row's ``top_k`` largest, at most ``most``, and what equals the smallest of these.

    Rows of 0 keep all.
    """
    most = min(most, logits.shape[1])
    largest = logits.topk(most, dim=-1).values
    threshold = largest.gather(1, (top_k - 1).clamp(0, most - 1))
    return logits.masked_fill((logits < threshold) & (top_k > 0), -torch.inf)


def keep_top_p(logits: Tensor, top_p: Tensor, looked: int) -> tuple[Tensor, Tensor]:
    """Keep the likeliest tokens until their probability reaches ``top_p`` (nucleus sampling).

    The token that crosses the border is kept, and so is what equals it. Returns the
    logits, and per row whether that was enough: else keep more than these.
    """
    vocab_size = logits.shape[1]
    wanted = top_p * logits.exp().cumsum(dim=-1)[:, -1:]
    limited = top_p < 1.0
    size = min(looked, vocab_size)
    largest = logits.topk(size, dim=-1).values
    reached = largest.exp().cumsum(dim=-1)
    is_enough = (reached[:, -1:] >= wanted) | ~limited
    if size == vocab_size:
        is_enough = torch.ones_like(is_enough)
    last_kept = (reached < wanted).sum(dim=-1, keepdim=True).clamp(max=size - 1)
    threshold = largest.gather(1, last_kept)
    return logits.masked_fill((logits < threshold) & limited, -torch.inf), is_enough


def draw(logits: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Draw one token per row by inverting the cumulative distribution, in order of ids."""
    reached = logits.exp().cumsum(dim=-1)
    share = upload({"share": np.array(uniforms)}, logits.device)["share"][:, None]
    return torch.searchsorted(reached, share * reached[:, -1:]).squeeze(-1)


@dataclass(frozen=True, slots=True)
class FurtherDraws:
    """Draws what comes beside tokens that were just chosen, by the chances of their requests.

    Attributes:
        states: of the requests, one for each row.
        params: by which codes are drawn where tokens are drawn.
    """

    states: Sequence[SamplingState]
    params: SamplingParams

    def code(self, logits: Tensor, codebook: int) -> Tensor:
        """Choose one code of a further codebook per row: the largest where tokens are greedy.

        Args:
            logits: ``(n, codes)``, left as they are.
            codebook: 1 or more.

        Returns:
            ``(n,)`` int64 on the device of the logits.
        """
        codes = logits.argmax(dim=-1)
        random = [row for row, state in enumerate(self.states) if state.params.temperature]
        if random:
            rows = _Rows.of(random, logits)
            shaped = shape_distribution(rows.select(logits), [self.params] * len(random))
            drawn = draw(shaped, [self.states[row].next_uniform(codebook) for row in random])
            codes = rows.replace(codes, drawn.clamp(max=logits.shape[1] - 1))
        return codes

    def normal(self, width: int) -> Tensor:
        """Normal numbers ``(n, width)``, float32 on the CPU, whose variance is the temperature."""
        drawn = torch.zeros(len(self.states), width)
        for row, state in enumerate(self.states):
            if state.params.temperature:
                uniform = [state.next_uniform(place) for place in range(1, width + 1)]
                # Of the numbers in (0, 1] the last one would be infinite.
                shares = torch.tensor(uniform, dtype=torch.float64)
                shares.clamp_(max=1 - 2.0**-_UNIFORM_BITS)
                drawn[row] = torch.special.ndtri(shares) * state.params.temperature**0.5
        return drawn


class Judgement(NamedTuple):
    """How likely the chosen token was among what could be, and ``judged_id`` to the model."""

    score: float  # a log-probability, at temperature 1
    probability: float


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """What was chosen, one entry per row.

    Attributes:
        logprobs: None where not asked for, or where the row failed.
        errors: why no token could be chosen; None where one was.
        judgements: None where not asked for, or where the row failed.
    """

    token_ids: list[int | None]
    logprobs: list[TokenLogprobs | None]
    errors: list[str | None]
    judgements: Sequence[Judgement | None] = ()


class Sampler:
    """Chooses the next token of every request of a batch.

    A row's result depends on its own logits and state only, not on its place or its neighbours. In
    order: the bias of single tokens; suppressed ids and ``min_tokens``; the model's own rule; the
    grammar of a structured output; the penalties; then for greedy requests the largest, for others
    temperature, min-p, top-k, top-p and the draw.

    The bias comes first, as in transformers: what looks at logits, as the model's own rule and the
    repetition penalty do, sees biased ones. No bias brings back what is masked.
    """

    @torch.inference_mode()
    def sample(self, logits: Tensor, states: Sequence[SamplingState]) -> SamplerOutput:
        """Choose one token per row; the states are left as they are.

        Args:
            logits: ``(n, vocab)`` floating point, left as they are.
            states: one per row; :meth:`SamplingState.append` is for the caller to call.

        Raises:
            ValueError: the number of states is not the number of rows.
        """
        if logits.ndim != 2 or logits.shape[0] != len(states):
            raise ValueError(
                f"one row of logits per request is needed: got {tuple(logits.shape)} "
                f"for {len(states)} requests"
            )
        adjusted = logits
        if any([state.changes_logits for state in states]):
            # A copy: log-probabilities are of the model's own distribution.
            adjusted = logits.to(torch.float32, copy=True).contiguous()
            apply_biases(adjusted, states)
            apply_masks(adjusted, states)
            for row, state in enumerate(states):
                if state.logits_processor is not None:
                    state.logits_processor.apply(adjusted[row], state.generated)
            apply_grammars(adjusted, [state.grammar for state in states])
            apply_penalties(adjusted, states)
        return _choose(logits, adjusted, states, _FIRST_LOOK)


def _judgements(
    logits: Tensor, adjusted: Tensor, states: Sequence[SamplingState], token_ids: Sequence[int]
) -> list[Judgement | None]:
    """How likely each row's token is, where that is asked for."""
    found: list[Judgement | None] = [None] * len(states)
    for row, state in enumerate(states):
        if state.judged_id is None:
            continue
        drawn_from, temperature = adjusted[row : row + 1], state.params.temperature
        if temperature:
            shaped, _ = _shape(drawn_from, [state.params], logits.shape[1])
            drawn_from = shaped * temperature
        score = torch.log_softmax(drawn_from.float(), dim=-1)[0, token_ids[row]]
        asked = logits[row].float().softmax(dim=-1)[state.judged_id]
        found[row] = Judgement(*torch.stack([score, asked]).tolist())
    return found


def _choose(
    logits: Tensor, adjusted: Tensor, states: Sequence[SamplingState], looked: int
) -> SamplerOutput:
    """Queue all of it, and wait for it once; again if top-p turns out to need all tokens.

    Args:
        logits: of the model, for log-probabilities.
        adjusted: what is chosen from.
        looked: see :func:`keep_top_p`.
    """
    random = [row for row, each in enumerate(states) if each.params.temperature]
    reported = [row for row, each in enumerate(states) if each.params.logprobs is not None]
    largest, chosen = adjusted.max(dim=-1)
    is_enough: Tensor | None = None
    if random:
        rows = _Rows.of(random, adjusted)
        asked = [states[row].params for row in random]
        shaped, is_enough = _shape(rows.select(adjusted), asked, looked)
        drawn = draw(shaped, [states[row].next_uniform() for row in random])
        # Of a row that is not finite, which fails, nothing can be drawn.
        chosen = rows.replace(chosen, drawn.clamp(max=adjusted.shape[1] - 1))
    # Numbers of 64 bits hold ids and float32 alike: all parts become what the first is.
    parts = [chosen.double(), largest]
    parts += [] if is_enough is None else [is_enough.squeeze(1)]
    num_top = 0
    if reported:
        rows = _Rows.of(reported, logits)
        of_all = torch.log_softmax(rows.select(logits).float(), dim=-1)
        num_top = min(max(states[row].params.logprobs or 0 for row in reported), logits.shape[1])
        top = of_all.topk(num_top, dim=-1)
        of_chosen = of_all.gather(1, rows.select(chosen)[:, None])
        parts += [of_chosen.flatten(), top.indices.flatten(), top.values.flatten()]
    read = iter(torch.cat(parts).tolist())
    sizes = [len(states)] * 2 + [0 if is_enough is None else len(random)]
    sizes += [len(reported), len(reported) * num_top, len(reported) * num_top]
    ids, best, enough, values, top_ids, top_values = (list(islice(read, size)) for size in sizes)
    if not all(enough):
        return _choose(logits, adjusted, states, logits.shape[1])
    token_ids = [int(each) for each in ids]
    # The largest of a row is NaN as soon as one of it is.
    errors = [
        None if math.isfinite(value) else _row_error(row, value, states[row].grammar)
        for row, value in enumerate(best)
    ]
    logprobs: list[TokenLogprobs | None] = [None] * len(states)
    for index, row in enumerate(reported):
        begin = index * num_top
        shown = slice(begin, begin + min(states[row].params.logprobs or 0, num_top))
        if errors[row] is None:
            likeliest = zip(map(int, top_ids[shown]), top_values[shown], strict=True)
            logprobs[row] = TokenLogprobs(token_ids[row], values[index], tuple(likeliest))
    chosen_ids = [
        token_id if error is None else None
        for token_id, error in zip(token_ids, errors, strict=True)
    ]
    judgements = _judgements(logits, adjusted, states, token_ids)
    return SamplerOutput(chosen_ids, logprobs, errors, judgements)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of a batch, on its device; all of them where there is no index."""

    index: Tensor | None

    @classmethod
    def of(cls, rows: list[int], batch: Tensor) -> _Rows:
        if len(rows) == len(batch):
            return cls(None)
        return cls(upload({"rows": np.array(rows)}, batch.device)["rows"])

    def select(self, batch: Tensor) -> Tensor:
        return batch if self.index is None else batch.index_select(0, self.index)

    def replace(self, batch: Tensor, rows: Tensor) -> Tensor:
        return rows if self.index is None else batch.index_copy(0, self.index, rows)


def _row_error(row: int, largest: float, grammar: TokenGrammar | None) -> str:
    """Why a row cannot be used; a maximum is NaN as soon as one value is."""
    if grammar is not None and grammar.problem:
        return f"the structured output cannot go on: {grammar.problem}"
    if math.isnan(largest):
        problem = "they hold NaN"
    elif largest > 0:
        problem = "they hold infinity"
    else:
        problem = "every token that may be chosen has probability 0"
    return f"no token can be chosen from the logits of row {row} of the batch: {problem}"

"""Samples the next token of every request of a batch.

Biases, masks and penalties change single logits without a loop over tokens. Every row has a short
list of ids. All lists are joined into one list of indices in the flat ``(n * vocab,)`` view, so
that a whole batch is one gather and one scatter::

    row 0: ids 7, 9    row 2: ids 0, 7, 8        vocab = 10
    indices = [7, 9,           20, 27, 28]

Temperature, filters and the draw run in float64 and row by row, so that a row's token does not
depend on the rest of the batch: kernels may differ between batch sizes in the last bits, which are
then far too small to change a draw. The filters use thresholds, not ranks: equal logits are kept or
removed together, and no result depends on the order in which a sort leaves ties.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, inf

from engine.interface.outputs import TokenLogprobs
from engine.interface.placed_error import PlacedError
from engine.interface.sampling_params import SamplingParams
from engine.native import NativeKernels
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
        """Record more prompt tokens."""
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
        """Distinct ids, ``(num_distinct,)``."""
        return self._ids[: len(self._slots)]

    @property
    def generated(self) -> NDArray[np.float32]:
        """Generation count of each id, ``(num_distinct,)``; 0 if it occurs only in the prompt."""
        return self._generated[: len(self._slots)]

    def _add(self, token_id: int) -> int:
        slot = len(self._slots)
        if slot == len(self._ids):
            # Doubling keeps appending cheap for any length of the output.
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._generated = np.concatenate([self._generated, np.zeros_like(self._generated)])
        self._ids[slot] = token_id
        self._slots[token_id] = slot
        return slot


_UNIFORM_BITS = 53  # the significand of a float64


class LogitsProcessor(Protocol):
    """A rule about which tokens may follow the generated ones."""

    def apply(self, logits: Tensor, generated: Sequence[int]) -> None:
        """Mask the logits ``(vocab,)`` of tokens that must not follow the generated ids."""


class SamplingState:
    """The sampler's state of one request, kept for the request's lifetime, across preemptions.

    Args:
        prompt_token_ids: for the repetition penalty; empty for a prompt of embeddings.
        seed: seed of this request's draws, ``0 <= seed < 2**63``.
        eos_token_ids: masked until ``min_tokens``, unless ``ignore_eos``.
        logits_processor: the model's own rule for its output, or None.
        begin_suppress_token_ids: ids that the checkpoint forbids as the first token; ids outside
            the vocabulary are ignored.
        grammar: grammar of ``params.structured_output``, at its beginning; or None.
        judged_id: a token whose probability is reported with each choice, next to the choice's
            own log-probability among the allowed tokens; None if not requested.

    Raises:
        ValueError: an id is outside the vocabulary, or nothing is left to choose from.

    Attributes:
        counts: counts of the tokens seen; None if no penalty needs them.
        grammar: grammar at the current position of the output; None for free output.
        bias: distinct ids, and the values added to their logits; None without a bias.
        generated: the accepted ids; stays empty without a ``logits_processor``.
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
        self._masked, self._masked_early, self._masked_first = _build_masks(
            params, eos_token_ids, begin, vocab_size
        )
        self.logits_processor = logits_processor
        self.grammar = grammar
        self.judged_id = judged_id
        self.generated: list[int] = []

    def with_seed(self, seed: int) -> SamplingState:
        """Copy the state for another completion of the prompt, before any token is generated.

        The masks are computed once for all completions.
        """
        other = copy(self)
        other.seed, other.generated = seed, []
        other.counts = deepcopy(self.counts)
        other.grammar = self.grammar.copy() if self.grammar is not None else None
        return other

    def extend_prompt(self, token_ids: Sequence[int]) -> None:
        """Record tokens that extend the prompt."""
        if self.counts is not None:
            self.counts.see(token_ids)

    def append(self, token_id: int) -> None:
        """Record an accepted token."""
        self.num_generated += 1
        if self.logits_processor is not None:
            self.generated.append(token_id)
        if self.grammar is not None:
            self.grammar.accept(token_id)
        if self.counts is not None:
            self.counts.append(token_id)

    @property
    def masked_ids(self) -> NDArray[np.int64] | None:
        """Distinct ids that must not be chosen at this position; None if all are allowed."""
        if self.num_generated == 0:
            return self._masked_first
        if self.num_generated < self.params.min_tokens:
            return self._masked_early
        return self._masked

    @property
    def changes_logits(self) -> bool:
        """True if the logits of this position are to be biased, penalised or masked."""
        return (
            self.bias is not None
            or self.counts is not None
            or self.logits_processor is not None
            or self.grammar is not None
            or self.masked_ids is not None
        )

    def next_uniform(self, codebook: int = 0) -> float:
        """Return the number in ``(0, 1]`` that draws the next token; idempotent.

        Each of several codebooks has separate numbers; the first has those of other models' tokens.

        There is no stream to keep: a request that was preempted and recomputed, or that runs next
        to other requests, gets the same number at the same position. Neighbouring seeds and
        positions are as independent as BLAKE2b makes them.
        """
        message = self.seed.to_bytes(8, "little") + self.num_generated.to_bytes(8, "little")
        if codebook:
            message += codebook.to_bytes(8, "little")
        digest = hashlib.blake2b(message, digest_size=8).digest()
        number = int.from_bytes(digest, "little") >> (64 - _UNIFORM_BITS)
        return (number + 1) * 2.0**-_UNIFORM_BITS


_Mask: TypeAlias = NDArray[np.int64] | None


def _build_masks(
    params: SamplingParams,
    eos_token_ids: Collection[int],
    begin_suppress_token_ids: Collection[int],
    vocab_size: int,
) -> tuple[_Mask, _Mask, _Mask]:
    """Return the ids to mask always, before ``min_tokens``, and at the first position."""
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
    """Masks the last token of a bad word after its other tokens, as transformers' processor does.

    Args:
        words: token ids of each word, as in ``bad_words_ids`` of a generation config.
        eos_token_ids: words that consist of one of these alone are allowed.

    Attributes:
        single_ids: words of one token, which are masked at every position.
        longest: maximum number of tokens before the last token of a word.
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
        """Return a request's processor, which applies ``rule`` as well; None without any rule."""
        if not self._lengths:
            return rule
        return _BadWordRule(self, tuple(prompt_token_ids[-self.longest :]), rule)

    def mask(self, logits: Tensor, token_ids: tuple[int, ...]) -> None:
        """Mask the logits ``(vocab,)`` of tokens that would complete a word begun by the ids."""
        for length in self._lengths:
            ends = self._ends.get(token_ids[-length:], ())
            logits[[each for each in ends if 0 <= each < len(logits)]] = -inf


class _BadWordRule(NamedTuple):
    words: BadWords
    prompt: tuple[int, ...]
    rule: LogitsProcessor | None

    def apply(self, logits: Tensor, generated: Sequence[int]) -> None:
        """See ``LogitsProcessor``."""
        if self.rule is not None:
            self.rule.apply(logits, generated)
        self.words.mask(logits, (*self.prompt, *generated[-self.words.longest :]))


def apply_biases(logits: Tensor, states: Sequence[SamplingState]) -> None:
    """Add the requests' biases to logits ``(n, vocab)``, float32 and contiguous, in place."""
    biased = [(row, state.bias) for row, state in enumerate(states) if state.bias is not None]
    if not biased:
        return
    indices = _flat_indices([(row, ids) for row, (ids, _) in biased], logits)
    values = np.concatenate([values for _, (_, values) in biased])
    uploaded = upload({"indices": indices, "values": values}, logits.device)
    logits.view(-1)[uploaded["indices"]] += uploaded["values"]


def apply_masks(logits: Tensor, states: Sequence[SamplingState]) -> None:
    """Set masked ids to minus infinity in logits ``(n, vocab)``, contiguous, in place."""
    masked = [
        (row, ids) for row, state in enumerate(states) if (ids := state.masked_ids) is not None
    ]
    if masked:
        uploaded = upload({"indices": _flat_indices(masked, logits)}, logits.device)
        logits.view(-1).index_fill_(0, uploaded["indices"], -torch.inf)


def apply_penalties(logits: Tensor, states: Sequence[SamplingState]) -> None:
    """Apply repetition, then frequency and presence penalties, in place.

    The first counts prompt and output (CTRL, Keskar et al. 2019), the others the output only.

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
    ids = [(row, counts.token_ids) for row, _, counts in penalised]
    lengths = [len(row_ids) for _, row_ids in ids]

    def per_token(values: list[float]) -> NDArray[np.float32]:
        return np.repeat(np.array(values, dtype=np.float32), lengths)

    indices, repetition, frequency, presence, generated = upload(
        {
            "indices": _flat_indices(ids, logits),
            "repetition": per_token([params.repetition_penalty for _, params, _ in penalised]),
            "frequency": per_token([params.frequency_penalty for _, params, _ in penalised]),
            "presence": per_token([params.presence_penalty for _, params, _ in penalised]),
            "generated": np.concatenate([counts.generated for _, _, counts in penalised]),
        },
        logits.device,
    ).values()
    values = logits.view(-1)[indices]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * generated + presence * (generated > 0)
    logits.view(-1)[indices] = values


def _flat_indices(ids: list[tuple[int, NDArray[np.int64]]], logits: Tensor) -> NDArray[np.int64]:
    return np.concatenate([row * logits.shape[1] + row_ids for row, row_ids in ids])


# Top-p nearly always keeps fewer tokens than this; a full sort costs some ten times more.
_TOP_P_SIZE = 1024


def shape_distribution(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Apply temperature, min-p, top-k and top-p, in this order.

    Args:
        logits: ``(n, vocab)`` floating point; each row's maximum is finite. Not modified.
        params: one per row, none of them greedy.

    Returns:
        ``(n, vocab)`` float64 logits; minus infinity for tokens that must not be drawn.
    """
    shaped, is_enough = _shape(logits, params, _TOP_P_SIZE)
    if is_enough is None or bool(is_enough.all()):
        return shaped
    return _shape(logits, params, logits.shape[1])[0]


def _shape(
    logits: Tensor, params: Sequence[SamplingParams], num_largest: int
) -> tuple[Tensor, Tensor | None]:
    """See :func:`shape_distribution`, and :func:`keep_top_p` for the second result."""
    asked = np.array([(p.temperature, p.min_p, p.top_k, p.top_p) for p in params])
    uploaded = upload({"asked": asked, "top_k": asked[:, 2].astype(np.int64)}, logits.device)
    temperature, min_p, _, top_p = uploaded["asked"].split(1, dim=1)
    shaped = logits.double()
    # The largest becomes 0 first: a tiny temperature then overflows to minus infinity only.
    shaped = shaped - shaped.amax(dim=-1, keepdim=True)
    shaped /= temperature
    if asked[:, 1].any():
        # Keeps tokens at least min_p times as likely as the likeliest.
        shaped = shaped.masked_fill(shaped < min_p.log(), -torch.inf)
    max_k = int(asked[:, 2].max())
    if max_k > 0:
        shaped = keep_top_k(shaped, uploaded["top_k"][:, None], max_k)
    if asked[:, 3].min() < 1.0:
        return keep_top_p(shaped, top_p, num_largest)
    return shaped, None


def keep_top_k(logits: Tensor, top_k: Tensor, max_k: int) -> Tensor:
    """Keep each row's ``top_k`` largest, at most ``max_k``, and ties with the smallest of these.

    Rows with a ``top_k`` of 0 or -1 keep all.
    """
    max_k = min(max_k, logits.shape[1])
    largest = logits.topk(max_k, dim=-1).values
    threshold = largest.gather(1, (top_k - 1).clamp(0, max_k - 1))
    return logits.masked_fill((logits < threshold) & (top_k > 0), -torch.inf)


def keep_top_p(logits: Tensor, top_p: Tensor, num_largest: int) -> tuple[Tensor, Tensor]:
    """Keep the likeliest tokens until their probability reaches ``top_p`` (nucleus sampling).

    The token that crosses the border is kept, and so are its ties. Returns the logits, and per row
    whether the ``num_largest`` largest tokens were enough; if not, call again with more.
    """
    vocab_size = logits.shape[1]
    wanted = top_p * logits.exp().cumsum(dim=-1)[:, -1:]
    limited = top_p < 1.0
    size = min(num_largest, vocab_size)
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
    """Draws further codes and numbers for tokens just chosen, with their requests' seeds.

    Attributes:
        states: states of the requests, one per row.
        params: parameters for drawing codes in requests that are not greedy.
    """

    states: Sequence[SamplingState]
    params: SamplingParams

    def code(self, logits: Tensor, codebook: int) -> Tensor:
        """Choose one code of a further codebook per row; the largest for greedy requests.

        Args:
            logits: ``(n, codes)``, not modified.
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
        """Draw normal numbers ``(n, width)``, float32 on the CPU, of variance ``temperature``."""
        drawn = torch.zeros(len(self.states), width)
        for row, state in enumerate(self.states):
            if state.params.temperature:
                uniform = [state.next_uniform(place) for place in range(1, width + 1)]
                # A uniform number of 1 would become infinite.
                shares = torch.tensor(uniform, dtype=torch.float64)
                shares.clamp_(max=1 - 2.0**-_UNIFORM_BITS)
                drawn[row] = torch.special.ndtri(shares) * state.params.temperature**0.5
        return drawn


class Judgement(NamedTuple):
    """Likelihood of the chosen token and of ``judged_id``."""

    score: float  # log-probability of the chosen token among the allowed ones, at temperature 1
    probability: float  # of ``judged_id``, by the model's own logits


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The chosen tokens, one entry per row.

    Attributes:
        logprobs: None if not requested, or if the row failed.
        errors: why no token could be chosen; None for a row with a token.
        judgements: None if not requested, or if the row failed.
    """

    token_ids: list[int | None]
    logprobs: list[TokenLogprobs | None]
    errors: list[str | None]
    judgements: Sequence[Judgement | None] = ()


class Sampler:
    """Samples the next token of every request of a batch.

    A row's result depends only on its own logits and state, not on its position or neighbours. The
    order: the bias of single tokens; suppressed ids and ``min_tokens``; the model's own rule; the
    grammar of a structured output; the penalties; then for greedy requests the largest, for others
    temperature, min-p, top-k, top-p and the draw.

    The bias comes first, as in transformers: rules that read logits, such as the model's own rule
    and the repetition penalty, see biased ones. No bias unmasks a token.

    Args:
        kernels: for logits on a CPU; None: torch does their work.
    """

    def __init__(self, kernels: NativeKernels | None = None) -> None:
        self._kernels = kernels

    @torch.inference_mode()
    def sample(self, logits: Tensor, states: Sequence[SamplingState]) -> SamplerOutput:
        """Choose one token per row, without changing the states.

        Args:
            logits: ``(n, vocab)`` floating point, not modified.
            states: one per row; the caller calls :meth:`SamplingState.append`.

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
            # A copy: log-probabilities are reported from the model's own distribution.
            adjusted = logits.to(torch.float32, copy=True).contiguous()
            apply_biases(adjusted, states)
            apply_masks(adjusted, states)
            for row, state in enumerate(states):
                if state.logits_processor is not None:
                    state.logits_processor.apply(adjusted[row], state.generated)
            apply_grammars(adjusted, [state.grammar for state in states], self._kernels)
            apply_penalties(adjusted, states)
        return _choose(logits, adjusted, states, _TOP_P_SIZE)


def _judge(
    logits: Tensor, adjusted: Tensor, states: Sequence[SamplingState], token_ids: Sequence[int]
) -> list[Judgement | None]:
    """Judge each row's token if requested; else None."""
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
    logits: Tensor, adjusted: Tensor, states: Sequence[SamplingState], num_largest: int
) -> SamplerOutput:
    """Queue all device work and wait for it once; repeat if top-p turns out to need all tokens.

    Args:
        logits: the model's logits, for log-probabilities.
        adjusted: the logits to choose from.
        num_largest: see :func:`keep_top_p`.
    """
    random = [row for row, each in enumerate(states) if each.params.temperature]
    reported = [row for row, each in enumerate(states) if each.params.logprobs is not None]
    largest, chosen = adjusted.max(dim=-1)
    is_enough = of_chosen = top_values = largest[:0]
    top_ids, num_top = chosen[:0], 0
    if random:
        rows = _Rows.of(random, adjusted)
        asked = [states[row].params for row in random]
        shaped, enough_kept = _shape(rows.select(adjusted), asked, num_largest)
        is_enough = is_enough if enough_kept is None else enough_kept
        drawn = draw(shaped, [states[row].next_uniform() for row in random])
        # A row that is not finite fails below; its draw may lie beyond the vocabulary.
        chosen = rows.replace(chosen, drawn.clamp(max=adjusted.shape[1] - 1))
    if reported:
        rows = _Rows.of(reported, logits)
        of_all = torch.log_softmax(rows.select(logits).float(), dim=-1)
        num_top = min(max(states[row].params.logprobs or 0 for row in reported), logits.shape[1])
        top_values, top_ids = of_all.topk(num_top, dim=-1)
        of_chosen = of_all.gather(1, rows.select(chosen)[:, None])
    # Float64 holds ids and float32 exactly: cat promotes all parts to the first one's type.
    parts = [
        *(chosen.double(), largest, is_enough.flatten()),
        *(of_chosen.flatten(), top_ids.flatten(), top_values.flatten()),
    ]
    read = torch.cat(parts).cpu().split([len(part) for part in parts])
    ids, best, enough, values, top_ids, top_values = [part.tolist() for part in read]
    if not all(enough):
        return _choose(logits, adjusted, states, logits.shape[1])
    token_ids = list(map(int, ids))
    # The maximum of a row is NaN as soon as one of its values is.
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
    judgements = _judge(logits, adjusted, states, token_ids)
    return SamplerOutput(chosen_ids, logprobs, errors, judgements)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Selected rows of a batch, on its device; all rows if ``index`` is None."""

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
    """Return why no token can be chosen from a row with this maximum."""
    if grammar is not None and grammar.problem:
        return f"the structured output cannot go on: {grammar.problem}"
    if math.isnan(largest):
        problem = "they hold NaN"
    elif largest > 0:
        problem = "they hold infinity"
    else:
        problem = "every token that may be chosen has probability 0"
    return f"no token can be chosen from the logits of row {row} of the batch: {problem}"

"""Chooses the next token of every request of a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.interface.outputs import TokenLogprobs
from engine.sampling.penalties import apply_biases, apply_masks, apply_penalties
from engine.sampling.sampling_state import SamplingState
from engine.sampling.token_draw import draw, shape_distribution

__all__ = ["Sampler", "SamplerOutput", "SamplingState"]


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """What was chosen, one entry per row.

    Attributes:
        token_ids: None where the row failed.
        logprobs: None where not asked for, or where the row failed.
        errors: why no token could be chosen; None where one was.
    """

    token_ids: list[int | None]
    logprobs: list[TokenLogprobs | None]
    errors: list[str | None]


class Sampler:
    """Chooses the next token of every request of a batch.

    A row's result depends on its own logits and state only, not on its place or its neighbours. In
    order: the bias of single tokens; suppressed ids and ``min_tokens``; the model's own rule; the
    penalties; then for greedy requests the largest, for others temperature, min-p, top-k, top-p and
    the draw.

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
        plain = all(state.is_plain for state in states)
        if not plain:
            # A copy: log-probabilities are of the model's own distribution.
            adjusted = logits.to(torch.float32, copy=True).contiguous()
            apply_biases(adjusted, states)
            apply_masks(adjusted, states)
            for row, state in enumerate(states):
                if state.logits_processor is not None:
                    state.apply_logits_processor(adjusted[row])
            apply_penalties(adjusted, states)
        largest, greedy = adjusted.max(dim=-1)
        errors = [_row_error(row, value) for row, value in enumerate(largest.tolist())]
        token_ids: list[int | None] = [
            token_id if error is None else None
            for token_id, error in zip(greedy.tolist(), errors, strict=True)
        ]
        if plain:
            return SamplerOutput(token_ids, [None] * len(states), errors)
        self._draw_random_rows(adjusted, states, token_ids)
        return SamplerOutput(token_ids, _logprobs(logits, states, token_ids), errors)

    def _draw_random_rows(
        self, logits: Tensor, states: Sequence[SamplingState], token_ids: list[int | None]
    ) -> None:
        """Replace the greedy choice of rows with a temperature."""
        rows = [
            row
            for row, state in enumerate(states)
            if not state.params.is_greedy and token_ids[row] is not None
        ]
        if not rows:
            return
        shaped = shape_distribution(_select(logits, rows), [states[row].params for row in rows])
        drawn = draw(shaped, [states[row].next_uniform() for row in rows])
        for row, token_id in zip(rows, drawn.tolist(), strict=True):
            token_ids[row] = token_id


def _logprobs(
    logits: Tensor, states: Sequence[SamplingState], token_ids: Sequence[int | None]
) -> list[TokenLogprobs | None]:
    """Log-probabilities of the unmodified logits, for rows that ask for them."""
    result: list[TokenLogprobs | None] = [None] * len(states)
    asked = [
        (row, token_id, state.params.logprobs)
        for row, (state, token_id) in enumerate(zip(states, token_ids, strict=True))
        if token_id is not None and state.params.logprobs is not None
    ]
    if not asked:
        return result
    logprobs = torch.log_softmax(_select(logits, [row for row, _, _ in asked]).float(), dim=-1)
    chosen_ids = torch.tensor([token_id for _, token_id, _ in asked], device=logits.device)
    chosen = logprobs.gather(1, chosen_ids[:, None]).squeeze(1).tolist()
    most = min(max(count for _, _, count in asked), logprobs.shape[1])
    top = logprobs.topk(most, dim=-1)
    top_ids, top_values = top.indices.tolist(), top.values.tolist()
    for index, (row, token_id, count) in enumerate(asked):
        likeliest = zip(top_ids[index][:count], top_values[index][:count], strict=True)
        result[row] = TokenLogprobs(token_id, chosen[index], tuple(likeliest))
    return result


def _select(logits: Tensor, rows: list[int]) -> Tensor:
    if len(rows) == logits.shape[0]:
        return logits
    return logits.index_select(0, torch.tensor(rows, device=logits.device))


def _row_error(row: int, largest: float) -> str | None:
    """A maximum is NaN as soon as one value is, so it tells whether the row can be used."""
    if math.isfinite(largest):
        return None
    if math.isnan(largest):
        problem = "they hold NaN"
    elif largest > 0:
        problem = "they hold infinity"
    else:
        problem = "every token that may be chosen has probability 0"
    return f"no token can be chosen from the logits of row {row} of the batch: {problem}"

"""transformers' outputs for the same weights, one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

NEAR_TIE = 1e-4
"""Logits closer than this may swap order by rounding alone."""


@dataclass(frozen=True)
class GreedyAnswer:
    """One sequence's reference."""

    token_ids: list[int]
    margins: list[float]
    hidden_states: Tensor


class GreedyReference:
    """A checkpoint in transformers, run greedily without stopping at EOS."""

    def __init__(self, checkpoint: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    @torch.inference_mode()
    def from_ids(self, prompt_ids: Sequence[int], num_tokens: int, **options: Any) -> GreedyAnswer:
        """Run ``generate`` on token ids, with further options."""
        return self._answer(torch.tensor([list(prompt_ids)]), None, num_tokens, **options)

    @torch.inference_mode()
    def from_embeds(self, embeds: Tensor, num_tokens: int) -> GreedyAnswer:
        """Run ``generate`` on ``(tokens, hidden)`` embeddings."""
        return self._answer(None, embeds[None], num_tokens)

    def _answer(
        self, ids: Tensor | None, embeds: Tensor | None, num_tokens: int, **options: Any
    ) -> GreedyAnswer:
        inputs = {"input_ids": ids} if embeds is None else {"inputs_embeds": embeds}
        out = self.model.generate(
            **inputs,
            attention_mask=torch.ones((ids if embeds is None else embeds).shape[:2]),
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        )
        generated = out.sequences[:, -num_tokens:]
        table = self.model.get_input_embeddings()
        prompt = table(ids) if embeds is None else embeds
        full = torch.cat([prompt, table(generated[:, :-1])], dim=1)
        hidden = self.model(inputs_embeds=full, output_hidden_states=True).hidden_states[-1][0]
        tops = [scores[0].topk(2).values.tolist() for scores in out.scores]
        return GreedyAnswer(generated[0].tolist(), [a - b for a, b in tops], hidden)


def assert_greedy(answer: GreedyAnswer, token_ids: Sequence[int]) -> bool:
    """Fail unless the ids are the reference's, except after a near tie of its logits."""
    pairs = zip(answer.token_ids, token_ids, strict=True)
    for position, (expected, actual) in enumerate(pairs):
        if expected != actual:
            margin = answer.margins[position]
            assert margin < NEAR_TIE, (
                f"token {position} is {actual}, transformers says {expected} by {margin:.2e}"
            )
            return False
    return True


def assert_near(rows: Tensor, expected: Tensor, tolerance: float) -> None:
    """Fail unless rows differ by at most ``tolerance`` of their norm."""
    difference = float((rows - expected).norm() / expected.norm())
    assert difference <= tolerance, f"rows differ by {difference:.1e} of their norm"

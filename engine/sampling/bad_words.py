"""Sequences of tokens that a checkpoint never wants to see generated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from torch import Tensor, inf

from engine.sampling.sampling_state import LogitsProcessor

__all__ = ["BadWords"]


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

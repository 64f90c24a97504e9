"""Constrains a request's tokens to the form of its structured output.

llguidance advances a grammar by each generated token and then returns the allowed next tokens: one
bit per id of the vocabulary, unpacked here into a mask of the logits.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from copy import copy
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from engine.interface.placed_error import PlacedError
from engine.interface.structured_output import StructuredOutput
from engine.native import NativeKernels
from engine.resources.device import upload

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_CACHED_FORMS = 32
_NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")


class TokenGrammar:
    """One completion's position in a grammar."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: Collection[int]) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids

    @property
    def problem(self) -> str:
        """The reason why the grammar failed, such as its size; empty if it has not."""
        return self._matcher.get_error().partition("\n")[0]

    def copy(self) -> TokenGrammar:
        """Copy the position for another completion of the prompt."""
        return TokenGrammar(self._matcher.deep_copy(), self._eos_token_ids)

    def accept(self, token_id: int) -> None:
        """Advance by a token that was chosen among those of :meth:`mask`."""
        if token_id not in self._eos_token_ids:
            self._matcher.consume_token(token_id)

    def mask(self) -> bytes:
        """Return a bitmask of allowed next tokens, lowest id first; zeros if the grammar failed."""
        mask = self._matcher.compute_bitmask()
        return bytes(len(mask)) if self._matcher.is_error() else mask


class GrammarCompiler:
    """Compiles grammars over a checkpoint's tokens. Thread-safe.

    Args:
        tokenizer: None for a model without text output.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        eos_token_ids: Collection[int],
        vocab_size: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(each for each in eos_token_ids if each < vocab_size)
        self._vocab_size = vocab_size
        self._lock = Lock()
        self._tokens: LLTokenizer | None = None
        # Requests often repeat a form, such as the same tools, and each is checked before it runs.
        self._compile_form = lru_cache(_MAX_CACHED_FORMS)(self._compile_uncached)

    def compile(self, wanted: StructuredOutput | None) -> TokenGrammar | None:
        """Compile a grammar, positioned at its beginning; None if no form is requested.

        The first one takes about a second for a large vocabulary.

        Raises:
            ValueError: the checkpoint's tokenizer or model does not support it.
        """
        return None if wanted is None else self._compile_form(wanted.compiled_form()).copy()

    def _compile_uncached(self, form: str) -> TokenGrammar:
        from llguidance import LLMatcher, LLParserLimits  # imported only if a form is requested

        with self._lock:
            if self._tokens is None:
                self._tokens = self._read_tokens()
        # A tenth of the default: enough for forms of the maximum size; others fail within 30 ms.
        limits = LLParserLimits(initial_lexer_fuel=100_000)
        matcher = LLMatcher(self._tokens, form, log_level=0, limits=limits)
        grammar = TokenGrammar(matcher, self._eos_token_ids)
        # A grammar that matches nothing or is too large fails at the first tokens: try it here.
        first = grammar.copy()
        allowed = np.unpackbits(np.frombuffer(first.mask(), np.uint8), bitorder="little")
        others = np.setdiff1d(allowed.nonzero()[0], list(self._eos_token_ids))
        if len(others):
            first.accept(int(others[-1]))
            first.mask()
        if first.problem:
            raise _refusal(f"no text can be held to it: {first.problem}")
        return grammar

    def _read_tokens(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            raise _refusal("it needs a checkpoint with a tokenizer of the library tokenizers")
        if not self._eos_token_ids:
            raise _refusal("it needs a checkpoint with an end-of-sequence token")
        try:
            return LLTokenizer(
                _plain_tokenizer(self._tokenizer),
                n_vocab=max(self._vocab_size, len(self._tokenizer)),
                eos_token=sorted(self._eos_token_ids),
            )
        except ValueError as error:
            raise _refusal(f"the checkpoint's tokenizer cannot be read: {error}") from error


def _plain_tokenizer(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the tokenizer as JSON, without padding, truncation and Unicode normalization.

    llguidance tokenizes text that the grammar leaves no choice about. Normalized, that text would
    differ from the grammar's, and the next token would be an error.
    """
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    fields = json.loads(backend.to_str())
    normalizer = fields["normalizer"]
    if normalizer is not None and normalizer["type"] in _NORMAL_FORMS:
        fields["normalizer"] = None
    return json.dumps(fields)


def _refusal(reason: str) -> PlacedError:
    return PlacedError(("structured_output",), f"structured_output: {reason}")


def apply_grammars(
    logits: Tensor,
    grammars: Sequence[TokenGrammar | None],
    kernels: NativeKernels | None = None,
) -> None:
    """Set tokens that a grammar does not allow next to minus infinity, in place.

    Args:
        logits: ``(n, vocab)``.
        grammars: one per row; None for a free row.
        kernels: for float32 on a CPU; None: torch masks.
    """
    masks = {row: each.mask() for row, each in enumerate(grammars) if each is not None}
    if not masks:
        return
    # One operation from first to last: on a CPU, one torch call per row costs more than its work.
    first, last = min(masks), max(masks)
    free = b"\xff" * len(masks[first])
    rows = b"".join(masks.get(row, free) for row in range(first, last + 1))
    packed = np.frombuffer(rows, np.uint8).reshape(-1, len(free))
    held = logits[first : last + 1]
    if kernels is not None:
        kernels.mask_logits(held, packed)
        return
    allowed = np.unpackbits(packed, axis=1, count=logits.shape[1], bitorder="little")
    allowed_next = upload({"allowed": allowed.view(np.bool_)}, logits.device)["allowed"]
    torch.where(allowed_next, held, held.new_full((), -torch.inf), out=held)

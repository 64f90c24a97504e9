"""The regular expressions that a checkpoint's tokenizer brings, and which of them are no danger.

Texts are cut by them before they become tokens, and replaced. Their engine goes back and tries
again: what a pattern such as ``a*a*a*b`` takes for a text of a few hundred characters are minutes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

__all__ = ["doubtful_patterns", "patterns_of_decoder"]

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION_ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_PUBLISHED = frozenset(
    {
        # GPT-2, whole.
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        # cl100k and Llama 3, Qwen2, and Qwen3.5 with marks.
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+"
        rf"[\r\n]*|{_SPACES}",
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+"
        rf"[\r\n]*|{_SPACES}",
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| "
        rf"?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        # o200k.
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION_ENDS}|[^\r\n\p{{L}}\p{{N}}]?"
        rf"{_UPPER}+{_LOWER}*{_CONTRACTION_ENDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|"
        rf"{_SPACES}",
    }
)
# Runs of one character or class, of which one is chosen: what a run has matched, it need not look
# at again.
_LITERAL = r"[^\\\[\](){}*+?|.^$]|\\[^\W\d_pPkgKRXQE]|\\\W|\."
_CLASS = r"\\[pP]\{\^?\w+\}|\[(?:[^\[\]\\]|\\.)+\]"
_RUN = rf"(?:{_LITERAL}|{_CLASS})(?:[*+?]|\{{\d{{1,3}}(?:,\d{{0,3}})?\}})?"
_SIMPLE = re.compile(rf"{_RUN}(?:\|{_RUN})*", re.DOTALL)


def doubtful_patterns(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Patterns that are not known to take time that is linear in the text, in their order."""
    return tuple(
        pattern
        for part in ("normalizer", "pre_tokenizer")
        for pattern in _patterns(tokenizer, part)
        if pattern not in _PUBLISHED and not _SIMPLE.fullmatch(pattern)
    )


def patterns_of_decoder(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Patterns by which it makes text of tokens; published ones have none."""
    return tuple(_patterns(tokenizer, "decoder"))


def _patterns(tokenizer: PreTrainedTokenizerBase, part: str) -> Iterator[str]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    found = getattr(backend, part, None)
    # The library tells its parts as JSON by pickle's protocol; nothing is unpickled here.
    state = getattr(found, "__getstate__", lambda: None)()
    if isinstance(state, bytes):
        yield from _regexes(json.loads(state))


def _regexes(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "Regex" and isinstance(inner, str):
                yield inner
            else:
                yield from _regexes(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _regexes(inner)

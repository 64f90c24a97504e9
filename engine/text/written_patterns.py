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
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# In front of the last alternative, which takes the same spaces, each is linear as well.
_LAST = r"|\s+"
_SPACES = (r"\s*[\r\n]+", r"\s+(?!\S)")

_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?"
    rf"{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|"
    rf"{'|'.join(_SPACES)}{_LAST}"
)
# A character or a class of them, and how often.
_LITERAL = r"[^\\\[\](){}*+?|.^$]|\\[^\W\d_pPkgKRXQE]|\\\W|\."
_CLASS = r"\\[pP]\{\^?\w+\}|\[(?:[^\[\]\\]|\\.)+\]"
_PIECE = re.compile(
    rf"(?:{_LITERAL}|{_CLASS})(?P<often>[*+?]|\{{\d{{1,3}}(?:,\d{{0,3}})?\}})?", re.DOTALL
)


def doubtful_patterns(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Patterns that are not known to take time that is linear in the text, in their order."""
    return tuple(
        pattern
        for part in ("normalizer", "pre_tokenizer")
        for pattern in _patterns(tokenizer, part)
        if pattern != _O200K and not _is_linear(pattern)
    )


def patterns_of_decoder(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Patterns by which it makes text of tokens; published ones have none."""
    return tuple(_patterns(tokenizer, "decoder"))


def _is_linear(pattern: str) -> bool:
    """Whether no part of a text is looked at more than a few times, as far as that is easily seen.

    Each alternative is a run of one kind: before it stand characters that are there or not, of
    which one may be missing, and behind it what cannot fail, so that it is never tried shorter.
    """
    place = 0
    while True:
        end = _end_of_alternative(pattern, place)
        if end is None:
            return False
        if end == len(pattern):
            return True
        place = end + 1


def _end_of_alternative(pattern: str, place: int) -> int | None:
    """Where a linear alternative ends, with the pattern or before ``|``; None if it is none."""
    for known in (_CONTRACTIONS, *(_SPACES if pattern.endswith(_LAST) else ())):
        end = place + len(known)
        if pattern.startswith(known, place) and pattern[end : end + 1] in ("", "|"):
            return end
    start, has_run, may_miss = place, False, False
    while place < len(pattern) and pattern[place] != "|":
        piece = _PIECE.match(pattern, place)
        if piece is None:
            return None
        often = piece["often"]
        cannot_fail = often in ("*", "?")
        if (has_run and not cannot_fail) or (often == "?" and may_miss and not has_run):
            return None
        may_miss |= often == "?"
        has_run |= often not in (None, "?")
        place = piece.end()
    return place if place > start else None


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

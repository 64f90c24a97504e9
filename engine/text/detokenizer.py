"""Token ids to text while they arrive."""

from __future__ import annotations

import re
from typing import cast
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

from engine.text.tokenizer import PanicsAsErrors

__all__ = ["IncrementalDetokenizer"]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_LONGEST_CHARACTER = 4  # bytes of UTF-8
_LONG_WINDOW = 32
_SHORT_WINDOW = 8

_special_ids: WeakKeyDictionary[PreTrainedTokenizerBase, frozenset[int]] = WeakKeyDictionary()


class IncrementalDetokenizer:
    """Token ids to text while they arrive: the pieces join to ``tokenizer.decode`` of all ids.

    What a token adds depends on its neighbours: bytes that wait for the rest of a character, a
    leading space that only the first word loses, ``##`` that joins. So a short window is decoded
    again with every token, and what the text grew by is handed out::

        window   | prefix: already told, gives context | fresh: told in part or not at all |
                 |<------------- sent characters of its text ----------->|<- next piece -->|

    When the text ends in a whole character, the fresh tokens become the prefix. If it does not for
    long, as in a run of bytes that are no text, the oldest tokens are let go of: a decoder that
    begins within a character is in step again after three bytes. The cost per token is therefore
    that of decoding a few tokens, however long the text.

    Held back until more arrives:

    - a last U+FFFD, which is a character whose bytes are not all there yet (or no character);
    - byte pieces (``<0xE2>``), up to the next token of another kind: the decoder reads a run of
      them as a whole and, if it is no valid UTF-8, replaces each of them, the valid ones too.

    ``tokenizers.decoders.DecodeStream`` does less: where such a run turns out invalid, which any
    model with a byte fallback can bring about, it gives wrong text or raises for good; and it tells
    nothing of a run of bytes that are no text, which it decodes from its start with every token.

    The prompt's ids are not needed. Clean-up of spaces is off: it would change what was handed out.

    Args:
        tokenizer: of the checkpoint.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._skipped = _ids_without_text(tokenizer) if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._num_prefix = 0
        self._num_sent = 0
        self._longest_window = _LONG_WINDOW

    def flush(self) -> str:
        """Return what was held back; no ids may follow. An unfinished character is dropped."""
        text = self._decode(self._window)
        for num_dropped in range(_LONGEST_CHARACTER):
            kept = self._decode(self._window[: len(self._window) - num_dropped])
            if not kept.endswith(_REPLACEMENT):
                return kept[self._num_sent :]
        # No character was begun here, these bytes never were text.
        return text[self._num_sent :].rstrip(_REPLACEMENT)

    def append(self, token_id: int) -> str:
        """Take the next id and return the text that is certain now and was not before.

        Ids that the tokenizer does not know add nothing; models often have more ids than it.
        """
        # None for an unknown id, whatever its annotation says.
        piece = cast("str | None", self._tokenizer.convert_ids_to_tokens(token_id))
        # Left out here, not only by decode: a loop of such tokens would make the window grow.
        if piece is None or token_id in self._skipped:
            return ""
        self._window.append(token_id)
        if _BYTE_PIECE.fullmatch(piece):
            return ""
        text = self._decode(self._window)
        is_whole = not text.endswith(_REPLACEMENT)
        num_certain = len(text) if is_whole else len(text) - 1
        delta = text[self._num_sent : num_certain]
        if delta:
            self._num_sent = num_certain
            if is_whole:
                self._slide()
        if not is_whole and len(self._window) > self._longest_window:
            self._shorten(text)
        return delta

    def _slide(self) -> None:
        self._window = self._window[self._num_prefix :]
        self._num_prefix = len(self._window)
        self._num_sent = len(self._decode(self._window))
        self._longest_window = _LONG_WINDOW

    def _shorten(self, text: str) -> None:
        """Keep the last tokens of a window, if their text ends as that of the whole window does."""
        kept = self._window[-_SHORT_WINDOW:]
        kept_text = self._decode(kept)
        # What is yet to be told, and a character that was, must be the same.
        num_compared = len(text) - self._num_sent + 1
        if kept_text[-num_compared:] == text[-num_compared:] and len(kept_text) >= num_compared:
            self._num_sent = len(kept_text) - num_compared + 1
            self._window, self._num_prefix = kept, 0
        else:
            self._longest_window *= 2  # so that to try again costs little

    def _decode(self, token_ids: list[int]) -> str:
        with PanicsAsErrors():
            text = self._tokenizer.decode(
                token_ids,
                skip_special_tokens=self._skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        if not isinstance(text, str):
            raise TypeError(f"the tokenizer decoded ids to {type(text).__name__}, not to str")
        return text


def _ids_without_text(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that ``decode(..., skip_special_tokens=True)`` skips; found once per tokenizer."""
    known = _special_ids.get(tokenizer)
    if known is None:
        ids = set(tokenizer.all_special_ids)
        if tokenizer.is_fast:
            # These skip whatever is marked special, named in the special tokens map or not.
            added = tokenizer.added_tokens_decoder
            ids |= {token_id for token_id, token in added.items() if token.special}
        known = _special_ids[tokenizer] = frozenset(ids)
    return known

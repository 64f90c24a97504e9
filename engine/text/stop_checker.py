"""Detokenization and end of a completion."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import cast
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

from engine.interface.outputs import FinishReason
from engine.interface.placed_error import PlacedError
from engine.interface.sampling_params import SamplingParams
from engine.text.tokenizer import raise_panic

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_MAX_CHARACTER_BYTES = 4  # bytes of UTF-8
_LONG_WINDOW = 32
_SHORT_WINDOW = 8

_special_ids: WeakKeyDictionary[PreTrainedTokenizerBase, frozenset[int]] = WeakKeyDictionary()


class IncrementalDetokenizer:
    """Decodes token ids as they arrive; the pieces join to ``tokenizer.decode`` of all ids.

    The text of a token depends on its neighbours: bytes that wait for the rest of a character, a
    leading space that only the first word loses, ``##`` that joins. So a short window is decoded
    again with every token, and the growth of its text is emitted::

        window   | prefix: emitted, gives context      | fresh: emitted in part or not     |
                 |<------------- sent characters of its text ----------->|<- next piece -->|

    When the text ends in a whole character, the fresh tokens become the prefix. If it does not for
    long, as in a run of bytes that are not text, the oldest tokens are dropped: a decoder that
    begins within a character is in step again after three bytes. The cost per token is therefore
    that of decoding a few tokens, for any length of the text.

    Held back until more arrives:

    - a final U+FFFD, which is an incomplete character (or not a character);
    - byte pieces (``<0xE2>``), up to the next token of another kind: the decoder reads a run of
      them as a whole and, if it is not valid UTF-8, replaces all of them, even the valid ones.

    ``tokenizers.decoders.DecodeStream`` does less: if such a run turns out invalid, which any model
    with byte fallback can cause, it returns wrong text or keeps raising. For a run of bytes that
    are not text it returns nothing, and decodes the run from its start with every token.

    The prompt's ids are not needed. Clean-up of spaces is off: it would change emitted text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._skipped = ids_without_text(tokenizer)
        self._window: list[int] = []
        self._num_prefix = 0
        self._num_sent = 0
        self._longest_window = _LONG_WINDOW

    def flush(self) -> str:
        """Return the text held back, without an unfinished character; no ids may follow."""
        text = self._decode(self._window)
        for num_dropped in range(_MAX_CHARACTER_BYTES):
            kept = self._decode(self._window[:-num_dropped]) if num_dropped else text
            if not kept.endswith(_REPLACEMENT):
                return kept[self._num_sent :]
        # No character begins here: these bytes are not text.
        return text[self._num_sent :].rstrip(_REPLACEMENT)

    def append(self, token_id: int) -> str:
        """Append the next id and return the text that became certain.

        Unknown ids add nothing; models often have more ids than their tokenizer.
        """
        # None for an unknown id, despite the method's annotation.
        piece = cast("str | None", self._tokenizer.convert_ids_to_tokens(token_id))
        # Skipped here, not only by decode: a loop of such tokens would grow the window.
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
                self._window = self._window[self._num_prefix :]
                self._num_prefix = len(self._window)
                self._num_sent = len(self._decode(self._window))
                self._longest_window = _LONG_WINDOW
        if not is_whole and len(self._window) > self._longest_window:
            self._shorten(text)
        return delta

    def _shorten(self, text: str) -> None:
        """Keep only the last tokens of a window, if their text ends like the whole window's."""
        kept = self._window[-_SHORT_WINDOW:]
        kept_text = self._decode(kept)
        # The text not emitted yet, and the character before it, must be the same.
        num_compared = len(text) - self._num_sent + 1
        if kept_text[-num_compared:] == text[-num_compared:] and len(kept_text) >= num_compared:
            self._num_sent = len(kept_text) - num_compared + 1
            self._window, self._num_prefix = kept, 0
        else:
            self._longest_window *= 2  # keeps retries cheap

    def _decode(self, token_ids: list[int]) -> str:
        try:
            text = self._tokenizer.decode(
                token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        except BaseException as error:
            raise_panic(error)
            raise
        if not isinstance(text, str):
            raise TypeError(f"the tokenizer decoded ids to {type(text).__name__}, not to str")
        return text


def ids_without_text(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids that ``decode(..., skip_special_tokens=True)`` skips, cached by tokenizer."""
    known = _special_ids.get(tokenizer)
    if known is None:
        ids = set(tokenizer.all_special_ids)
        if tokenizer.is_fast:
            # Fast tokenizers skip every token marked special, even outside the special tokens map.
            added = tokenizer.added_tokens_decoder
            ids |= {token_id for token_id, token in added.items() if token.special}
        known = _special_ids[tokenizer] = frozenset(ids)
    return known


class StopStrings:
    """Finds stop strings in a growing text.

    The result is that of reading the text one character at a time, so it does not depend on the
    boundaries of tokens: the first character that completes a stop string ends the text.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop))

    def find(self, text: str, num_passed: int) -> int | None:
        """Return the position at which to cut the text, or None.

        Args:
            num_passed: matches that end within the first ``num_passed`` characters are ignored.
        """
        starts = [(text.find(s, max(0, num_passed + 1 - len(s))), len(s)) for s in self._stop]
        ends = [(start + length, start) for start, length in starts if start >= 0]
        return min(ends)[1] if ends else None

    def tail(self, text: str) -> str:
        """Return the last characters, in which an incomplete stop string may have begun."""
        return text[max(0, len(text) - self._longest + 1) :]

    def num_undecided(self, text: str) -> int:
        """Return the number of last characters that may turn out to begin a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) and len(stop) > length for stop in self._stop):
                return length
        return 0


def check_stop_strings(params: SamplingParams, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Raise ``PlacedError`` for stop strings without a tokenizer."""
    if tokenizer is None and params.stop:
        raise PlacedError(
            ("stop",),
            f"stop strings {list(params.stop)} need text, but the checkpoint has no tokenizer; "
            "use stop_token_ids",
        )


class CompletionText:
    """The growing text of one completion, and the rule that ends it.

    ::

        text found so far   | emitted (take_delta) | certain | may begin a stop string |
                            |<------------- text ----------->|<--- held until decided -->|

    The text contains neither the stop string or token, nor special tokens. Part of a character or
    of a stop string is never emitted, so that no text is taken back.

    Args:
        tokenizer: the checkpoint's tokenizer; None generates ids without text.

    Raises:
        ValueError: stop strings without a tokenizer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        params: SamplingParams,
        eos_token_ids: Collection[int],
    ) -> None:
        check_stop_strings(params, tokenizer)
        self._tokenizer = tokenizer
        self._detokenizer = None if tokenizer is None else IncrementalDetokenizer(tokenizer)
        self._stop_ids = frozenset(() if params.ignore_eos else eos_token_ids).union(
            params.stop_token_ids
        )
        self._params = params
        self._stop_strings = StopStrings(params.stop) if params.stop else None
        self._num_tokens = 0
        self._certain: list[str] = []  # pieces of the text that was emitted
        self._new = ""  # certain, and not emitted yet
        self._held = ""  # may begin a stop string
        self._tail = ""  # the last characters found, in which a stop string may have begun
        self._finished = False

    def without_end(self) -> CompletionText:
        """Return an empty text of the same tokenizer, which no token ends."""
        endless = {"max_tokens": None, "min_tokens": 0, "stop": (), "stop_token_ids": ()}
        params = self._params.model_copy(update=endless | {"ignore_eos": True})
        return CompletionText(self._tokenizer, params, ())

    def append(self, token_id: int) -> FinishReason | None:
        """Append the next generated token.

        Returns:
            The finish reason if the completion ends with this token, or None.

        Raises:
            RuntimeError: the completion has ended already.
        """
        if self._finished:
            raise RuntimeError(f"token {token_id} came after the end of the completion")
        self._num_tokens += 1
        limit = self._params.max_tokens
        reason = FinishReason.LENGTH if limit is not None and self._num_tokens >= limit else None
        if token_id in self._stop_ids and self._may_stop():
            reason = FinishReason.STOP
            self.finish()
        elif self._detokenizer is not None and self._grow(self._detokenizer.append(token_id)):
            reason = FinishReason.STOP
        elif reason is FinishReason.LENGTH and self.finish():
            # The text held back contained a stop string.
            reason = FinishReason.STOP
        return reason

    @property
    def has_tokenizer(self) -> bool:
        """True if tokens become text."""
        return self._detokenizer is not None

    @property
    def text(self) -> str:
        """The text that is certain so far; complete once the completion has ended."""
        return "".join(self._certain) + self._new

    def take_delta(self) -> str:
        """Return the growth of :attr:`text` since the last call."""
        delta, self._new = self._new, ""
        if delta:
            self._certain.append(delta)
        return delta

    def _may_stop(self) -> bool:
        """Return True if ``min_tokens`` allows stopping now."""
        return self._num_tokens >= self._params.min_tokens

    def _grow(self, delta: str) -> bool:
        """Add text; return True if a stop string ended it."""
        if self._stop_strings is None:
            self._new += delta
            return False
        # No stop string that ends in the new text begins before the old tail.
        end = self._tail + delta
        cut = self._stop_strings.find(end, len(self._tail)) if self._may_stop() else None
        open_text = self._held + delta
        if cut is not None:  # within open_text: all that may begin a stop string was held back
            self._new += open_text[: len(open_text) - (len(end) - cut)]
            self._held = ""
            self._finished = True
            return True
        num_certain = len(open_text) - self._stop_strings.num_undecided(end)
        self._new += open_text[:num_certain]
        self._held = open_text[num_certain:]
        self._tail = self._stop_strings.tail(end)
        return False

    def finish(self) -> bool:
        """End the completion with the text held back; return True if that had a stop string."""
        if self._finished:
            return False
        stopped = self._detokenizer is not None and self._grow(self._detokenizer.flush())
        self._new += self._held
        self._held = ""
        self._finished = True
        return stopped

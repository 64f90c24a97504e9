"""When a completion ends, and its text up to there."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase

from engine.interface.deferred import Deferred
from engine.interface.outputs import FinishReason
from engine.interface.placed_error import PlacedError
from engine.interface.sampling_params import SamplingParams
from engine.text.detokenizer import IncrementalDetokenizer

__all__ = ["CompletionText", "StopStrings"]


class StopStrings:
    """Finds stop strings in a text that grows.

    The outcome is that of reading the text one character at a time, so it does not depend on
    where tokens begin and end: the first character that completes a stop string ends the text.

    Args:
        stop: non-empty strings; none at all never match.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)

    def find(self, text: str, num_passed: int) -> int | None:
        """Where the text must be cut, or None.

        Args:
            text: all of it so far.
            num_passed: matches that end within the first ``num_passed`` characters are over.
        """
        matches: list[tuple[int, int]] = []
        for stop in self._stop:
            start = text.find(stop, max(0, num_passed + 1 - len(stop)))
            if start >= 0:
                matches.append((start + len(stop), start))
        return min(matches)[1] if matches else None

    def tail(self, text: str) -> str:
        """The last characters, in which a stop string may have begun that is not complete."""
        return text[max(0, len(text) - self._longest + 1) :] if self._longest else ""

    def num_undecided(self, text: str) -> int:
        """How many of the last characters may turn out to begin a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) and len(stop) > length for stop in self._stop):
                return length
        return 0


class CompletionText:
    """The text of one completion as it grows, and the rule that ends it.

    ::

        text found so far   | told (take_delta) | certain, untold | may begin a stop string |
                            |<--------------- text -------------->|<--- until decided ----->|

    A stop string is not part of the text, nor is the stop token; special tokens never are.
    Neither half a character nor half a stop string is ever told.

    Args:
        tokenizer: of the checkpoint; None generates ids without text.
        params: how the completion ends.
        eos_token_ids: the checkpoint's end-of-sequence ids.

    Raises:
        ValueError: stop strings, but no tokenizer to find them with.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        params: SamplingParams,
        eos_token_ids: Collection[int],
    ) -> None:
        if tokenizer is None and params.stop:
            raise PlacedError(
                ("stop",),
                f"stop strings {list(params.stop)} need text, but the checkpoint has no "
                "tokenizer; use stop_token_ids",
            )
        self._tokenizer = tokenizer
        self._detokenizer = None if tokenizer is None else IncrementalDetokenizer(tokenizer)
        self._stop_ids = frozenset(() if params.ignore_eos else eos_token_ids).union(
            params.stop_token_ids
        )
        self._params = params
        self._stop_strings = StopStrings(params.stop)
        self._num_tokens = 0
        self._pieces: list[str] = []  # of the text found so far; what is in them is never changed
        self._num_found = 0
        self._num_certain = 0
        self._untold = ""  # what was found and not told, certain or not
        self._tail = ""  # the last characters found, in which a stop string may have begun
        self._finished = False

    def without_end(self) -> CompletionText:
        """An empty one of the same tokenizer, which no token ends."""
        endless = {"max_tokens": None, "min_tokens": 0, "stop": (), "stop_token_ids": ()}
        params = self._params.model_copy(update=endless | {"ignore_eos": True})
        return CompletionText(self._tokenizer, params, ())

    def append(self, token_id: int) -> FinishReason | None:
        """Take the next generated token.

        Returns:
            Why the completion ends with this token, or None.

        Raises:
            RuntimeError: the completion has ended already.
        """
        if self._finished:
            raise RuntimeError(f"token {token_id} came after the end of the completion")
        self._num_tokens += 1
        most = self._params.max_tokens
        reason = FinishReason.LENGTH if most is not None and self._num_tokens >= most else None
        if token_id in self._stop_ids and self._may_stop():
            reason = FinishReason.STOP
            self._settle()
        elif self._detokenizer is not None and self._grow(self._detokenizer.append(token_id)):
            reason = FinishReason.STOP
        elif reason is FinishReason.LENGTH and self._settle():
            # What was held back held a stop string.
            reason = FinishReason.STOP
        return reason

    @property
    def text(self) -> str:
        """What is certain so far; all of it once the completion has ended."""
        return self.snapshot().value

    def snapshot(self) -> Deferred[str]:
        """:attr:`text` as it is now, to be put together when it is asked for."""
        pieces, num_pieces, length = self._pieces, len(self._pieces), self._num_certain
        return Deferred(lambda: "".join(pieces[:num_pieces])[:length])

    def take_delta(self) -> str:
        """What :attr:`text` grew by since the last call."""
        num_open = self._num_found - self._num_certain
        end = len(self._untold) - num_open
        delta, self._untold = self._untold[:end], self._untold[end:]
        return delta

    def finish(self) -> None:
        """End the completion for a reason from outside, and release what was held back.

        One that has ended already is left as it is.
        """
        self._settle()

    def _may_stop(self) -> bool:
        """Whether a stop token or stop string counts by now."""
        return self._num_tokens >= self._params.min_tokens

    def _grow(self, delta: str) -> bool:
        """Add text; whether a stop string ended it."""
        # No stop string that ends in the new text begins before the tail of the old.
        end = self._tail + delta
        cut = self._stop_strings.find(end, len(self._tail)) if self._may_stop() else None
        if delta:
            self._pieces.append(delta)
            self._num_found += len(delta)
            self._untold += delta
        if cut is not None:
            num_cut = len(end) - cut
            self._num_found -= num_cut
            self._untold = self._untold[: len(self._untold) - num_cut]
            self._num_certain = self._num_found
            self._finished = True
            return True
        self._num_certain = self._num_found - self._stop_strings.num_undecided(end)
        self._tail = self._stop_strings.tail(end)
        return False

    def _settle(self) -> bool:
        """Release what was held back; whether a stop string was in it."""
        if self._finished:
            return False
        stopped = self._detokenizer is not None and self._grow(self._detokenizer.flush())
        self._num_certain = self._num_found
        self._finished = True
        return stopped

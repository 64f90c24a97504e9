"""Where Whisper may write timestamps, and where it must."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["TimestampRule"]


@dataclass(frozen=True, slots=True)
class TimestampRule:
    """Keeps timestamps in order and in pairs: one where a segment begins, one where it ends.

    ::

        <|0.00|> text text <|1.20|> <|1.20|> text ... <|2.00|> <end>
         first token, and    end and next begin: only text follows a pair,
         not too late        only a timestamp or the end follows a single one

    Beside that, a timestamp is written wherever all timestamps together are likelier than the
    likeliest text. The rules are those of "Robust Speech Recognition via Large-Scale Weak
    Supervision" (Radford et al. 2022), in the form that transformers gives them.

    Attributes:
        no_timestamps_token_id: the last id before those of the timestamps; never generated.
        end_token_id: ids below it are text.
        max_first: the latest that the first timestamp may be, as its number; None for any.
    """

    no_timestamps_token_id: int
    end_token_id: int
    max_first: int | None = None

    @property
    def first_timestamp_id(self) -> int:
        """The id of ``<|0.00|>``; all larger ids are later times."""
        return self.no_timestamps_token_id + 1

    def apply(self, logits: Tensor, generated: Sequence[int]) -> None:
        """Mask what must not come next, in place.

        Args:
            logits: ``(vocab,)`` of the next token.
            generated: the ids so far, without the prompt.
        """
        times, earliest = logits[self.first_timestamp_id :], self._earliest(generated)
        logits[self.no_timestamps_token_id] = -torch.inf
        times[:earliest] = -torch.inf
        if not generated:
            logits[: self.first_timestamp_id] = -torch.inf
            if self.max_first is not None:
                times[self.max_first + 1 :] = -torch.inf
        elif self._is_time(generated[-1]):
            if self._begins_segment(generated):
                times[:] = -torch.inf
            else:
                logits[: self.end_token_id] = -torch.inf
        text = logits[: self.first_timestamp_id]
        if times.float().logsumexp(0) > text.float().max():
            text[:] = -torch.inf

    def _earliest(self, generated: Sequence[int]) -> int:
        """The number of the first timestamp that is not too early."""
        last = next((i for i in reversed(generated) if self._is_time(i)), None)
        if last is None:
            return 0
        # Where a segment has just ended, the next may begin at the same time.
        ended = self._is_time(generated[-1]) and not self._begins_segment(generated)
        return last - self.first_timestamp_id + (0 if ended else 1)

    def _begins_segment(self, generated: Sequence[int]) -> bool:
        """Whether the last timestamp, with which ``generated`` ends, is the second of a pair."""
        return len(generated) < 2 or self._is_time(generated[-2])

    def _is_time(self, token_id: int) -> bool:
        return token_id >= self.first_timestamp_id

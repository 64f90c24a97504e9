"""Where Whisper may write timestamps, and where it must."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

__all__ = ["TimestampRule"]


class TimestampRule:
    """Keeps timestamps in order and in pairs: one where a segment begins, one where it ends.

    ::

        <|0.00|> text text <|1.20|> <|1.20|> text ... <|2.00|> <end>
         first token, and    end and next begin: only text follows a pair,
         not too late        only a timestamp or the end follows a single one

    Beside that, a timestamp is written wherever all timestamps together are likelier than the
    likeliest text. It is transformers' own processor that masks, over the generated ids alone.

    Args:
        no_timestamps_token_id: the last id before those of the timestamps; never generated.
        end_token_id: ids below it are text.
        max_first: the latest that the first timestamp may be, as its number; None for any.
    """

    def __init__(
        self, no_timestamps_token_id: int, end_token_id: int, max_first: int | None = None
    ) -> None:
        # What the processor looks up in a generation config, where an end may also be a list.
        config: Any = SimpleNamespace(
            no_timestamps_token_id=no_timestamps_token_id,
            eos_token_id=end_token_id,
            bos_token_id=end_token_id,
            max_initial_timestamp_index=max_first,
        )
        self._processor = WhisperTimeStampLogitsProcessor(config, begin_index=0)

    def apply(self, logits: Tensor, generated: Sequence[int]) -> None:
        """Mask what must not come next, in place.

        Args:
            logits: ``(vocab,)`` of the next token.
            generated: the ids so far, without the prompt.
        """
        ids = torch.tensor([list(generated)], dtype=torch.int64)
        logits.copy_(self._processor(ids, logits[None])[0])

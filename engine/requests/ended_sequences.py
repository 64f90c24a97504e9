"""What a completion that takes several sequences has put out so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engine.interface.outputs import TokenLogprobs, WindowStart
from engine.requests.request import Request, RequestTimes
from engine.text.stop_checker import CompletionText

__all__ = ["EndedSequences"]


@dataclass(slots=True)
class EndedSequences:
    """The kept tokens of the sequences that have ended, one after the other.

    Attributes:
        first: the first of them, from when it began.
        text: what the tokens say.
        token_ids: of all of them.
        logprobs: one entry per token, if they are asked for.
        windows: where the window of each of them begins.
    """

    first: Request
    text: CompletionText
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    windows: list[WindowStart] = field(default_factory=list)
    _rows: dict[str, list[Tensor]] = field(default_factory=dict)

    @classmethod
    def before(cls, request: Request) -> EndedSequences | None:
        """None yet, of a request that takes several; None for one that takes one."""
        return None if request.continuation is None else cls(request, request.text.without_end())

    def take_in(
        self,
        request: Request,
        num_kept: int,
        rows: Mapping[str, Tensor],
        encoder_rows: Mapping[str, Tensor],
    ) -> None:
        """Take what a sequence has come to.

        Args:
            request: that has ended.
            num_kept: of its generated tokens.
            rows: one per token whose forward pass has run; those of kept tokens, and of the
                prompt, are kept.
            encoder_rows: one per encoder token.
        """
        kept = request.output_token_ids[:num_kept]
        if request.continuation is not None:
            start = WindowStart(len(self.token_ids), request.continuation.begin_s)
            self.windows.append(start)
        self.token_ids += kept
        self.logprobs += request.logprobs[:num_kept]
        for token_id in kept:
            self.text.append(token_id)
        length = request.num_prompt_tokens + num_kept
        for name, tensor in rows.items():
            self._rows.setdefault(name, []).append(tensor[:length])
        for name, tensor in encoder_rows.items():
            self._rows.setdefault(name, []).append(tensor)

    def tensors(self) -> Mapping[str, Tensor]:
        """The rows of all sequences, one after the other."""
        return {name: torch.cat(parts) for name, parts in self._rows.items()}

    def times(self, last: RequestTimes) -> RequestTimes:
        """From the beginning of the first sequence to the end of the last."""
        return replace(self.first.times, finished=last.finished)

"""One input on its way through an ``EncoderEngine``, and its result."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from engine.interface.outputs import EncoderOutput, RequestMetrics
from prefix_cache import BlockHash

__all__ = ["EncoderRequest"]


@dataclass(frozen=True, slots=True, eq=False)
class EncoderRequest:
    """A validated input.

    Attributes:
        request_id: unique among the engine's live requests.
        content: ``(n,)`` int64 token ids, or ``(n, hidden_size)`` embeddings; on the CPU.
        input_hash: of everything that determines the output, salt included.
        priority: lower first.
        arrival_index: order among equal priorities.
        arrival: when it came, by ``time.monotonic``.
    """

    request_id: str
    content: Tensor
    input_hash: BlockHash
    priority: int
    arrival_index: int
    arrival: float = field(default_factory=time.monotonic)

    @property
    def num_tokens(self) -> int:
        """Tokens, or embedding rows."""
        return self.content.shape[0]

    @property
    def is_embeds(self) -> bool:
        """Whether ``content`` takes the place of the model's own embeddings."""
        return self.content.ndim == 2

    @property
    def queue_key(self) -> tuple[int, int]:
        """Sort key of the queue: priority first, then first come, first served."""
        return (self.priority, self.arrival_index)

    def output(
        self,
        tensors: Mapping[str, Tensor],
        *,
        started: float,
        num_cached_tokens: int = 0,
        error: str | None = None,
    ) -> EncoderOutput:
        """The result, given when the step that ran it began (by ``time.monotonic``)."""
        return EncoderOutput(
            request_id=self.request_id,
            finished=True,
            tensors=tensors,
            num_prompt_tokens=self.num_tokens,
            num_cached_tokens=num_cached_tokens,
            prompt_token_ids=() if self.is_embeds else tuple(self.content.tolist()),
            error=error,
            metrics=RequestMetrics(
                queue_s=started - self.arrival, total_s=time.monotonic() - self.arrival
            ),
        )

"""Which inputs wait for an encoder engine, and which run together."""

from __future__ import annotations

from bisect import insort

from engine.encoder.encoder_request import EncoderRequest

__all__ = ["EncoderQueue"]


class EncoderQueue:
    """Waiting inputs, batched by length.

    A batch is one padded rectangle, so its cost is ``longest * inputs``::

        head  ■ ■ ■ ■ ■ ■          the first in the order is always in: no input starves
        mate  ■ ■ ■ ■ ■ ■          then those nearest to it in length
        mate  ■ ■ ■ ■ ■ ·
        mate  ■ ■ ■ ■ · ·          at most half of the rectangle is padding

    Args:
        max_num_seqs: inputs of a batch.
        max_num_batched_tokens: cells of a batch, padding included.
    """

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waiting: list[EncoderRequest] = []

    def clear(self) -> None:
        """Forget every input."""
        self._waiting.clear()

    def add(self, request: EncoderRequest) -> None:
        """Queue an input."""
        insort(self._waiting, request, key=lambda r: r.queue_key)

    def remove(self, request: EncoderRequest) -> None:
        """Take an input out. ``ValueError`` if it does not wait."""
        self._waiting.remove(request)

    def waiting(self) -> tuple[EncoderRequest, ...]:
        """All inputs, in the order of their turn."""
        return tuple(self._waiting)

    def next_batch(self, *, share: bool) -> list[EncoderRequest]:
        """Choose what runs next; it stays in the queue until it is removed.

        Args:
            share: leave out equals of one of the batch: they find its outputs in the next step.

        Returns:
            The head of the order and its mates, all token ids or all embeddings.
        """
        if not self._waiting:
            return []
        head = self._waiting[0]
        mates = sorted(
            (r for r in self._waiting[1:] if r.is_embeds == head.is_embeds),
            key=lambda r: (r.priority, abs(r.num_tokens - head.num_tokens), r.arrival_index),
        )
        batch = [head]
        hashes = {head.input_hash}
        for mate in mates:
            if len(batch) == self._max_num_seqs:
                break
            if (share and mate.input_hash in hashes) or not self._fits([*batch, mate]):
                continue
            batch.append(mate)
            hashes.add(mate.input_hash)
        return batch

    def _fits(self, batch: list[EncoderRequest]) -> bool:
        cells = max(r.num_tokens for r in batch) * len(batch)
        tokens = sum(r.num_tokens for r in batch)
        return cells <= self._max_num_batched_tokens and cells <= 2 * tokens

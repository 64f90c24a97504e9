"""Which towers' outputs running requests need, and how far their chunks can go with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.requests.encoder_input import MultiModalInput
from engine.requests.request import Request
from prefix_cache import EncoderCache

__all__ = ["EncoderCacheManager", "EncodingBudget", "ItemShare"]


@dataclass(frozen=True, slots=True)
class EncodingBudget:
    """Rows that a model's towers, or an encoder-decoder's encoder, may still give in a step.

    Attributes:
        num_tokens: rows that are left; None if there is no limit.
        is_untouched: whether nothing is encoded in the step so far.
    """

    num_tokens: int | None
    is_untouched: bool = True

    def allows(self, num_tokens: int) -> bool:
        """Whether an input of so many rows may run; one that is too long may if it runs alone."""
        return self.num_tokens is None or num_tokens <= self.num_tokens or self.is_untouched

    def less(self, num_tokens: int) -> EncodingBudget:
        """What is left after an input of so many rows."""
        left = None if self.num_tokens is None else self.num_tokens - num_tokens
        return EncodingBudget(left, is_untouched=False)


@dataclass(frozen=True, slots=True)
class ItemShare:
    """A chunk, cut to the items whose rows it can have.

    Attributes:
        num_tokens: how many tokens can run; may be 0.
        to_encode: items that towers have to encode for them.
        budget: what is left after that.
    """

    num_tokens: int
    to_encode: tuple[MultiModalInput, ...]
    budget: EncodingBudget


@dataclass(slots=True)
class EncoderCacheManager:
    """Holds rows that towers made, in the encoder cache, for requests that are in their middle.

    An item is held from the step that computes its first placeholder which the prefix cache does
    not have, to the step that computes its last one; so an item that a prefix hit covers is never
    held nor encoded. A request that stands before an item for which there is no room holds
    nothing. A request that holds something can therefore go on, give it back, and make room.

    Pieces of an item are held one by one, each as the whole: were it held from the first to the
    last, a video could wait for room for its sound, and hold it. What others push out between two
    pieces is encoded again.
    """

    cache: EncoderCache
    row_bytes: int
    _items: dict[str, list[MultiModalInput]] = field(default_factory=dict)

    def take(self, request: Request, num_tokens: int, budget: EncodingBudget) -> ItemShare:
        """Hold the items that lie in a request's next ``num_tokens`` tokens, as far as they fit.

        The chunk ends before the first item that neither is there nor can be encoded.
        """
        start = request.num_computed_tokens
        stop = start + num_tokens
        to_encode: list[MultiModalInput] = []
        held = self._items.get(request.request_id, [])
        for item in request.multimodal_inputs:
            if not item.overlaps(start, stop) or item in held:
                continue
            if not self.cache.hold(item.content_hash):
                nbytes = item.num_rows * self.row_bytes
                if not self.cache.has_room(nbytes) or not budget.allows(item.num_rows):
                    stop = max(start, item.offset)
                    break
                self.cache.reserve(item.content_hash, nbytes)
                to_encode.append(item)
                budget = budget.less(item.num_rows)
            held = self._items.setdefault(request.request_id, [])
            held.append(item)
        return ItemShare(stop - start, tuple(to_encode), budget)

    def release_passed(self, request: Request) -> None:
        """Give back what the request has computed to its end."""
        held = self._items.get(request.request_id)
        if held:
            passed = [item for item in held if item.end <= request.num_computed_tokens]
            self._give_back(request.request_id, passed)

    def release(self, request: Request) -> None:
        """Give back all that the request holds; nothing is fine too."""
        self._give_back(request.request_id, tuple(self._items.get(request.request_id, ())))

    def clear(self) -> None:
        """Forget all rows and who holds them, in whatever state an interrupted call left them."""
        self.cache.clear()
        self._items = {}

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` if the cache counts other references than are held here."""
        self.cache.check_integrity(
            Counter(item.content_hash for held in self._items.values() for item in held)
        )

    def _give_back(self, request_id: str, items: Sequence[MultiModalInput]) -> None:
        for item in items:
            self.cache.release(item.content_hash)
            self._items[request_id].remove(item)
        if not self._items.get(request_id, True):
            del self._items[request_id]

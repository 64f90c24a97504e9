"""Counters of one engine since it was built."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefix_cache import EncoderCacheStats, KVCacheStats

__all__ = ["EngineStats"]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A reading of one engine's counters, which begin at 0 when it is built.

    Attributes:
        num_steps: steps run. One that found nothing to do, since every request is paused or
            waits for input, is not counted: the runtime tells by it whether anything moves.
        busy_s: seconds spent in steps.
        prompt_tokens: tokens of all inputs that began to run.
        cached_tokens: of these, tokens that the cache saved.
        generated_tokens: tokens sampled.
        encoder_runs: images, sounds and the like, and encoder-decoders' inputs, that were encoded.
        encoder_hits: how often one was needed whose encoding was there. What a prefix of cached
            tokens shows is not needed, and counts for neither.
        num_preemptions: how often a request had to give its blocks back.
        encoder_cache: towers' outputs at the time of the reading; None for a model without towers.
        kv: the pool at the time of the reading; None for an engine without blocks.
    """

    num_steps: int = 0
    busy_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    encoder_runs: int = 0
    encoder_hits: int = 0
    num_preemptions: int = 0
    encoder_cache: EncoderCacheStats | None = None
    kv: KVCacheStats | None = None

    def plus(self, **counts: float) -> EngineStats:
        """The counters after some more work, given by their names."""
        return replace(self, **{name: getattr(self, name) + n for name, n in counts.items()})

    def since(self, earlier: EngineStats) -> EngineStats:
        """What was added since an earlier reading; ``encoder_cache`` and ``kv`` stay as read."""
        return self.plus(
            **{
                each.name: -getattr(earlier, each.name)
                for each in fields(self)
                if each.name not in ("encoder_cache", "kv")
            }
        )

    def following(self, earlier: EngineStats) -> EngineStats:
        """Add both, as if one engine had gone on; ``encoder_cache`` and ``kv`` as read here."""
        return self.plus(
            **{
                each.name: getattr(earlier, each.name)
                for each in fields(self)
                if each.name not in ("encoder_cache", "kv")
            }
        )

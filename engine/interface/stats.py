"""Counters of one engine since it was built."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from prefix_cache import EncoderCacheStats, KVCacheStats

__all__ = ["EngineStats"]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A reading of one engine's counters, which begin at 0 when it is built.

    Attributes:
        num_steps: steps run. One that found nothing to do, since every request is paused or
            waits for input, is not counted: the runtime sees by it whether anything moves.
        busy_s: seconds spent in steps.
        prompt_tokens: tokens of all inputs that began to run.
        cached_tokens: of these, tokens that the cache saved.
        generated_tokens: tokens sampled.
        encoder_runs: inputs that were encoded: by a tower, an image, sound or video each; by an
            encoder-decoder's encoder, a whole encoder prompt each. An encoder engine, which runs
            no decoder, counts none.
        encoder_hits: such inputs that were needed and whose rows were there. What a prefix of
            cached tokens shows is not needed, and counts for neither.
        num_preemptions: how often a request had to give its blocks back.
        num_restarts: how often a stage's engine was rebuilt, or its worker started again; an
            engine by itself has none.
        num_transfers: outputs and chunks of other stages that were handed to a stage.
        transferred_bytes: of the tensors in these.
        num_running: requests in steps at the time of the reading.
        num_waiting: requests that wait for a step then, preempted and resting ones included.
        encoder_cache: towers' rows at the time of the reading; None for a model without towers.
            The rows of an encoder-decoder's encoder are in blocks, and counted in ``kv``.
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
    num_restarts: int = 0
    num_transfers: int = 0
    transferred_bytes: int = 0
    num_running: int = 0
    num_waiting: int = 0
    encoder_cache: EncoderCacheStats | None = None
    kv: KVCacheStats | None = None

    def plus(self, **counts: float) -> EngineStats:
        """The counters after some more work, given by their names."""
        return replace(self, **{name: getattr(self, name) + n for name, n in counts.items()})

    def since(self, earlier: EngineStats) -> EngineStats:
        """What was added since an earlier reading; what is of its time stays as read."""
        return self.plus(**{name: -getattr(earlier, name) for name in _COUNTERS})

    def following(self, earlier: EngineStats) -> EngineStats:
        """Add both, as if one engine had gone on; what is of its time is as read here."""
        return self.plus(**{name: getattr(earlier, name) for name in _COUNTERS})

    def beside(self, other: EngineStats) -> EngineStats:
        """Add both, of engines that run the same model beside each other."""
        sums = {name: getattr(other, name) for name in (*_COUNTERS, *_COUNTS_OF_NOW)}
        return replace(
            self.plus(**sums),
            encoder_cache=_beside(self.encoder_cache, other.encoder_cache),
            kv=_beside(self.kv, other.kv),
        )


_COUNTS_OF_NOW = ("num_running", "num_waiting")
_OF_NOW = (*_COUNTS_OF_NOW, "encoder_cache", "kv")
_COUNTERS = tuple(each.name for each in fields(EngineStats) if each.name not in _OF_NOW)

_PoolT = TypeVar("_PoolT", "EncoderCacheStats", "KVCacheStats")


def _beside(one: _PoolT | None, other: _PoolT | None) -> _PoolT | None:
    if one is None or other is None:
        return one or other
    return one.beside(other)

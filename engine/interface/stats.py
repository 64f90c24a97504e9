"""Counters of one engine since it was built."""

from __future__ import annotations

from dataclasses import dataclass

from prefix_cache import EncoderCacheStats, KVCacheStats

__all__ = ["EngineStats"]


@dataclass(slots=True)
class EngineStats:
    """Counters of one engine since it was built.

    Attributes:
        num_steps: steps run.
        busy_s: seconds spent in steps.
        prompt_tokens: tokens of all prompts that began to run.
        cached_tokens: of these, tokens that the prefix cache saved.
        generated_tokens: tokens sampled.
        encoder_runs: images and the like, and inputs of an encoder-decoder model's encoder, that
            were encoded.
        encoder_hits: how often one was needed whose encoding was there.
        num_preemptions: how often a request had to give its blocks back.
        encoder_cache: outputs of towers for images and the like; None for a model without.
        kv: the pool now; None before the first look.
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

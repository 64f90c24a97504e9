"""What a user may set about one engine."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from engine.interface.limits import RequestLimits
from engine.interface.media_limits import MediaLimits
from engine.interface.settings import Settings

__all__ = ["EngineConfig", "EngineSettings"]


class EngineSettings(Settings):
    """How an engine runs its model, whichever model that is; the ``engine:`` block in YAML.

    Attributes:
        revision: branch, tag or commit of a hub id.
        trust_remote_code: run code that the checkpoint brings; off unless asked for.
        dtype: element type of weights, activations and cache; ``auto`` takes the checkpoint's on
            CUDA and float32 on a CPU, where half types are slow unless it has AVX512-BF16 or AMX.
        device: ``auto`` takes CUDA when there is one.
        attention_backend: ``auto`` takes xformers on CUDA, native on a CPU (C kernels, compiled on
            first use, for norms and activations too), torch where those cannot run.
        block_size: tokens per KV block.
        num_blocks: blocks in the pool, the null block included, or large pages in models whose
            layers keep different things; None sizes the pool for ``max_num_seqs`` requests of
            ``max_model_len``, within ``memory_fraction``.
        memory_fraction: share of the device's free memory for a pool whose ``num_blocks`` is None.
        max_model_len: longest sequence, prompt and output; None takes the checkpoint's.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: token budget of one step.
        max_num_encoder_tokens: rows that towers for images and the like, or an encoder-decoder's
            encoder, give in one step; a longer input runs alone. None sets no limit.
        encoder_cache_bytes: what towers' rows, those in use included, may take on the device. What
            an encoder-decoder's encoder makes is kept in KV blocks instead.
        preemption: what becomes of a request that has to make room: ``recompute`` forgets its
            state, ``swap`` moves it to host memory as long as there is room.
        num_swap_blocks: host blocks for ``swap``, the null block included; None: as the pool has.
        generation_config: ``auto`` takes defaults of sampling parameters, suppressed tokens, bad
            words and ends of sequences from the checkpoint's ``generation_config.json``; ``ignore``
            runs it as if it had no such file.
        media_limits: how much of a picture, a sound or a video is read.
        enable_prefix_caching: reuse what earlier requests computed. Never changes what comes out.
        limits: what one request may ask for, at most.
        seed: of the engine's own generator, which seeds requests that bring no seed.
    """

    revision: str | None = None
    trust_remote_code: bool = False
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    attention_backend: Literal["auto", "native", "torch", "xformers", "reference"] = "auto"
    block_size: int = Field(default=16, ge=1)
    num_blocks: int | None = Field(default=None, ge=2)
    memory_fraction: float = Field(default=0.5, gt=0.0, le=1.0)
    max_model_len: int | None = Field(default=None, ge=1)
    max_num_seqs: int = Field(default=16, ge=1)
    max_num_batched_tokens: int = Field(default=2048, ge=1)
    max_num_encoder_tokens: int | None = Field(default=None, ge=1)
    encoder_cache_bytes: int = Field(default=256 * 2**20, ge=1)
    preemption: Literal["recompute", "swap"] = "recompute"
    num_swap_blocks: int | None = Field(default=None, ge=2)
    generation_config: Literal["auto", "ignore"] = "auto"
    media_limits: MediaLimits = MediaLimits()
    enable_prefix_caching: bool = True
    limits: RequestLimits = RequestLimits()
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _every_running_request_can_step(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}), or running requests could not all "
                "decode one token in a step"
            )
        return self

    @model_validator(mode="after")
    def _swap_blocks_are_for_swapping(self) -> Self:
        if self.num_swap_blocks is not None and self.preemption != "swap":
            raise ValueError("num_swap_blocks is for preemption: swap; set that, or leave it out")
        return self


class EngineConfig(EngineSettings):
    """An engine's model and settings.

    Attributes:
        model: folder or hub id of a Hugging Face checkpoint, or ``seeded:<name>`` for a small one
            that is built on first use.
        part: which model of a checkpoint that holds several, by its name there.
    """

    model: str = Field(min_length=1)
    part: str | None = None

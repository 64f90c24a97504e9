"""Puts an engine together: checkpoint, model, memory, tables, scheduler."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase

from engine.attention.backend import AttentionBackend
from engine.attention.registry import get_backend, resolve_backend_name
from engine.checkpoints.checkpoint import Checkpoint
from engine.execution.input_batch import InputBatch
from engine.execution.model_runner import ModelRunner
from engine.inputs.fit_check import FitCheck, InputLimits
from engine.inputs.input_processor import InputProcessor
from engine.inputs.prompt_processor import PromptSources
from engine.interface.config import EngineConfig
from engine.interface.log_fields import package_logger
from engine.interface.sampling_params import unsupported_generation
from engine.layers import LayerOps, NativeLayerOps
from engine.models.base import CausalModel, ModelSettings
from engine.models.model_loader import (
    find_family,
    load_model,
    longest_sequence,
    open_checkpoint,
)
from engine.native import load_kernels
from engine.resources.device import keep_freed_memory, resolve_device, resolve_dtype
from engine.resources.memory_plan import MemoryPlan, ModelNeeds, plan_memory
from engine.scheduling.encoder_cache_manager import EncoderCacheManager
from engine.scheduling.scheduler import Scheduler
from engine.text.tokenizer import eos_token_ids, load_tokenizer, max_prompt_chars
from prefix_cache import (
    ENCODER_HIDDEN_STATES,
    AttentionSpec,
    CrossAttentionSpec,
    EncoderCache,
    FullAttentionSpec,
    HostOnlySpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheManager,
    KVCacheSpec,
    PagedMemory,
    SwapSpace,
    group_layers,
)

__all__ = ["build_engine_parts"]

logger = package_logger(__name__)

# The warm-up runs two requests, of three tokens and of two.
_WARM_UP_SEQS, _WARM_UP_LEN, _WARM_UP_TOKENS = 2, 3, 5
# Positions that a checkpoint may ask tables for, unless a user asks for more.
_LONGEST_UNASKED = 2**20


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine is made of."""

    tokenizer: PreTrainedTokenizerBase | None
    limits: InputLimits
    memory_plan: MemoryPlan
    input_processor: InputProcessor
    kv_cache_manager: KVCacheManager
    scheduler: Scheduler
    model_runner: ModelRunner
    swap_space: SwapSpace | None
    encoder_cache_manager: EncoderCacheManager | None


@dataclass(frozen=True, slots=True)
class _Choices:
    """What the config names or leaves open, decided by the checkpoint and the machine."""

    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    attention: str
    max_model_len: int

    @classmethod
    def of(cls, config: EngineConfig) -> _Choices:
        checkpoint = open_checkpoint(
            config.model,
            part=config.part,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
        )
        if config.generation_config == "ignore":
            checkpoint = replace(checkpoint, generation_config=None)
        generation = checkpoint.generation_config
        ignored = [] if generation is None else unsupported_generation(vars(generation))
        if ignored:
            logger.warning(
                "generation_config.json of %s sets %s: not supported, and ignored",
                config.model,
                ", ".join(ignored),
            )
        device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, getattr(checkpoint.config, "dtype", None), device)
        max_model_len = _max_model_len(config, checkpoint)
        attention = resolve_backend_name(config.attention_backend, device, dtype, config.block_size)
        return cls(checkpoint, device, dtype, attention, max_model_len)

    def with_heads_of(self, model: CausalModel, config: EngineConfig) -> _Choices:
        """Decide between xformers and torch once more: not every head suits the kernels."""
        attention = self.attention
        if attention == "xformers":
            head_dims = {layer.spec.head_dim for layer in model.attention_layers}
            attention = resolve_backend_name(
                config.attention_backend, self.device, self.dtype, config.block_size, head_dims
            )
        logger.info("attention backend %s on %s", attention, self.device)
        return replace(self, attention=attention)


def build_engine_parts(config: EngineConfig, output_names: Collection[str] | None) -> EngineParts:
    """Load the checkpoint and reserve the memory.

    Raises:
        ValueError: something does not work out; says what and how to mend it.
    """
    choices = _Choices.of(config)
    checkpoint, model = choices.checkpoint, _load_model(config, choices)
    choices = choices.with_heads_of(model, config)
    tokenizer = _tokenizer(config, checkpoint)
    kv_config, plan = _plan(config, model, choices)
    manager = KVCacheManager(
        kv_config,
        enable_prefix_caching=config.enable_prefix_caching,
        output_names=output_names,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    swap_space = swap_memory = None
    if config.preemption == "swap":
        num_blocks = config.num_swap_blocks or kv_config.num_large_pages
        swap_space = SwapSpace(manager, num_blocks)
        swap_memory = PagedMemory(swap_space.config)
    items = None  # of rows of images and the like, for a model whose prompts show any
    if model.placeholders:
        row_bytes = model.hidden_size * choices.dtype.itemsize
        items = EncoderCacheManager(EncoderCache(config.encoder_cache_bytes), row_bytes)
    runner = ModelRunner(
        model,
        kv_cache_manager=manager,
        memory=PagedMemory(kv_config, choices.device),
        swap_memory=swap_memory,
        backends=_attention_backends(kv_config, choices),
        input_batch=_input_batch(config, kv_config, model, choices.max_model_len),
        device=choices.device,
        max_num_batched_tokens=max(config.max_num_batched_tokens, _WARM_UP_TOKENS),
        encoder_cache=items.cache if items is not None else None,
    )
    _check_output_names(output_names, runner.warm_up(), manager)
    limits = _input_limits(config, model, manager, choices, tokenizer)
    sources = PromptSources(
        checkpoint, model, tokenizer, limits, config.encoder_cache_bytes, config.media_limits
    )
    return EngineParts(
        tokenizer=tokenizer,
        limits=limits,
        memory_plan=replace(
            plan,
            stage_output_bytes=manager.outputs.nbytes_by_name,
            encoder_cache_bytes=config.encoder_cache_bytes if items is not None else 0,
            swap_bytes=swap_memory.nbytes if swap_memory is not None else 0,
        ),
        input_processor=_input_processor(config, sources, manager),
        kv_cache_manager=manager,
        scheduler=_scheduler(config, manager, swap_space, items),
        model_runner=runner,
        swap_space=swap_space,
        encoder_cache_manager=items,
    )


def _load_model(config: EngineConfig, choices: _Choices) -> CausalModel:
    if choices.device.type == "cpu":
        keep_freed_memory()
    return load_model(
        choices.checkpoint,
        ModelSettings(
            choices.dtype,
            choices.device,
            config.block_size,
            max(choices.max_model_len, _WARM_UP_LEN),
            # One choice for attention and layers: with backend torch, neither runs native kernels.
            NativeLayerOps(load_kernels()) if choices.attention == "native" else LayerOps(),
        ),
    )


def _tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> PreTrainedTokenizerBase | None:
    if not find_family(checkpoint).reads_text:
        return None
    remote, whole = config.trust_remote_code, checkpoint.whole_config
    return load_tokenizer(checkpoint.path, trust_remote_code=remote, config=whole)


def _plan(
    config: EngineConfig, model: CausalModel, choices: _Choices
) -> tuple[KVCacheConfig, MemoryPlan]:
    return plan_memory(
        config,
        ModelNeeds(
            _cache_groups(model, config.block_size),
            weights_bytes=model.weight_nbytes,
            dtype=choices.dtype,
            max_model_len=choices.max_model_len,
            max_encoder_len=model.max_encoder_len,
        ),
        device=choices.device,
        attention=choices.attention,
    )


def _scheduler(
    config: EngineConfig,
    manager: KVCacheManager,
    swap_space: SwapSpace | None,
    items: EncoderCacheManager | None,
) -> Scheduler:
    return Scheduler(
        manager,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_encoder_tokens=config.max_num_encoder_tokens,
        swap_space=swap_space,
        encoder_cache_manager=items,
    )


def _input_processor(
    config: EngineConfig, sources: PromptSources, manager: KVCacheManager
) -> InputProcessor:
    checkpoint, tokenizer = sources.checkpoint, sources.tokenizer
    prompts = find_family(checkpoint).prompts(sources)
    stop_token_ids = prompts.stop_token_ids
    generation = checkpoint.generation_config
    if stop_token_ids is None:
        stop_token_ids = eos_token_ids(checkpoint.config, generation, tokenizer)
    return InputProcessor(
        tokenizer,
        prompts,
        FitCheck(sources.limits, manager),
        eos_token_ids=stop_token_ids,
        seed=config.seed,
        generation={} if generation is None else vars(generation),
    )


def _input_limits(
    config: EngineConfig,
    model: CausalModel,
    manager: KVCacheManager,
    choices: _Choices,
    tokenizer: PreTrainedTokenizerBase | None,
) -> InputLimits:
    longest = max(choices.max_model_len, model.max_encoder_len)
    return InputLimits(
        max_model_len=choices.max_model_len,
        hidden_size=model.hidden_size,
        vocab_size=model.input_vocab_size,
        num_logits=model.vocab_size,
        block_size=config.block_size,
        usable_tokens=manager.longest_sequence(choices.max_model_len),
        dtype=choices.dtype,
        max_prompt_chars=max_prompt_chars(tokenizer, longest, config.limits.max_prompt_chars),
        requests=config.limits,
    )


def _input_batch(
    config: EngineConfig, kv_config: KVCacheConfig, model: CausalModel, max_model_len: int
) -> InputBatch:
    """The tables, with room for the warm-up."""
    return InputBatch(
        max_num_seqs=max(config.max_num_seqs, _WARM_UP_SEQS),
        max_model_len=max(max_model_len, _WARM_UP_LEN),
        block_sizes=[group.spec.block_size for group in kv_config.groups],
        max_encoder_lens={
            group_id: model.max_encoder_len
            for group_id, group in enumerate(kv_config.groups)
            if isinstance(group.spec, CrossAttentionSpec)
        },
    )


def _attention_backends(
    kv_config: KVCacheConfig, choices: _Choices
) -> list[AttentionBackend | None]:
    """One for every group; None where it has no attention."""
    return [
        get_backend(choices.attention, choices.device, choices.dtype, group.spec.block_size)
        if isinstance(group.spec, AttentionSpec)
        else None
        for group in kv_config.groups
    ]


def _cache_groups(model: CausalModel, block_size: int) -> tuple[KVCacheGroup, ...]:
    """The groups of a model's layers, and one on the host if none of them keeps all tokens."""
    specs: dict[str, KVCacheSpec] = {x.layer_name: x.spec for x in model.attention_layers}
    specs |= {layer.layer_name: layer.spec for layer in model.state_layers}
    groups = group_layers(specs)
    if any(isinstance(group.spec, FullAttentionSpec) for group in groups):
        return groups
    return (*groups, KVCacheGroup((), HostOnlySpec(block_size)))


def _max_model_len(config: EngineConfig, checkpoint: Checkpoint) -> int:
    limit = longest_sequence(checkpoint)
    if config.max_model_len is None:
        if limit > _LONGEST_UNASKED:
            raise ValueError(
                f"the checkpoint {config.model!r} allows {limit} positions, more than the "
                f"{_LONGEST_UNASKED} for which tables are made unasked; set max_model_len"
            )
        return limit
    if config.max_model_len > limit:
        raise ValueError(
            f"max_model_len {config.max_model_len} is longer than the {limit} positions that the "
            f"checkpoint {config.model!r} allows"
        )
    return config.max_model_len


def _check_output_names(
    wanted: Collection[str] | None, emitted: Collection[str], manager: KVCacheManager
) -> None:
    known = set(manager.stage_outputs.shapes)
    if manager.encoder_outputs is not None:
        known.add(ENCODER_HIDDEN_STATES)
    missing = sorted(set(wanted or ()) - known)
    if missing:
        raise ValueError(
            f"the model has no per-token output {', '.join(map(repr, missing))}; "
            f"it emits {', '.join(sorted(emitted))}"
        )

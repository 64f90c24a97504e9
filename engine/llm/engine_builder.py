"""Puts an engine together: checkpoint, model, memory, tables, scheduler."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from engine.attention.backend import AttentionBackend
from engine.attention.registry import get_backend, resolve_backend_name
from engine.checkpoints.checkpoint import Checkpoint
from engine.execution.input_batch import InputBatch
from engine.execution.model_runner import ModelRunner
from engine.inputs.encoder_decoder_inputs import EncoderDecoderInputProcessor
from engine.inputs.input_processor import InputLimits, InputProcessor
from engine.inputs.multimodal_inputs import MultiModalInputProcessor
from engine.interface.config import EngineConfig
from engine.layers import LayerOps, NativeLayerOps
from engine.models.base import CausalModel
from engine.models.encoder_decoder import EncoderDecoderModel
from engine.models.multimodal import MultiModalModel
from engine.models.qwen2_5_omni.speech_prompt import SpeechPromptProcessor
from engine.models.qwen2_5_omni.talker import Qwen2_5OmniTalker
from engine.models.registry import load_model, max_positions
from engine.native import load_kernels
from engine.resources.malloc_thresholds import keep_freed_memory
from engine.resources.memory_plan import MemoryPlan, ModelNeeds, plan_memory
from engine.scheduling.encoder_cache_manager import EncoderCacheManager
from engine.scheduling.scheduler import Scheduler
from engine.text.tokenizer import eos_token_ids, load_tokenizer
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

__all__ = ["EngineParts", "build_engine_parts", "resolve_device", "resolve_dtype"]

logger = logging.getLogger(__name__)


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


def resolve_device(name: str) -> torch.device:
    """``auto`` takes CUDA when there is one.

    Raises:
        ValueError: the device is not known or not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device {name!r} is not known: {error}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} was asked for, but torch sees no CUDA device")
    return device


def resolve_dtype(
    name: str, checkpoint_dtype: torch.dtype | None, device: torch.device
) -> torch.dtype:
    """``auto`` is the checkpoint's type on CUDA, float32 on a CPU, where half types are slow."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type == "cpu" or checkpoint_dtype is None:
        return torch.float32
    return checkpoint_dtype


def build_engine_parts(config: EngineConfig, output_names: Collection[str] | None) -> EngineParts:
    """Load the checkpoint and reserve the memory.

    Raises:
        ValueError: something does not work out; says what and how to mend it.
    """
    checkpoint = Checkpoint.open(
        config.model,
        part=config.part,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
    )
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, getattr(checkpoint.config, "dtype", None), device)
    max_model_len = _max_model_len(config, checkpoint)
    attention = resolve_backend_name(config.attention_backend, device, dtype, config.block_size)
    logger.info("attention backend %s on %s", attention, device)
    if device.type == "cpu":
        keep_freed_memory()
    model = load_model(
        checkpoint,
        dtype=dtype,
        device=device,
        block_size=config.block_size,
        max_model_len=max(max_model_len, 3),  # the warm-up runs positions 0 to 2
        # One choice for both: who asks for torch gets torch alone.
        ops=NativeLayerOps(load_kernels()) if attention == "native" else LayerOps(),
    )
    speech = None
    if isinstance(model, Qwen2_5OmniTalker):
        speech = SpeechPromptProcessor.from_checkpoint(checkpoint, dtype)
    tokenizer = None
    if speech is None:  # the tokenizer beside a talker is its thinker's
        trusted = config.trust_remote_code
        tokenizer = load_tokenizer(str(checkpoint.path), trust_remote_code=trusted)
    kv_config, plan = plan_memory(
        config,
        ModelNeeds(
            _cache_groups(model, config.block_size),
            weights_bytes=model.weight_nbytes,
            dtype=dtype,
            max_model_len=max_model_len,
            max_encoder_len=_max_encoder_len(model),
        ),
        device=device,
        attention=attention,
    )
    kv_cache_manager = KVCacheManager(
        kv_config,
        enable_prefix_caching=config.enable_prefix_caching,
        output_names=output_names,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    swap_space = _swap_space(config, kv_cache_manager)
    swap_memory = PagedMemory(swap_space.config) if swap_space is not None else None
    encoder_cache_manager = None
    if isinstance(model, MultiModalModel):
        encoder_cache_manager = EncoderCacheManager(
            EncoderCache(config.encoder_cache_bytes), _row_bytes(model, dtype)
        )
    runner = ModelRunner(
        model,
        kv_cache_manager=kv_cache_manager,
        memory=PagedMemory(kv_config, device),
        swap_memory=swap_memory,
        backends=_attention_backends(kv_config, attention, device, dtype),
        input_batch=_input_batch(config, kv_config, model, max_model_len),
        device=device,
        max_num_batched_tokens=max(config.max_num_batched_tokens, 5),
        encoder_cache=encoder_cache_manager.cache if encoder_cache_manager is not None else None,
    )
    _check_output_names(output_names, runner.warm_up(), kv_cache_manager)
    usable_tokens = kv_cache_manager.longest_sequence(max_model_len)
    limits = _input_limits(config, checkpoint, model, max_model_len, usable_tokens, dtype)
    return EngineParts(
        tokenizer=tokenizer,
        limits=limits,
        memory_plan=plan.with_caches(
            kv_cache_manager.outputs.nbytes_by_name,
            encoder_cache=config.encoder_cache_bytes if encoder_cache_manager is not None else 0,
            swap=swap_memory.nbytes if swap_memory is not None else 0,
        ),
        input_processor=_input_processor(config, checkpoint, model, tokenizer, limits, speech),
        kv_cache_manager=kv_cache_manager,
        scheduler=Scheduler(
            kv_cache_manager,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_encoder_tokens=config.max_num_encoder_tokens,
            swap_space=swap_space,
            encoder_cache_manager=encoder_cache_manager,
        ),
        model_runner=runner,
        swap_space=swap_space,
        encoder_cache_manager=encoder_cache_manager,
    )


def _input_processor(
    config: EngineConfig,
    checkpoint: Checkpoint,
    model: CausalModel,
    tokenizer: PreTrainedTokenizerBase | None,
    limits: InputLimits,
    speech: SpeechPromptProcessor | None,
) -> InputProcessor:
    encoder_decoder, multimodal = None, None
    if isinstance(model, EncoderDecoderModel):
        encoder_decoder = EncoderDecoderInputProcessor.from_checkpoint(checkpoint, tokenizer, model)
    elif isinstance(model, MultiModalModel):
        multimodal = MultiModalInputProcessor.from_checkpoint(
            checkpoint,
            model,
            tokenizer,
            cache_bytes=config.encoder_cache_bytes,
            row_bytes=_row_bytes(model, limits.dtype),
        )
    return InputProcessor(
        tokenizer,
        limits,
        eos_token_ids=(
            eos_token_ids(checkpoint.config, checkpoint.generation_config, tokenizer)
            if speech is None
            else speech.stop_token_ids
        ),
        seed=config.seed,
        encoder_decoder=encoder_decoder,
        multimodal=multimodal,
        speech=speech,
    )


def _input_limits(
    config: EngineConfig,
    checkpoint: Checkpoint,
    model: CausalModel,
    max_model_len: int,
    usable_tokens: int,
    dtype: torch.dtype,
) -> InputLimits:
    return InputLimits(
        max_model_len=max_model_len,
        hidden_size=model.hidden_size,
        vocab_size=(
            model.input_vocab_size
            if isinstance(model, EncoderDecoderModel)
            else checkpoint.config.get_text_config().vocab_size
        ),
        num_logits=model.vocab_size,
        block_size=config.block_size,
        usable_tokens=usable_tokens,
        dtype=dtype,
    )


def _input_batch(
    config: EngineConfig, kv_config: KVCacheConfig, model: CausalModel, max_model_len: int
) -> InputBatch:
    """The tables, with room for the warm-up: two requests, of three tokens at most."""
    return InputBatch(
        max_num_seqs=max(config.max_num_seqs, 2),
        max_model_len=max(max_model_len, 3),
        block_sizes=[group.spec.block_size for group in kv_config.groups],
        max_encoder_lens={
            group_id: _max_encoder_len(model)
            for group_id, group in enumerate(kv_config.groups)
            if isinstance(group.spec, CrossAttentionSpec)
        },
    )


def _attention_backends(
    kv_config: KVCacheConfig, name: str, device: torch.device, dtype: torch.dtype
) -> list[AttentionBackend | None]:
    """One for every group; None where it has no attention."""
    return [
        get_backend(name, device, dtype, group.spec.block_size)
        if isinstance(group.spec, AttentionSpec)
        else None
        for group in kv_config.groups
    ]


def _max_encoder_len(model: CausalModel) -> int:
    return model.max_encoder_len if isinstance(model, EncoderDecoderModel) else 0


def _row_bytes(model: MultiModalModel, dtype: torch.dtype) -> int:
    """What one row of an image or the like takes."""
    return model.hidden_size * dtype.itemsize


def _swap_space(config: EngineConfig, manager: KVCacheManager) -> SwapSpace | None:
    """Host pages for requests that are swapped out, if that was asked for."""
    if config.preemption != "swap":
        return None
    return SwapSpace(manager, config.num_swap_blocks or manager.config.num_large_pages)


def _cache_groups(model: CausalModel, block_size: int) -> tuple[KVCacheGroup, ...]:
    """The groups of a model's layers, and one on the host if none of them keeps all tokens."""
    specs: dict[str, KVCacheSpec] = {x.layer_name: x.spec for x in model.attention_layers}
    specs |= {layer.layer_name: layer.spec for layer in model.state_layers}
    groups = group_layers(specs)
    if any(isinstance(group.spec, FullAttentionSpec) for group in groups):
        return groups
    return (*groups, KVCacheGroup((), HostOnlySpec(block_size)))


def _max_model_len(config: EngineConfig, checkpoint: Checkpoint) -> int:
    limit = max_positions(checkpoint)
    if config.max_model_len is None:
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

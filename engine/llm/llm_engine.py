"""The engine of decoders: maps requests to tokens, text and per-token tensors."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from engine.attention.metadata import AttentionBackend
from engine.attention.registry import get_backend, resolve_backend_name
from engine.checkpoints.checkpoint import Checkpoint
from engine.execution.decode_graphs import CudaGraphs, Recorder
from engine.execution.input_batch import InputBatch
from engine.execution.model_runner import ModelRunner, SwapError
from engine.execution.tensor_parallel import FollowerPages, Followers, LeaderMemory
from engine.inputs.input_processor import InputProcessor
from engine.inputs.prompt_processor import PromptSources
from engine.inputs.prompt_tokens import FitCheck, InputLimits
from engine.interface.arguments import check_argument, check_names, check_sampling_argument
from engine.interface.config import EngineConfig
from engine.interface.engine import Engine, NewRequest
from engine.interface.log_fields import package_logger
from engine.interface.outputs import ROW_KEYS, EngineStats, OutputDelta, RequestOutput
from engine.interface.placed_error import described
from engine.interface.prompts import Prompt, SpeechPrompt
from engine.interface.sampling_params import SamplingParams, unsupported_generation
from engine.layers import WHOLE, LayerOps, NativeLayerOps, Shards
from engine.llm.offload import build_offloaded_blocks
from engine.llm.output_processor import OutputProcessor, RowKeys
from engine.models.base import CausalModel, ModelSettings
from engine.models.model_loader import (
    find_family,
    load_model,
    load_tokenizer_of,
    longest_sequence,
    open_configured,
)
from engine.native import load_kernels
from engine.requests.request import CompletionState, RequestGroup, RequestStatus
from engine.resources.device import keep_freed_memory, resolve_device, resolve_dtype
from engine.resources.memory_plan import MemoryPlan, ModelNeeds, plan_memory, step_bytes
from engine.scheduling.request_queues import EncoderCacheManager
from engine.scheduling.scheduler import Scheduler, SchedulerOutput
from engine.text.tokenizer import eos_token_ids, max_prompt_chars
from prefix_cache import (
    ENCODER_HIDDEN_STATES,
    AttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    HostOnlySpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheManager,
    KVCacheSpec,
    PagedMemory,
    SwapSpace,
    check_integrity,
    check_pool_integrity,
    group_layers,
)

logger = package_logger(__name__)

# The warm-up runs two requests, of three tokens and of two.
_WARM_UP_SEQS, _WARM_UP_LEN, _WARM_UP_TOKENS = 2, 3, 5
# Maximum number of positions from a checkpoint; a user may set more explicitly.
_MAX_DEFAULT_LEN = 2**20


@dataclass(frozen=True, slots=True)
class Choices:
    """Settings that are resolved from the config, the checkpoint and the machine."""

    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    attention: str
    max_model_len: int

    @classmethod
    def of(cls, config: EngineConfig) -> Choices:
        """Read the checkpoint's configs; raises ``ValueError`` like :class:`LLMEngine`."""
        checkpoint = open_configured(config)
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

    @property
    def stored_dtype(self) -> torch.dtype | None:
        """Dtype of data that C kernels convert while reading; None: torch computes in it."""
        converts = self.attention == "native" and self.dtype == torch.bfloat16
        return self.dtype if converts else None

    @property
    def computed_dtype(self) -> torch.dtype:
        """Dtype of activations."""
        return self.dtype if self.stored_dtype is None else torch.float32

    def with_heads_of(self, model: CausalModel, config: EngineConfig) -> Choices:
        """Resolve the backend again for the model's head sizes, which kernels may not support."""
        attention = self.attention
        if attention in ("triton", "xformers"):
            head_dims = {layer.spec.head_dim for layer in model.attention_layers}
            attention = resolve_backend_name(
                config.attention_backend, self.device, self.dtype, config.block_size, head_dims
            )
        return replace(self, attention=attention)

    @property
    def attention_in_words(self) -> str:
        """Description of the backend, with the instruction set of its C kernels."""
        if self.attention != "native":
            return self.attention
        return f"native, C kernels for {load_kernels().instructions}"


def load_configured(
    config: EngineConfig, choices: Choices, shards: Shards = WHOLE
) -> tuple[Choices, CausalModel]:
    """Load the model or a shard of it; returns choices that are updated for its heads."""
    if choices.device.type == "cpu":
        keep_freed_memory()
    model = load_model(
        choices.checkpoint,
        ModelSettings(
            choices.computed_dtype,
            choices.device,
            config.block_size,
            max(choices.max_model_len, _WARM_UP_LEN),
            _layer_ops(choices, config),
            quantization=config.quantization,
            encoder_quantization=config.encoder_quantization,
            stored_dtype=choices.stored_dtype,
            shards=shards,
        ),
        check=lambda outline: plan_pages(config, outline, choices),
    )
    return choices.with_heads_of(model, config), model


def _start_followers(config: EngineConfig, choices: Choices) -> Followers | None:
    """Start the followers of a split model; invalid configs fail before any process starts."""
    size, device = config.tensor_parallel, choices.device
    if size == 1:
        return None
    first = 0
    if device.type == "cuda":
        first = torch.cuda.current_device() if str(device) == "cuda" else device.index
        if first + size > torch.cuda.device_count():
            raise ValueError(
                f"tensor_parallel {size} from cuda:{first} on needs more devices than the "
                f"{torch.cuda.device_count()} that there are"
            )
    outline_needs(config)

    def config_of(rank: int) -> str:
        place = "cpu" if device.type == "cpu" else f"cuda:{first + rank}"
        own = {"model": str(choices.checkpoint.path), "device": place}
        return config.model_copy(update=own).model_dump_json()

    return Followers(size, config_of, device)


def _allocate_pages(
    kv_config: KVCacheConfig, choices: Choices, followers: Followers | None
) -> PagedMemory:
    """Allocate the memory pool, on the followers of a split model as well."""
    if followers is None:
        return PagedMemory(kv_config, choices.device)
    followers.send(FollowerPages(kv_config.num_large_pages))
    followers.await_all("ready")
    return LeaderMemory(kv_config, choices.device, followers)


def _input_batch(
    config: EngineConfig, model: CausalModel, choices: Choices, kv_config: KVCacheConfig
) -> InputBatch:
    return InputBatch(
        max_num_seqs=max(config.max_num_seqs, _WARM_UP_SEQS),
        max_model_len=max(choices.max_model_len, _WARM_UP_LEN),
        block_sizes=[group.spec.block_size for group in kv_config.groups],
        max_encoder_lens={
            group_id: model.max_encoder_len
            for group_id, group in enumerate(kv_config.groups)
            if isinstance(group.spec, CrossAttentionSpec)
        },
    )


def _layer_ops(choices: Choices, config: EngineConfig) -> LayerOps:
    """Choose layer operations to match attention: with backend torch, neither uses own kernels."""
    if config.deterministic and (choices.attention != "native" or not load_kernels().has_linear):
        raise ValueError(
            "deterministic needs the C kernels, attention and products, of a CPU with AVX-512, "
            f"AVX2 or NEON; attention is {choices.attention_in_words} on {choices.device}"
        )
    if choices.attention == "native":
        return NativeLayerOps(load_kernels(), deterministic=config.deterministic)
    if choices.attention != "triton":
        return LayerOps()
    from engine.layers.triton_ops import TritonLayerOps  # Triton may be missing otherwise

    return TritonLayerOps()


def outline_needs(config: EngineConfig) -> ModelNeeds:
    """Compute a model's needs from its config only; raises ``ValueError`` like ``LLMEngine``."""
    choices = Choices.of(config)
    choices = replace(choices, checkpoint=replace(choices.checkpoint, is_outline=True))
    shards = Shards(size=config.tensor_parallel)
    _, model = load_configured(config, choices, shards)
    return _needs(config, model, choices)


def _needs(config: EngineConfig, model: CausalModel, choices: Choices) -> ModelNeeds:
    # Parts of the widest rows of the model's towers, if it has any.
    towers = getattr(model, "towers", {})
    parts = max((t.row_parts for t in towers.values()), default=int(bool(model.placeholders)))
    row_bytes = model.hidden_size * choices.computed_dtype.itemsize
    return ModelNeeds(
        _cache_groups(model, config.block_size),
        weights_bytes=model.weight_nbytes,
        dtype=choices.dtype,
        max_model_len=choices.max_model_len,
        max_encoder_len=model.max_encoder_len,
        row_bytes=row_bytes,
        item_row_bytes=parts * row_bytes,
        step_bytes=step_bytes(config, model.hidden_size, model.vocab_size, choices.dtype),
    )


def plan_pages(
    config: EngineConfig, model: CausalModel, choices: Choices
) -> tuple[KVCacheConfig, MemoryPlan]:
    """Plan the number of pages, and the layers in them; see :func:`plan_memory`."""
    return plan_memory(
        config,
        _needs(config, model, choices),
        device=choices.device,
        attention=choices.attention_in_words,
    )


def _input_processor(
    config: EngineConfig, sources: PromptSources, manager: KVCacheManager
) -> InputProcessor:
    checkpoint, tokenizer = sources.checkpoint, sources.tokenizer
    generation = checkpoint.generation_config
    prompts = find_family(checkpoint).prompts(sources)
    if (stop_token_ids := prompts.stop_token_ids) is None:
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
    choices: Choices,
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
        dtype=choices.computed_dtype,
        max_prompt_chars=max_prompt_chars(tokenizer, longest, config.limits.max_prompt_chars),
        requests=config.limits,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )


def attention_backends(
    kv_config: KVCacheConfig, choices: Choices, config: EngineConfig
) -> list[AttentionBackend | None]:
    """Create a backend for every group; None for groups without attention."""
    return [
        get_backend(
            choices.attention,
            choices.device,
            choices.dtype,
            group.spec.block_size,
            deterministic=config.deterministic,
        )
        if isinstance(group.spec, AttentionSpec)
        else None
        for group in kv_config.groups
    ]


def _recorder(config: EngineConfig, model: CausalModel, choices: Choices) -> Recorder | None:
    """Return a recorder of decode steps if kernels read lengths from the device, else None."""
    has_kernels = choices.attention == "triton" and choices.device.type == "cuda"
    if config.enforce_eager or config.tensor_parallel > 1 or not has_kernels:
        return None
    return CudaGraphs() if model.has_static_decodes else None


def _cache_groups(model: CausalModel, block_size: int) -> tuple[KVCacheGroup, ...]:
    """Group a model's layers; add a host-only group if none of them keeps all tokens."""
    specs: dict[str, KVCacheSpec] = {x.layer_name: x.spec for x in model.attention_layers}
    specs |= {layer.layer_name: layer.spec for layer in model.state_layers}
    groups = group_layers(specs)
    if any(isinstance(group.spec, FullAttentionSpec) for group in groups):
        return groups
    return (*groups, KVCacheGroup((), HostOnlySpec(block_size)))


def _max_model_len(config: EngineConfig, checkpoint: Checkpoint) -> int:
    limit = longest_sequence(checkpoint)
    if config.max_model_len is None:
        if limit > _MAX_DEFAULT_LEN:
            raise ValueError(
                f"the checkpoint {config.model!r} allows {limit} positions, more than the "
                f"{_MAX_DEFAULT_LEN} for which tables are made unasked; set max_model_len"
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
    known = {ROW_KEYS, *manager.stage_outputs.shapes}
    if manager.encoder_outputs is not None:
        known.add(ENCODER_HIDDEN_STATES)
    missing = sorted(set(wanted or ()) - known)
    if missing:
        raise ValueError(
            f"the model has no per-token output {', '.join(map(repr, missing))}; "
            f"it emits {', '.join(sorted(emitted))}"
        )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    given: object = prompts
    if isinstance(prompts, Prompt):
        return [prompts]
    # A mapping would be iterated, with its keys as prompts.
    if isinstance(given, Mapping | bytes) or not isinstance(given, Iterable):
        raise ValueError(
            "prompts must be a prompt (such as a str, TextPrompt or TokensPrompt), or a list of "
            f"these, got {type(given).__name__}"
        )
    return list(prompts)


def _check_exclusive(engine: Engine[RequestOutput], method: str) -> None:
    engine.ownership.check()
    if (owner := engine.ownership.owner_name) is not None:
        raise RuntimeError(
            f"{method} drives the engine alone, but it belongs to {owner}: hand requests to the "
            "pipeline, or build another engine"
        )
    live = len(engine.live_request_ids)
    if live:
        raise ValueError(
            f"{method} drives the engine alone, but {live} requests are live: "
            "finish or abort them first, or use add_request and step for all"
        )


def _check_complete(prompt: Prompt) -> None:
    if isinstance(prompt, SpeechPrompt) and not prompt.is_last:
        raise ValueError(
            "the prompt is the first of several chunks (is_last=False): use add_request, "
            "extend_request and step, so that the others can come"
        )


class LLMEngine(Engine[RequestOutput]):
    """Engine of one decoder: paged KV cache, continuous batching, prefix caching, outputs.

    Args:
        output_names: per-token outputs to mirror; None: all that the model emits; an empty
            collection: none.

    Attributes:
        sampling_defaults: the checkpoint's defaults for fields of ``SamplingParams``.
        speakers: voices available to speech prompts; None if the model does not speak.
        is_encoder_decoder: True if prompts have an encoder and a decoder side; outputs may have
            encoder rows.

    Raises:
        ValueError: the checkpoint, a limit or an output name is invalid; states the remedy.
    """

    memory_plan: MemoryPlan
    _swap: SwapSpace | None
    _encoder_cache_manager: EncoderCacheManager | None

    def __init__(
        self, config: EngineConfig, *, output_names: Collection[str] | None = None
    ) -> None:
        check_argument("config", config, EngineConfig, "an EngineConfig", "EngineConfig(model={})")
        check_names("output_names", output_names, or_none=True)
        self.config = config
        choices = Choices.of(config)
        followers = self._followers = _start_followers(config, choices)
        shards = WHOLE if followers is None else followers.shards
        choices, model = load_configured(config, choices, shards)
        logger.info("attention backend %s on %s", choices.attention_in_words, choices.device)
        checkpoint = choices.checkpoint
        self.hidden_size: int = model.hidden_size
        self.dtype, self.max_model_len = choices.dtype, choices.max_model_len
        self.tokenizer: PreTrainedTokenizerBase | None = None
        if find_family(checkpoint).reads_text:
            remote = config.trust_remote_code
            self.tokenizer = load_tokenizer_of(checkpoint, trust_remote_code=remote)
        if followers is not None:
            followers.await_all("loaded")
        kv_config, plan = plan_pages(config, model, choices)
        memory = _allocate_pages(kv_config, choices, followers)
        self._kv = KVCacheManager(
            kv_config,
            enable_prefix_caching=config.enable_prefix_caching,
            output_names=None if output_names is None else {*output_names} - {ROW_KEYS},
            max_num_batched_tokens=config.max_num_batched_tokens,
            memory=memory,
        )
        self._build_execution(config, choices, model, memory, plan)
        emitted = self._runner.warm_up()
        _check_output_names(output_names, emitted, self._kv)
        limits = _input_limits(config, model, self._kv, choices, self.tokenizer)
        media = config.encoder_cache_bytes, config.media_limits, config.vad, config.transcription
        sources = PromptSources(checkpoint, model, self.tokenizer, limits, *media)
        self._inputs = _input_processor(config, sources, self._kv)
        prompts, self.sampling_defaults = self._inputs.prompts, self._inputs.sampling_defaults
        self.takes_chunks, self.speakers = prompts.takes_chunks, prompts.speakers
        self.is_encoder_decoder = prompts.is_encoder_decoder
        disk = None if self._offloaded is None else self._offloaded.disk
        salt = None if disk is None else disk.fingerprint[:16]
        self._row_keys = RowKeys(config.block_size, salt)
        self._output_processor = OutputProcessor(
            self._scheduler,
            self._runner,
            self._kv,
            frozenset(output_names or ()),
            self._inputs.next_sequence,
            self._row_keys if ROW_KEYS in (output_names or ()) else None,
        )
        self.memory_plan = replace(
            self.memory_plan, stage_output_bytes=self._kv.outputs.nbytes_by_name
        )
        self._live: dict[str, RequestGroup] = self._output_processor.groups
        self._num_steps = 0
        self._busy_s = 0.0
        for line in self.memory_plan.lines():
            logger.info("%s: %s", config.model, line)

    def _build_execution(
        self,
        config: EngineConfig,
        choices: Choices,
        model: CausalModel,
        memory: PagedMemory,
        plan: MemoryPlan,
    ) -> None:
        """Create the components that manage the pages, and the runner that uses them."""
        manager, kv_config = self._kv, self._kv.config
        self._swap = swap_memory = None
        if config.preemption == "swap":
            self._swap = SwapSpace(manager, config.num_swap_blocks or kv_config.num_large_pages)
            swap_memory = PagedMemory(self._swap.config)
        # Holds rows of images and other items, for models with multimodal prompts.
        self._encoder_cache_manager = None
        if model.placeholders:
            row = torch.empty(model.hidden_size, dtype=choices.computed_dtype, device="meta")
            self._encoder_cache_manager = EncoderCacheManager(manager, memory, row)
        self._offloaded = build_offloaded_blocks(
            config, choices.checkpoint, manager, memory, choices.attention
        )
        self._scheduler = Scheduler(
            manager,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_encoder_tokens=config.max_num_encoder_tokens,
            swap_space=self._swap,
            offloaded=self._offloaded,
            encoder_cache_manager=self._encoder_cache_manager,
        )
        self._runner = ModelRunner(
            model,
            row_dtype=choices.stored_dtype,
            kv_cache_manager=manager,
            memory=memory,
            swap_memory=swap_memory,
            backends=attention_backends(kv_config, choices, config),
            input_batch=_input_batch(config, model, choices, kv_config),
            device=choices.device,
            max_num_batched_tokens=max(config.max_num_batched_tokens, _WARM_UP_TOKENS),
            items=self._encoder_cache_manager,
            record=_recorder(config, model, choices),
            deterministic=config.deterministic,
            kernels=load_kernels() if choices.attention == "native" else None,
        )
        self.memory_plan = replace(
            plan,
            swap_bytes=0 if swap_memory is None else swap_memory.nbytes,
            offload=config.offload,
            stored=choices.checkpoint.stored and f"{choices.checkpoint.stored}; {model.held}",
        )

    def _prepare(self, new: NewRequest) -> RequestGroup:
        """Prepare text, chat messages, token ids, embeddings, or (a first chunk of) speech."""
        if "\x00" in new.request_id:
            raise ValueError("a request_id must not contain a NUL character")
        completions = map(CompletionState.of, self._inputs.process(new))
        return RequestGroup(new.request_id, tuple(completions))

    def _add(self, content: RequestGroup) -> None:
        try:
            self._output_processor.add(content)
            for completion in content.completions:
                self._scheduler.add(completion.request)
        except BaseException:
            self._live.pop(content.request_id, None)
            raise

    def _step(self) -> list[RequestOutput]:
        return [group.output() for group in self._run_step()]

    def _step_deltas(self) -> list[OutputDelta]:
        return [group.delta() for group in self._run_step()]

    def _run_step(self) -> list[RequestGroup]:
        """Run one step; return the requests with progress, finished or not.

        It does nothing if there are no live requests, or if all of them are paused, wait for input,
        or wait for resources of such requests.

        Raises:
            RuntimeError: requests wait and none can run. ``FitCheck`` should prevent this; if it
                happens anyway, raising is better than waiting forever.
        """
        if not self._live:
            return []
        if self._output_processor.interrupted:
            return self._output_processor.fail_interrupted(self._call)
        started = time.perf_counter()
        scheduled = self._scheduler.schedule()
        if not scheduled.scheduled and not self._scheduler.has_idle_requests:
            raise RuntimeError(
                f"none of {self._scheduler.num_waiting} waiting requests can be scheduled; "
                f"the pool is {self._kv.stats()}"
            )
        self._output_processor.count_first_run(scheduled)
        updated = self._run(scheduled)
        self._num_steps += bool(scheduled.scheduled)
        self._busy_s += time.perf_counter() - started
        return updated

    def _run(self, scheduled: SchedulerOutput) -> list[RequestGroup]:
        try:
            sampled = self._runner.execute(scheduled)
        except Exception as error:  # usually caused by one request, which is then isolated
            if not self._can_restart:
                raise
            logger.exception("a step of %d tokens failed", scheduled.num_tokens)
            return self._recover(scheduled, error)
        failed = {token.request for token in sampled if token.error is not None}
        self._scheduler.complete(scheduled.without(failed) if failed else scheduled)
        return self._output_processor.process(scheduled, sampled, self._call)

    def _recover(self, scheduled: SchedulerOutput, error: Exception) -> list[RequestGroup]:
        """Fail the request that ran; if several ran, retry each of them separately."""
        culprits = self._scheduler.fault_isolation.recover(
            scheduled, swap_failed=isinstance(error, SwapError)
        )
        self._runner.forget_all()
        message = f"the step failed: {described(error)}"
        return self._output_processor.fail(culprits, message, self._call)

    def _drop(self, request_id: str) -> None:
        self._output_processor.abort(request_id)

    @property
    def _can_restart(self) -> bool:
        return self._followers is None or not self._followers.is_closed

    def _restart(self) -> None:
        self._output_processor.restart(self._call)

    def check_sampling(self, params: SamplingParams) -> None:
        """Reject sampling parameters that no request could run with.

        Raises:
            ValueError: the model has no such tokens, no tokenizer for stop strings, or no head.
        """
        self._inputs.check_sampling(params)

    @property
    def checkpoint_token_ids(self) -> Mapping[str, str]:
        """Token ids that the checkpoint ends on, suppresses or forbids, with their source."""
        return self._inputs.checkpoint_token_ids

    def extend_request(self, request_id: str, prompt: Prompt) -> None:
        """Append the next chunk of a prompt; ignored if the request is not live.

        Speech may end before its text. See :class:`~engine.interface.engine.Engine`.
        """
        group = self._live.get(request_id)
        if group is not None:
            self._inputs.prompts.extend(group.completions[0].request, prompt)
            self._scheduler.wake(self._output_processor.live(request_id))

    def needs_input(self, request_id: str) -> bool:
        """Return True if a live request cannot continue before its next chunk."""
        return any(request.needs_input for request in self._output_processor.live(request_id))

    def pause(self, request_id: str) -> None:
        """Pause a live request until it is resumed; its blocks and seat are preempted first."""
        for request in self._output_processor.live(request_id):
            self._scheduler.pause(request)

    def resume(self, request_id: str) -> None:
        """Resume a paused request; does nothing if it is not paused, or not live."""
        for request in self._output_processor.live(request_id):
            self._scheduler.resume(request)

    def partial_outputs(
        self, request_id: str, first_row: int, names: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        """Return the known output rows of a live request from ``first_row`` on.

        These are the computed rows, plus the newest token's row if all requested outputs are
        derived from the codes that were sampled with it, see :meth:`CausalModel.drawn_rows`.

        Args:
            request_id: id of a live request; its first completion is used.

        Returns:
            ``name -> (num_known - first_row, ...)`` on the CPU. Empty while there are no such
            rows, for example while they are recomputed after a preemption.

        Raises:
            ValueError: no such request is live.
        """
        if request_id not in self._live:
            raise ValueError(f"request {request_id!r} is not live")
        request = self._live[request_id].completions[0].request
        num_computed = request.num_computed_tokens
        if request.status is not RequestStatus.RUNNING or num_computed < first_row:
            return {}
        rows = self._kv.gather_outputs(request.request_id, num_computed, first_row, names)
        if ROW_KEYS in (names or ()):
            rows[ROW_KEYS] = self._row_keys.of(request, first_row, num_computed)
        drawn = self._runner.drawn_rows(request) if num_computed == request.num_tokens - 1 else {}
        if rows.keys() <= drawn.keys():
            return {name: torch.cat((part, drawn[name].to(part))) for name, part in rows.items()}
        return rows if num_computed > first_row else {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to the end, in one batch as far as the limits allow.

        Requires exclusive use of the engine: outputs of other requests would be lost.

        Args:
            sampling: parameters for all prompts, or one per prompt.

        Returns:
            One finished output per prompt, in order.

        Raises:
            ValueError: a prompt cannot run (then none has run) or is only a first chunk, the
                lengths differ, or other requests are live.
        """
        _check_exclusive(self, "generate")
        batch = _as_list(prompts)
        for prompt in batch:
            _check_complete(prompt)
        if sampling is None or isinstance(sampling, SamplingParams):
            params = [sampling] * len(batch)
        else:
            if isinstance(sampling, Mapping):
                check_sampling_argument(sampling)
            wanted = "SamplingParams, or a list of one for each prompt"
            check_argument("sampling", sampling, Sequence, wanted)
            params = list(sampling)
        if len(params) != len(batch):
            raise ValueError(f"got {len(batch)} prompts but {len(params)} sampling parameters")
        ids = [f"generate-{index}" for index in range(len(batch))]
        done: dict[str, RequestOutput] = {}
        has_entered = self.ownership.enter()
        try:
            for request_id, prompt, param in zip(ids, batch, params, strict=True):
                self.add_request(request_id, prompt, param)
            while len(done) < len(ids):
                done.update({o.request_id: o for o in self.step() if o.finished})
        finally:
            for request_id in ids:
                self.abort(request_id)
            if has_entered:
                self.ownership.leave()
        return [done[request_id] for request_id in ids]

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Yield the request's output after every step with progress; closing early aborts it.

        Raises:
            ValueError: the prompt cannot run or is only a first chunk, or other requests are live;
                see :meth:`generate`.
        """
        _check_exclusive(self, "stream")
        _check_complete(prompt)
        request_id = "stream"
        self.add_request(request_id, prompt, sampling)
        try:
            while request_id in self._live:
                for output in self.step():
                    if output.request_id == request_id:
                        yield output
        finally:
            self.abort(request_id)

    @property
    def enable_prefix_caching(self) -> bool:
        """True if prefixes are reused; may be set while no request is live."""
        return self._kv.enable_prefix_caching

    @enable_prefix_caching.setter
    def enable_prefix_caching(self, value: bool) -> None:
        if self._live:
            raise ValueError(
                f"prefix caching cannot be switched while {len(self._live)} requests are live"
            )
        self._kv.enable_prefix_caching = value

    def _reset_prefix_cache(self) -> None:
        self._kv.reset_prefix_cache()
        self._row_keys.renew()
        if self._offloaded is not None:
            self._offloaded.forget()
        if self._encoder_cache_manager is not None:
            self._encoder_cache_manager.forget()

    def stats(self) -> EngineStats:
        """Return the counters; only ``step`` changes them."""
        counted, items = self._output_processor.stats, self._encoder_cache_manager
        return replace(
            counted,
            generated_tokens=self._output_processor.num_generated_tokens,
            num_steps=self._num_steps,
            busy_s=self._busy_s,
            encoder_runs=counted.encoder_runs if items is None else items.num_encoded,
            encoder_hits=counted.encoder_hits if items is None else items.num_hits,
            num_preemptions=self._scheduler.num_preemptions,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            kv=self._kv.stats(),
            offload=None if self._offloaded is None else self._offloaded.stats(),
        )

    def close(self) -> None:
        """See :meth:`Engine.close`; pending disk writes are completed first."""
        is_over = self.ownership.is_over
        super().close()
        if self._followers is not None and not is_over:
            self._followers.close()
        if self._offloaded is not None and not is_over:
            self._offloaded.close()

    def describe(self) -> Mapping[str, Any]:
        """Describe the engine's resolved settings and reserved memory."""
        plan = self.memory_plan.describe(self.hidden_size, self.enable_prefix_caching)
        read = list(self._inputs.prompts.modalities)
        return {"input_modalities": read, **plan} if read else plan

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` with the failed equation if blocks are not conserved."""
        items = self._encoder_cache_manager
        check_integrity(self._kv, () if items is None else items.tables())
        if self._swap is not None:
            check_pool_integrity(self._swap.pool, self._swap.tables())

"""Runs a bidirectional text encoder: one forward pass per batch, outputs cached by whole input."""

from __future__ import annotations

import inspect
import time
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from engine.checkpoints.config_file import describe, hidden_progress_bars
from engine.checkpoints.weight_files import WeightFiles
from engine.encoder.sentence_layout import Pooling, pool, resolve_pooling
from engine.inputs.prompt_processor import refuse_items
from engine.inputs.prompt_tokens import InputLimits, resolve_prompt, truncated
from engine.interface.arguments import check_argument, check_names
from engine.interface.config import EngineConfig
from engine.interface.engine import Engine, NewRequest
from engine.interface.log_fields import package_logger
from engine.interface.outputs import EncoderOutput, EngineStats, RequestMetrics
from engine.interface.placed_error import described
from engine.interface.sampling_params import SamplingParams
from engine.models.base import weight_nbytes
from engine.models.model_loader import open_configured
from engine.resources.device import (
    on_device,
    require_finite,
    resolve_device,
    resolve_dtype,
)
from engine.resources.memory_plan import MemoryPlan, resolve_num_blocks
from engine.text.tokenizer import load_tokenizer, max_prompt_chars
from prefix_cache import (
    BlockHash,
    BlockPool,
    ContentSpan,
    KVCacheBlock,
    KVCacheStats,
    StageOutputCache,
    WholeInputCache,
    check_pool_integrity,
    content_hash,
    whole_input_hash,
)


class EncoderModel:
    """A checkpoint's encoder, with its input and output properties.

    Attributes:
        architecture: class name of the model.
        nbytes: bytes of the weights.
        hidden_size: width of an input embedding row.
        max_positions: maximum tokens of an input; None if the architecture has no limit.
        takes_embeds: True if it accepts embedding rows instead of ids.
        row_nbytes: the per-token output tensors of a forward pass, with the bytes of one row.
        pooler: the checkpoint's own pooling head: ``(1, n, hidden) -> (1, D)``; None if it has
            none, or one that cannot be applied to stored hidden states.

    Raises:
        ValueError: the model is not a bidirectional encoder, or weights are missing.
    """

    def __init__(
        self,
        folder: str,
        config: PreTrainedConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        trust_remote_code: bool = False,
    ) -> None:
        if getattr(config, "is_encoder_decoder", False):
            names = getattr(config, "architectures", None) or [config.model_type]
            raise ValueError(
                f"{names[0]} is an encoder-decoder; EncoderEngine runs encoder-only models (BERT, "
                "RoBERTa, DistilBERT, ...). Its encoder alone is not supported yet"
            )
        self.dtype = dtype
        self.device = device
        self._module, missing = _load(folder, config, dtype, trust_remote_code)
        self.architecture, self.nbytes = type(self._module).__name__, weight_nbytes(self._module)
        nn.Module.to(self._module, device).eval()
        embeddings = self._module.get_input_embeddings()
        if not isinstance(embeddings, nn.Embedding):
            raise ValueError(
                f"{self.architecture} embeds its input by no table: it is no text encoder"
            )
        self.vocab_size, self.hidden_size = embeddings.num_embeddings, embeddings.embedding_dim
        self.max_positions = _max_positions(self._module)
        self.takes_embeds = "inputs_embeds" in inspect.signature(self._module.forward).parameters
        # Padding is masked, but RoBERTa derives positions from this id.
        pad_id: Any = getattr(config, "pad_token_id", None)
        self._pad_id = int(pad_id) if pad_id in range(self.vocab_size) else 0
        self._check_is_bidirectional(folder)
        # Find per-token outputs by two batch shapes: with one, D might equal the length.
        token = torch.tensor([1 % self.vocab_size])
        small, large = self.forward([token.repeat(2)] * 2), self.forward([token.repeat(3)])
        self.row_nbytes = {name: small[name][0].nbytes for name in small if name in large}
        self.pooler = None if missing else self._usable_pooler()

    def forward(self, batch: Sequence[Tensor]) -> dict[str, Tensor]:
        """Run several inputs in one pass, padded to the longest."""
        lengths = torch.tensor([len(entry) for entry in batch])
        if batch[0].ndim == 2:
            embeds = pad_sequence([e.to(self.dtype) for e in batch], batch_first=True)
            return self._forward(lengths, inputs_embeds=embeds.to(self.device))
        ids = pad_sequence(list(batch), batch_first=True, padding_value=self._pad_id)
        return self._forward(lengths, input_ids=ids.to(self.device))

    @torch.inference_mode()
    def _forward(self, lengths: Tensor, **inputs: Tensor) -> dict[str, Tensor]:
        longest = int(lengths.max())
        mask = torch.arange(longest) < lengths[:, None]
        with on_device(self.device):
            output = self._module(
                **inputs, attention_mask=mask.to(self.device, torch.int64), return_dict=True
            )
        batch_shape = tuple(mask.shape)
        keep = mask.to(self.device)
        return {
            "hidden_states" if name == "last_hidden_state" else name: value[keep].cpu()
            for name, value in output.items()
            # Anything else, such as a pooled row, is not per token.
            if isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == batch_shape
        }

    def _check_is_bidirectional(self, folder: str) -> None:
        """Raise ``ValueError`` for a causal model, whose first row ignores the second token."""
        first, second = 1 % self.vocab_size, 2 % self.vocab_size
        pair = [torch.tensor([first, first]), torch.tensor([first, second])]
        rows = self.forward(pair)["hidden_states"]
        if torch.equal(rows[0], rows[2]):
            raise ValueError(
                f"{self.architecture} in {folder} attends to earlier tokens only: it is a causal "
                "decoder. "
                "LLMEngine runs those (max_tokens=0 runs the prompt only), with true prefix hits"
            )

    @torch.inference_mode()
    def _usable_pooler(self) -> nn.Module | None:
        """Return the module's ``pooler`` if applying it to hidden states reproduces its output."""
        pooler = getattr(self._module, "pooler", None)
        if not isinstance(pooler, nn.Module):
            return None
        ids = torch.tensor([[1 % self.vocab_size, 2 % self.vocab_size, 1 % self.vocab_size]])
        output = self._module(input_ids=ids.to(self.device), return_dict=True)
        expected = output.get("pooler_output")
        if expected is None:
            return None
        applied = pooler(output.last_hidden_state)
        same = isinstance(applied, Tensor) and applied.shape == expected.shape
        return pooler if same and torch.allclose(applied, expected, atol=1e-3) else None


def _load(
    folder: str, config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool
) -> tuple[PreTrainedModel, bool]:
    """Load the module; also return True if the checkpoint lacks the weights of its pooler."""
    try:
        _check_weights(Path(folder), config, trust_remote_code)
        with hidden_progress_bars():
            module, info = AutoModel.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                output_loading_info=True,
                trust_remote_code=trust_remote_code,
            )
    # Values of a wrong type make transformers raise arbitrary exceptions.
    except Exception as error:
        raise ValueError(f"cannot load an encoder from {folder}: {describe(error)}") from error
    missing = sorted(info["missing_keys"])
    lacking = [name for name in missing if not name.startswith("pooler.")]
    if lacking:
        raise ValueError(
            f"{folder} lacks {len(lacking)} weights of {type(module).__name__}: "
            + ", ".join(lacking[:5])
        )
    return module, bool(missing)


def _check_weights(folder: Path, config: PreTrainedConfig, trust_remote_code: bool) -> None:
    """Compare the files' headers with the module on the meta device, before allocating weights."""
    with torch.device("meta"):
        module = AutoModel.from_config(deepcopy(config), trust_remote_code=trust_remote_code)
    # A checkpoint with a head prefixes the module's names.
    targets, prefix = module.state_dict(), f"{module.base_model_prefix}."
    files = WeightFiles(folder)
    named = {name: name.removeprefix(prefix) for name in files.files}
    files.check({name: targets[own] for name, own in named.items() if own in targets})


def _max_positions(module: PreTrainedModel) -> int | None:
    for name, part in module.named_modules():
        if name.endswith("position_embeddings") and isinstance(part, nn.Embedding):
            # RoBERTa and its variants count positions from one after the padding index.
            offset = 0 if part.padding_idx is None else part.padding_idx + 1
            return part.num_embeddings - offset
    return getattr(module.config, "max_position_embeddings", None)


@dataclass(slots=True, eq=False)
class EncoderRequest:
    """A validated input.

    Attributes:
        request_id: unique among the engine's live requests.
        content: ``(n,)`` int64 token ids, or ``(n, hidden_size)`` embeddings; on the CPU.
        input_hash: hash of everything that determines the output, including the salt.
        arrival: arrival time, by ``time.monotonic``.
        blocks: blocks of its rows, held for one step.
    """

    request_id: str
    content: Tensor
    input_hash: BlockHash
    priority: int
    arrival_index: int
    arrival: float = field(default_factory=time.monotonic)
    blocks: Sequence[KVCacheBlock] = ()

    @property
    def block_ids(self) -> list[int]:
        """The block table."""
        return [block.block_id for block in self.blocks]

    @property
    def num_tokens(self) -> int:
        """Number of tokens or embedding rows."""
        return self.content.shape[0]

    @property
    def is_embeds(self) -> bool:
        """True if ``content`` replaces the model's own embeddings."""
        return self.content.ndim == 2

    def output(
        self,
        tensors: Mapping[str, Tensor],
        *,
        started: float,
        num_cached_tokens: int = 0,
        error: str | None = None,
    ) -> EncoderOutput:
        """Build the output; ``started`` is the start of its step by ``time.monotonic``."""
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


def next_batch(
    waiting: Sequence[EncoderRequest],
    max_num_seqs: int,
    max_num_batched_tokens: int,
    *,
    share: bool,
) -> list[EncoderRequest]:
    """Choose the next batch.

    A batch is one padded rectangle, so its cost is ``longest * inputs``::

        head  ■ ■ ■ ■ ■ ■          the first in the order is always included: no input starves
        mate  ■ ■ ■ ■ ■ ■          then those of the nearest length
        mate  ■ ■ ■ ■ ■ ·
        mate  ■ ■ ■ ■ · ·          at most half of the rectangle is padding

    Args:
        waiting: requests in queue order.
        share: leave out duplicates of inputs in the batch: they find its outputs in the next step.

    Returns:
        The head of the queue and its mates, all token ids or all embeddings.
    """
    if not waiting:
        return []
    head = waiting[0]
    mates = sorted(
        (r for r in waiting[1:] if r.is_embeds == head.is_embeds),
        key=lambda r: (r.priority, abs(r.num_tokens - head.num_tokens), r.arrival_index),
    )
    batch, hashes = [head], {head.input_hash}
    for mate in mates:
        if len(batch) == max_num_seqs:
            break
        lengths = [r.num_tokens for r in (*batch, mate)]
        cells = max(lengths) * len(lengths)
        fits = cells <= max_num_batched_tokens and cells <= 2 * sum(lengths)
        if fits and not (share and mate.input_hash in hashes):
            batch.append(mate)
            hashes.add(mate.input_hash)
    return batch


logger = package_logger(__name__)


class EncoderEngine(Engine[EncoderOutput]):
    """Runs one text encoder: batching by length, outputs kept in the stage-output cache.

    A bidirectional encoder's rows depend on the whole input, so a hit is all or nothing. Cached and
    uncached inputs share one code path; a hit only skips the forward pass. ::

        waiting ──► found? ──────────────────────────────► gather ─► pool ─► output
                      └ no ─► batch ─► forward ─► write ─────┘
                                                    └ publish (when caching)

    Args:
        config: the model and its limits. ``max_num_batched_tokens`` bounds the padded size of a
            batch and thereby the longest input: a bidirectional encoder cannot run in chunks.
        output_names: outputs to return (``hidden_states``, ``pooled``, ...); None returns all.
        pooling: see :data:`engine.encoder.sentence_layout.Pooling`.

    Attributes:
        pooling: the resolved pooling, never ``auto``.

    Raises:
        ValueError: the checkpoint, a limit or an output name is invalid.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        output_names: Collection[str] | None = None,
        pooling: Pooling = "auto",
    ) -> None:
        check_argument("config", config, EngineConfig, "an EngineConfig", "EngineConfig(model={})")
        check_names("output_names", output_names, or_none=True)
        if config.tensor_parallel > 1:
            raise ValueError(
                "tensor_parallel divides the layers of a decoder; an encoder engine has none: "
                "leave it out"
            )
        if config.offload is not None:
            raise ValueError(
                "offload keeps blocks of a decoder's KV cache; an encoder engine has none: leave "
                "it out"
            )
        checkpoint = open_configured(config)
        checkpoint.require_plain()
        # Raises if the weight files are invalid, before they are loaded.
        checkpoint.weight_files  # noqa: B018
        device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, getattr(checkpoint.config, "dtype", None), device)
        self.config = config
        self._model = EncoderModel(
            str(checkpoint.path),
            checkpoint.config,
            dtype=dtype,
            device=device,
            trust_remote_code=config.trust_remote_code,
        )
        self.tokenizer: PreTrainedTokenizerBase | None = load_tokenizer(
            str(checkpoint.path),
            trust_remote_code=config.trust_remote_code,
            config=checkpoint.whole_config,
        )
        self.hidden_size: int = self._model.hidden_size
        self.dtype = dtype
        self.max_model_len = _max_model_len(config, self._model)
        self.pooling = resolve_pooling(pooling, self._model.pooler)
        self._output_names = self._check_output_names(output_names)
        # The requested outputs, and the rows that they are computed from.
        pooled_from = {"hidden_states"} if "pooled" in self._output_names else set()
        self._stored = self._output_names - {"pooled"} | pooled_from
        self.memory_plan = self._plan_memory()
        self._hit_tokens = self._queried_tokens = 0
        self._clear_cache()
        self._enable_prefix_caching = config.enable_prefix_caching
        self._limits = self._input_limits()
        self._live: dict[str, EncoderRequest] = {}
        # The mark of the last step's call, and the requests that were live before it.
        self._before: tuple[object, dict[str, EncoderRequest]] = None, {}
        self._stats = EngineStats()
        for line in self.memory_plan.lines():
            logger.info("%s: %s", config.model, line)

    def check_sampling(self, params: SamplingParams) -> None:
        """Refuse all but ``truncate_prompt_tokens``, and more tokens than the model accepts."""
        if not params.only_truncates:
            super().check_sampling(params)
        if params.truncate_prompt_tokens is not None:
            self._limits.num_kept_tokens(params)

    def _prepare(self, new: NewRequest) -> EncoderRequest:
        """Prepare text, chat messages, token ids, or embeddings if the model accepts them."""
        prompt, params = new.prompt, new.sampling
        if params is not None:
            self.check_sampling(params)
        refuse_items(prompt)
        if params is not None and params.truncate_prompt_tokens is not None:
            kept = self._limits.num_kept_tokens(params)
            prompt = truncated(prompt, self.tokenizer, self._limits, kept, keeps_end=False)
        token_ids, embeds = resolve_prompt(prompt, self.tokenizer, self._limits)
        budget, usable_tokens = self.config.max_num_batched_tokens, self.memory_plan.num_tokens
        if len(token_ids) > budget:
            raise ValueError(
                f"the input has {len(token_ids)} tokens, but max_num_batched_tokens is {budget}: a "
                "bidirectional encoder needs its whole input in one step"
            )
        if len(token_ids) > usable_tokens:
            raise ValueError(
                f"the request can never fit: {len(token_ids)} tokens, the whole cache holds "
                f"{usable_tokens}; raise num_blocks"
            )
        spans: tuple[ContentSpan, ...] = ()
        if embeds is not None:
            if not self._model.takes_embeds:
                raise ValueError(f"{self._model.architecture} takes token ids, not embeddings")
            embeds = embeds.cpu()
            spans = (ContentSpan("prompt_embeds", 0, len(token_ids), content_hash(embeds)),)
        return EncoderRequest(
            request_id=new.request_id,
            content=torch.tensor(token_ids) if embeds is None else embeds,
            input_hash=whole_input_hash(token_ids, spans=spans, salt=new.cache_salt),
            priority=new.priority,
            arrival_index=new.order,
        )

    def _add(self, content: EncoderRequest) -> None:
        self._live[content.request_id] = content

    def _step(self) -> list[EncoderOutput]:
        """Answer cached inputs, then run one batch; return the outputs, empty if idle."""
        if not self._live:
            return []
        started, clock = time.monotonic(), time.perf_counter()
        self._before = self._call, dict(self._live)
        order = sorted(self._live.values(), key=lambda r: (r.priority, r.arrival_index))
        outputs = self._answer_cached(order, started) if self._enable_prefix_caching else []
        waiting = [request for request in order if request.request_id in self._live]
        # The rounding of a padded batch depends on its other inputs.
        max_num_seqs = 1 if self.config.deterministic else self.config.max_num_seqs
        limits = max_num_seqs, self.config.max_num_batched_tokens
        batch: list[EncoderRequest] = []
        # Take as much of a batch as there are blocks for; the head alone always fits.
        for request in next_batch(waiting, *limits, share=self._enable_prefix_caching):
            if self._inputs.num_blocks_for(request.num_tokens) > self._pool.num_free():
                break
            request.blocks = self._inputs.allocate(request.num_tokens)
            batch.append(request)
        if batch:
            outputs += self._run(batch, started)
        self._stats = self._stats.plus(num_steps=1, busy_s=time.perf_counter() - clock)
        return outputs

    def _restart(self) -> None:
        """Requeue all inputs, including those of an interrupted step, which emitted nothing."""
        if self._before[0] is self._call:
            self._live = self._before[1]
        self._clear_cache()

    def _clear_cache(self) -> None:
        """Drop all cached inputs, even held ones, in any state an interrupted call left them."""
        num_blocks, block_size = self.memory_plan.num_blocks, self.config.block_size
        self._pool = BlockPool.uniform(num_blocks)
        generations = self._pool.generations(0)
        self._rows = StageOutputCache(num_blocks, block_size, generations, self._stored)
        self._inputs = WholeInputCache(self._pool, self._rows, block_size)

    @property
    def enable_prefix_caching(self) -> bool:
        """True if outputs are reused; can be set while no request is live."""
        return self._enable_prefix_caching

    @enable_prefix_caching.setter
    def enable_prefix_caching(self, value: bool) -> None:
        if self._live:
            raise ValueError(
                f"caching cannot be switched while {len(self._live)} requests are live"
            )
        self._enable_prefix_caching = value

    def _reset_prefix_cache(self) -> None:
        self._pool.reset()

    def stats(self) -> EngineStats:
        """Return the counters; only ``step`` increases them."""
        found = KVCacheStats.of_pool(self._pool, self._hit_tokens, self._queried_tokens)
        found = replace(found, output_bytes=self._rows.nbytes)
        return replace(self._stats, num_waiting=len(self._live), kv=found)

    def describe(self) -> Mapping[str, Any]:
        """Describe the resolved settings and reserved memory."""
        plan = self.memory_plan.describe(self.hidden_size, self._enable_prefix_caching)
        return plan if self.tokenizer is None else {"input_modalities": ["text"], **plan}

    def check_integrity(self) -> None:
        """Raise ``IntegrityError``, naming the failed equation, if blocks are not conserved."""
        check_pool_integrity(self._pool, tables=())

    def _answer_cached(
        self, order: Sequence[EncoderRequest], started: float
    ) -> list[EncoderOutput]:
        """Answer every waiting input whose outputs are cached."""
        outputs: list[EncoderOutput] = []
        for request in order:
            blocks = self._inputs.find(request.input_hash, request.num_tokens)
            if blocks is not None:
                request.blocks = blocks
                self._hit_tokens += request.num_tokens
                self._queried_tokens += request.num_tokens
                outputs.append(self._answer(request, started, cached=True))
        return outputs

    def _run(self, batch: Sequence[EncoderRequest], started: float) -> list[EncoderOutput]:
        """Compute a batch; if it fails, each input alone, so that only the culprit fails."""
        try:
            rows = self._model.forward([request.content for request in batch])
            slots = [
                self._rows.slots(torch.tensor(request.block_ids))[: request.num_tokens]
                for request in batch
            ]
            self._rows.write(torch.cat(slots), rows)
        except Exception as error:  # usually one input's fault: find it
            if len(batch) > 1:
                return [output for request in batch for output in self._run([request], started)]
            return [self._fail(batch[0], error, started)]
        return [self._answer(request, started, cached=False) for request in batch]

    def _answer(self, request: EncoderRequest, started: float, *, cached: bool) -> EncoderOutput:
        """Gather and pool an input's rows, in the same way for a hit and a miss."""
        try:
            tensors = self._gather(request, cached=cached)
        except Exception as error:  # the rest of the batch continues
            return self._fail(request, error, started)
        if self._enable_prefix_caching and not cached:
            self._queried_tokens += request.num_tokens
            self._inputs.publish(request.input_hash, request.num_tokens, request.blocks)
        self._retire(request)
        num_cached_tokens = request.num_tokens if cached else 0
        self._stats = self._stats.plus(cached_tokens=num_cached_tokens)
        return request.output(tensors, started=started, num_cached_tokens=num_cached_tokens)

    # Not inference_mode: users may use the tensors freely.
    @torch.no_grad()
    def _gather(self, request: EncoderRequest, *, cached: bool) -> Mapping[str, Tensor]:
        rows = self._rows.gather(request.block_ids, request.num_tokens)
        missing = self._rows.wanted - rows.keys()
        if missing:
            raise RuntimeError(f"the model gave no rows of {', '.join(sorted(missing))}")
        if not cached:  # all rows, as all are published; cached rows were checked before
            require_finite(rows)
        if "pooled" in self._output_names:
            rows["pooled"] = pool(self.pooling, rows["hidden_states"], self._model.pooler)
        return {name: tensor for name, tensor in rows.items() if name in self._output_names}

    def _fail(self, request: EncoderRequest, error: Exception, started: float) -> EncoderOutput:
        about = {"request_id": request.request_id}
        logger.error("request %(request_id)s failed", about, exc_info=error, extra=about)
        self._retire(request)
        message = f"the encoder failed: {described(error)}"
        return request.output({}, started=started, error=message)

    def _retire(self, request: EncoderRequest) -> None:
        self._inputs.release(request.blocks)
        del self._live[request.request_id]
        self._stats = self._stats.plus(prompt_tokens=request.num_tokens)

    def _check_output_names(self, wanted: Collection[str] | None) -> frozenset[str]:
        known = {*self._model.row_nbytes, "pooled"}
        unknown = sorted(set(wanted or ()) - known)
        if unknown:
            raise ValueError(
                f"{self._model.architecture} has no output {', '.join(map(repr, unknown))}; "
                f"it gives {', '.join(sorted(known))}"
            )
        return frozenset(known if wanted is None else wanted)

    def _plan_memory(self) -> MemoryPlan:
        config, model = self.config, self._model
        block_nbytes = {name: model.row_nbytes[name] * config.block_size for name in self._stored}
        num_blocks = resolve_num_blocks(
            # Rows are kept on the host, regardless of the model's device.
            config,
            max(1, sum(block_nbytes.values())),
            lambda num_tokens, count: -(-num_tokens // config.block_size) * count,
            self.max_model_len,
            torch.device("cpu"),
        )
        return MemoryPlan(
            device=str(model.device),
            dtype=str(model.dtype).removeprefix("torch."),
            weights_bytes=model.nbytes,
            num_blocks=num_blocks,
            block_size=config.block_size,
            page_bytes=0,
            max_model_len=self.max_model_len,
            stage_output_bytes={
                name: num_blocks * nbytes for name, nbytes in sorted(block_nbytes.items())
            },
        )

    def _input_limits(self) -> InputLimits:
        longest, limits = self.max_model_len, self.config.limits
        return InputLimits(
            max_model_len=longest,
            hidden_size=self.hidden_size,
            vocab_size=self._model.vocab_size,
            num_logits=0,
            block_size=self.config.block_size,
            usable_tokens=self.memory_plan.num_tokens,
            dtype=self.dtype,
            max_prompt_chars=max_prompt_chars(self.tokenizer, longest, limits.max_prompt_chars),
            requests=limits,
        )


def _max_model_len(config: EngineConfig, model: EncoderModel) -> int:
    limit = model.max_positions
    if config.max_model_len is None:
        return config.max_num_batched_tokens if limit is None else limit
    if limit is not None and config.max_model_len > limit:
        raise ValueError(
            f"max_model_len {config.max_model_len} is longer than the {limit} positions of "
            f"{model.architecture} in {config.model!r}"
        )
    return config.max_model_len

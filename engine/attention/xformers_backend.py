"""Attention with xformers on CUDA.

Decodes read the pages in place, through Triton split-K and a paged bias. Prefills gather their keys
and run torch's flash attention with a block-diagonal bias: the paged kernels take no long causal
queries. xformers caps no scores and adds no biases to pages': such layers run as in torch.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from engine.attention.backend import AttentionBackend, LayerCall
from engine.attention.metadata import AttentionMetadata
from engine.attention.paged_rows import write_kv
from engine.attention.scoring import Scoring
from engine.attention.torch_backend import TorchBackend
from engine.attention.xformers_masks import (
    decode_bias,
    prefill_bias,
    prefill_slots,
    with_a_key_for_all,
)
from engine.interface.placed_error import described
from engine.resources.device import on_device
from engine.resources.finite_numbers import require_finite
from prefix_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroup, PagedMemory

__all__ = ["XformersBackend"]

_DTYPES = (torch.float16, torch.bfloat16)
# Keys that split-K reads at once; a page must hold a whole number of such tiles.
_KEY_TILES = (64, 32, 16)
_MIN_CAPABILITY = (8, 0)


class XformersBackend(AttentionBackend):
    """Attention on NVIDIA GPUs of compute capability 8.0 and later, in half precision.

    Args:
        device: where queries and pages live.
        dtype: their type, float16 or bfloat16.
        block_size: tokens per block, a multiple of 16.
    """

    name: ClassVar[str] = "xformers"

    def __init__(self, device: torch.device, dtype: torch.dtype, block_size: int) -> None:
        self._device = device
        self._key_tile = _key_tile(block_size)
        # Made with the first layer of a step, which brings the geometry of the pages.
        self._decode_bias: Any = None
        self._prefill_bias: Any = None
        self._prefill_rows: Tensor | None = None
        self._blind_tokens: Tensor | None = None
        self._ready = False
        self._torch = TorchBackend(device, dtype)
        self._torch_ready = False

    @classmethod
    def check_support(cls, device: torch.device, dtype: torch.dtype, block_size: int) -> None:
        """CUDA, half precision, and blocks of a multiple of 16 tokens; see also :meth:`probe`."""
        if device.type != "cuda":
            raise ValueError(f"the xformers backend runs on CUDA devices only, not on {device}")
        if dtype not in _DTYPES:
            raise ValueError(f"the xformers backend needs float16 or bfloat16, got {dtype}")
        _key_tile(block_size)
        capability = torch.cuda.get_device_capability(device)
        if capability < _MIN_CAPABILITY:
            raise ValueError(
                f"the xformers backend needs compute capability 8.0 or later, "
                f"{device} has {capability[0]}.{capability[1]}"
            )

    @classmethod
    @cache
    def probe(
        cls, device: torch.device, dtype: torch.dtype, block_size: int, head_dim: int
    ) -> None:
        """Attend to a few zeros, in a decode and a prefill: only the kernels know if they run.

        Raises:
            ValueError: with the reason that xformers or Triton gave.
        """
        try:
            with on_device(device), torch.inference_mode():
                cls._attend_to_zeros(device, dtype, block_size, head_dim)
        except Exception as error:  # a missing package, library or compiler, or a refused input
            reason = " ".join(described(error).split())
            raise ValueError(
                f"the xformers backend cannot run with {dtype}, block_size {block_size} and heads "
                f"of {head_dim} on {device}: {reason}"
            ) from error

    @classmethod
    def _attend_to_zeros(
        cls, device: torch.device, dtype: torch.dtype, block_size: int, head_dim: int
    ) -> None:
        group = KVCacheGroup(("probe",), FullAttentionSpec(block_size, 1, head_dim, dtype))
        memory = PagedMemory(KVCacheConfig(3, (group,)), device)
        slots = torch.tensor((block_size + 1, 2 * block_size + 1, 2 * block_size + 2))
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor((0, 1, 3), dtype=torch.int32),
            seq_lens=torch.tensor((2, 3), dtype=torch.int32),
            block_table=torch.tensor(((1,), (2,)), dtype=torch.int32, device=device),
            slot_mapping=slots.to(device),
            row_mapping=memory.row_mapping(0, slots).to(device),
            num_decodes=1,
            block_size=block_size,
        )
        query = torch.zeros(3, 2, head_dim, dtype=dtype, device=device)
        key = query[:, :1]
        backend = cls(device, dtype, block_size)
        backend.begin_step(metadata)
        call = LayerCall(query, key, key, memory.layer(0, 0), metadata, Scoring(1.0))
        require_finite({"outputs": backend.forward(call)})

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Forget the step before; see :meth:`_prepare`."""
        self._ready = self._torch_ready = False

    def _prepare(self, metadata: AttentionMetadata, chunks_per_page: int) -> None:
        """Make the biases, and the rows that prefills gather."""
        self._decode_bias = self._prefill_bias = self._prefill_rows = None
        metadata, self._blind_tokens = with_a_key_for_all(metadata)
        if metadata.num_decodes:
            self._decode_bias = decode_bias(metadata, chunks_per_page)
        if metadata.num_decodes < metadata.num_reqs:
            self._prefill_bias = prefill_bias(metadata, self._device)
            slots = prefill_slots(metadata)
            if slots is not None:
                block_size = metadata.block_size
                rows_between_pages = (chunks_per_page - 1) * block_size
                self._prefill_rows = slots + slots // block_size * rows_between_pages
        self._ready = True

    def forward(self, call: LayerCall) -> Tensor:
        """See :meth:`AttentionBackend.forward`."""
        query, key, value, kv_cache, metadata, scoring = call
        if not scoring.only_scales:
            if not self._torch_ready:
                self._torch.begin_step(metadata)
                self._torch_ready = True
            return self._torch.forward(call)
        if not self._ready:
            self._prepare(metadata, kv_cache.chunks_per_page)
        write_kv(key, value, kv_cache, metadata.row_mapping)
        parts: list[Tensor] = []
        if self._decode_bias is not None:
            # The kernel wants both views equally long. What is cut off holds no key: the last
            # chunk of the buffer is a value chunk, of this layer or of a later one.
            keys = kv_cache.keys[: kv_cache.values.shape[0]]
            decodes = query[: metadata.num_decodes]
            attended = self._attend(
                decodes, keys, kv_cache.values, self._decode_bias, scoring.scale, paged=True
            )
            parts.append(attended)
        if self._prefill_bias is not None:
            prefills = query[metadata.num_decodes :]
            if self._prefill_rows is None:
                keys, values = key[metadata.num_decodes :], value[metadata.num_decodes :]
            else:
                keys = kv_cache.keys.index_select(0, self._prefill_rows)
                values = kv_cache.values.index_select(0, self._prefill_rows)
            attended = self._attend(
                prefills, keys, values, self._prefill_bias, scoring.scale, paged=False
            )
            parts.append(attended)
        output = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self._blind_tokens is not None:
            output = output.masked_fill(self._blind_tokens, 0.0)
        return output

    def _attend(
        self, query: Tensor, keys: Tensor, values: Tensor, bias: Any, scale: float, *, paged: bool
    ) -> Tensor:
        """Call xformers; shapes as packed tokens ``(tokens, heads, head_dim)``."""
        from xformers.ops.fmha import memory_efficient_attention_forward

        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads = keys.shape[1]
        group = num_heads // num_kv_heads
        query = query.reshape(1, num_tokens, num_kv_heads, group, head_dim)
        # Grouped heads are told by a stride of 0, not by copies.
        keys = keys[None, :, :, None].expand(-1, -1, -1, group, -1)
        values = values[None, :, :, None].expand(-1, -1, -1, group, -1)
        operator = _split_k_operator(self._key_tile) if paged else None
        attended = memory_efficient_attention_forward(
            query, keys, values, attn_bias=bias, scale=scale, op=operator
        )
        output: Tensor = attended.reshape(num_tokens, num_heads, head_dim)
        return output


def _key_tile(block_size: int) -> int:
    """The widest tile of keys that divides a page."""
    for tile in _KEY_TILES:
        if block_size % tile == 0:
            return tile
    raise ValueError(
        f"the xformers backend needs a block_size that is a multiple of {_KEY_TILES[-1]}, "
        f"got {block_size}"
    )


@cache
def _split_k_operator(key_tile: int) -> Any:
    """Triton split-K that reads ``key_tile`` keys at once, as pages smaller than 64 need."""
    from xformers.ops.fmha import triton_splitk

    name = f"{triton_splitk.FwOp.NAME}_pages{key_tile}"
    return type(name, (triton_splitk.FwOp,), {"BLOCK_N": key_tile, "NAME": name})

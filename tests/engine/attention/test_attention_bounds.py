"""Windows, chunks of local attention and soft caps: every backend against the reference.

The reference itself against transformers: its masks, and its attention of Gemma 2.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.masking_utils import (
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from engine.attention.metadata import LayerCall, Scoring, chunk_bounds, first_visible
from engine.attention.reference import ReferenceBackend, visibility_mask
from engine.attention.registry import get_backend
from engine.attention.torch_backend import QueryTile, TileMask, TorchBackend, lay_out_prefill
from tests.support.attention_steps import BOUNDS, SHAPES, Bounds, Shape, run_steps
from tests.support.examples import examples
from tests.support.native_kernels import needs_kernels
from tests.support.paged_batch import layer_of, metadata_for, paged_memory, random_block_table

CPU = torch.device("cpu")
ON_A_CPU = pytest.mark.parametrize("name", ["torch", pytest.param("native", marks=needs_kernels)])
ALL_BOUNDS = pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS.keys())


@lru_cache(maxsize=256)  # of one seed; every backend is compared with it
def reference_steps(shape: Shape, bounds: Bounds, softcap: float | None) -> tuple[Tensor, Tensor]:
    return run_steps(ReferenceBackend(), shape, bounds, softcap)


def assert_equals_the_reference(
    name: str, shape: Shape, bounds: Bounds, softcap: float | None
) -> None:
    expected, expected_memory = reference_steps(shape, bounds, softcap)
    backend = get_backend(name, CPU, torch.float32, shape.block_size)
    output, memory = run_steps(backend, shape, bounds, softcap)
    assert expected.isfinite().all()
    # Capped scores are ten times as large, and rounded as much more.
    tolerance = 1e-5 if softcap is None else 5e-5
    torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(memory, expected_memory)


@ON_A_CPU
@pytest.mark.parametrize("softcap", [None, 30.0], ids=["uncapped", "capped"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@ALL_BOUNDS
def test_backend_equals_the_reference_and_reads_nothing_hidden(
    name: str, bounds: Bounds, shape: Shape, softcap: float | None
):
    assert_equals_the_reference(name, shape, bounds, softcap)


@ON_A_CPU
@given(st.data())
@settings(max_examples=examples(60))
def test_backend_equals_the_reference_on_any_bounded_batch(name: str, data: st.DataObject):
    query_lens = sorted(data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=6)))
    seq_lens = tuple(query_len + data.draw(st.integers(0, 60)) for query_len in query_lens)
    num_kv_heads, group = data.draw(st.sampled_from([(1, 3), (2, 2), (3, 1)]))
    block_size = data.draw(st.sampled_from([1, 4, 16]))
    shape = Shape(tuple(query_lens), seq_lens, block_size, num_kv_heads * group, num_kv_heads, 8)
    length = st.none() | st.integers(1, 50)
    bounds = Bounds(window=data.draw(length), chunk_size=data.draw(length))
    softcap = data.draw(st.sampled_from([None, 5.0, 30.0]))
    assert_equals_the_reference(name, shape, bounds, softcap)


def transformers_mask(bounds: Bounds, query_len: int, seq_len: int) -> Tensor:
    queries = torch.arange(seq_len - query_len, seq_len)[:, None]
    keys = torch.arange(seq_len)[None, :]
    batch = torch.zeros(1, 1, dtype=torch.int64)
    mask = torch.ones(query_len, seq_len, dtype=torch.bool)
    window = bounds.window or seq_len
    mask &= sliding_window_causal_mask_function(window)(batch, batch, queries, keys)
    chunk_size = bounds.chunk_size or seq_len
    no_padding = torch.zeros(1, dtype=torch.int64)
    return mask & chunked_causal_mask_function(chunk_size, no_padding)(batch, batch, queries, keys)


@ALL_BOUNDS
@pytest.mark.parametrize(("query_len", "seq_len"), [(1, 1), (1, 40), (30, 30), (5, 70)])
def test_masks_equal_transformers(bounds: Bounds, query_len: int, seq_len: int):
    expected = transformers_mask(bounds, query_len, seq_len)
    mask = visibility_mask(query_len, seq_len, bounds.window, bounds.chunk_size)
    assert torch.equal(mask, expected)
    positions = torch.arange(seq_len - query_len, seq_len)
    firsts = first_visible(positions, bounds.window, bounds.chunk_size)
    assert torch.equal(firsts, expected.int().argmax(1))


@ALL_BOUNDS
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_reference_equals_attention_of_gemma2(bounds: Bounds, softcap: float | None):
    generator = torch.Generator().manual_seed(1)
    memory = paged_memory(
        num_blocks=20, block_size=4, num_layers=2, num_kv_heads=2, head_dim=8, dtype=torch.float64
    )
    table = random_block_table([61], 4, 20, generator)
    metadata = metadata_for(
        memory, [61], [61], table, window=bounds.window, chunk_size=bounds.chunk_size
    )
    query, key, value = (
        torch.randn(61, heads, 8, generator=generator, dtype=torch.float64) for heads in (6, 2, 2)
    )
    layer = layer_of(memory, 1)
    output = ReferenceBackend().forward(
        LayerCall(query, key, value, layer, metadata, Scoring(0.9, softcap))
    )

    module: Any = torch.nn.Module()
    module.num_key_value_groups = 3
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    mask = torch.zeros(61, 61, dtype=torch.float64)
    mask.masked_fill_(~transformers_mask(bounds, 61, 61), float("-inf"))
    expected, _ = eager_attention_forward(
        module.eval(), q, k, v, mask, scaling=0.9, softcap=softcap
    )
    # Its softmax is in float32.
    torch.testing.assert_close(output, expected[0], atol=1e-5, rtol=1e-5)


@given(st.integers(0, 600), st.integers(1, 600), st.none() | st.integers(1, 700))
def test_chunk_bounds_cut_at_every_multiple_and_nowhere_else(
    start: int, length: int, chunk_size: int | None
):
    end = start + length
    bounds = chunk_bounds(start, end, chunk_size)
    inside = [p for p in range(start + 1, end) if chunk_size is not None and p % chunk_size == 0]
    assert bounds == [start, *inside, end]


@ALL_BOUNDS
@pytest.mark.parametrize(("query_len", "seq_len"), [(2, 2), (300, 300), (300, 900), (7, 700)])
def test_tiles_hold_every_query_once_and_what_they_see(
    bounds: Bounds, query_len: int, seq_len: int
):
    memory = paged_memory(num_blocks=60, block_size=16, num_layers=1, num_kv_heads=1, head_dim=8)
    table = random_block_table([seq_len], 16, 60, torch.Generator().manual_seed(0))
    metadata = metadata_for(
        memory, [query_len], [seq_len], table, window=bounds.window, chunk_size=bounds.chunk_size
    )
    prefill = lay_out_prefill(metadata, 0)
    first_key = seq_len - prefill.tiles[-1].keys.stop
    seen = torch.zeros(query_len, seq_len, dtype=torch.bool)
    masks = TileMask(CPU, torch.float32)
    for tile in prefill.tiles:
        keys = slice(first_key + tile.keys.start, first_key + tile.keys.stop)
        assert not seen[tile.queries].any()
        seen[tile.queries, keys] = masks.corner(tile, bounds.window) == 0
    expected = visibility_mask(query_len, seq_len, bounds.window, bounds.chunk_size)
    assert torch.equal(seen, expected)
    assert prefill.is_causal == (query_len == seq_len and bool(expected[:, 0].all()))
    if query_len < seq_len:
        assert prefill.pages is not None
        first_block = int(expected.any(0).nonzero()[0]) // 16
        assert prefill.pages.tolist() == table[0, first_block:].tolist()


def test_tile_masks_follow_a_change_of_window():
    masks = TileMask(CPU, torch.float32)
    tile = QueryTile(slice(0, 2), slice(0, 4))
    seen = [(masks.corner(tile, window) == 0).sum().item() for window in (None, 2, 1, None)]
    assert seen == [7, 4, 2, 7]


def test_decodes_gather_a_window_and_not_the_sequence(monkeypatch: pytest.MonkeyPatch):
    gathered = []
    gather = TorchBackend._gather

    def watch(self: TorchBackend, pages: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        gathered.append(len(pages))
        return gather(self, pages, *args)

    monkeypatch.setattr(TorchBackend, "_gather", watch)
    shape = Shape((1, 1), (700, 90), 4)
    run_steps(get_backend("torch", CPU, torch.float32, 4), shape, Bounds(window=16))
    # The last 16 of 700 positions are 4 blocks, of 90 they touch 5: one bucket of two rows.
    assert set(gathered) == {2 * 5}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_soft_caps_in_half_precision_are_as_near_as_its_rounding(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    memory = paged_memory(
        num_blocks=12, block_size=4, num_layers=1, num_kv_heads=2, head_dim=16, dtype=dtype
    )
    table = random_block_table([21, 9], 4, 12, generator)
    metadata = metadata_for(memory, [1, 5], [21, 9], table, window=8)
    qkv = (4 * torch.randn(6, 8, 16, generator=generator)).to(dtype)
    memory.buffer.view(dtype).copy_(torch.randn(memory.buffer.numel() // 2, generator=generator))
    outputs = []
    for backend in (get_backend("torch", CPU, dtype, 4), ReferenceBackend()):
        backend.begin_step(metadata)
        query, key, value = qkv.split((4, 2, 2), dim=1)
        scoring = Scoring(0.5, 20.0)
        outputs.append(
            backend.forward(LayerCall(query, key, value, layer_of(memory, 0), metadata, scoring))
        )
    # One rounding of the output, nothing of the scores.
    one_rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(outputs[0], outputs[1], atol=one_rounding, rtol=one_rounding)

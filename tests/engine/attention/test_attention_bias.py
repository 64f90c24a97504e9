"""Biases by distance: the reference against T5's own, every backend against the reference."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from engine.attention.layer import Attention, AttentionStep
from engine.attention.metadata import LayerCall, Scoring, bias_at, bias_of_tile
from engine.attention.reference import ReferenceBackend
from engine.attention.registry import get_backend
from prefix_cache import FullAttentionSpec
from tests.support.attention_steps import BOUNDS, SHAPES, Bounds, Shape, run_steps
from tests.support.examples import examples
from tests.support.materialised_xformers import MaterialisedXformers
from tests.support.native_kernels import needs_kernels
from tests.support.paged_batch import (
    cross_metadata_for,
    layer_of,
    metadata_for,
    paged_memory,
    random_block_table,
)

CPU = torch.device("cpu")
ON_A_CPU = pytest.mark.parametrize("name", ["torch", pytest.param("native", marks=needs_kernels)])
# Of one distance only, ending inside and at the end of a tile of sixteen keys, never ending.
NUM_DISTANCES = pytest.mark.parametrize("num_distances", [1, 5, 16, 33, 2000])
SOME_BOUNDS = pytest.mark.parametrize(
    "bounds",
    [BOUNDS[name] for name in ("all", "window of 16", "chunks of 7", "windows in chunks")],
    ids=str,
)


def random_bias(num_heads: int, num_distances: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_distances)
    return 2.0 * torch.randn(num_heads, num_distances, generator=generator)


@lru_cache(maxsize=256)  # every backend is compared with it
def reference_steps(shape: Shape, bounds: Bounds, num_distances: int) -> tuple[Tensor, Tensor]:
    bias = random_bias(shape.num_heads, num_distances)
    expected, memory = run_steps(ReferenceBackend(), shape, bounds, bias=bias)
    without, _ = run_steps(ReferenceBackend(), shape, bounds)
    if num_distances > 1 and max(shape.seq_lens) > 1 and bounds.window != 1:
        assert not torch.allclose(expected, without, atol=1e-3)
    return expected, memory


def assert_equals_the_reference(
    name: str, shape: Shape, bounds: Bounds, num_distances: int
) -> None:
    expected, expected_memory = reference_steps(shape, bounds, num_distances)
    backend = get_backend(name, CPU, torch.float32, shape.block_size)
    bias = random_bias(shape.num_heads, num_distances)
    output, memory = run_steps(backend, shape, bounds, bias=bias)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(memory, expected_memory)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@SOME_BOUNDS
@ON_A_CPU
def test_backend_equals_the_reference_in_every_shape(name: str, bounds: Bounds, shape: Shape):
    assert_equals_the_reference(name, shape, bounds, 33)


@NUM_DISTANCES
@ON_A_CPU
def test_distances_past_the_last_column_take_it(name: str, num_distances: int):
    shape = SHAPES["long prefills beside short"]
    assert_equals_the_reference(name, shape, BOUNDS["all"], num_distances)


@ON_A_CPU
@given(st.data())
@settings(max_examples=examples(40))
def test_backend_equals_the_reference_on_any_batch(name: str, data: st.DataObject):
    query_lens = sorted(data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=6)))
    seq_lens = tuple(query_len + data.draw(st.integers(0, 60)) for query_len in query_lens)
    num_kv_heads, group = data.draw(st.sampled_from([(1, 3), (2, 2), (3, 1)]))
    block_size = data.draw(st.sampled_from([1, 4, 16]))
    shape = Shape(tuple(query_lens), seq_lens, block_size, num_kv_heads * group, num_kv_heads, 8)
    length = st.none() | st.integers(2, 50)
    bounds = Bounds(window=data.draw(length), chunk_size=data.draw(length))
    bias = random_bias(shape.num_heads, data.draw(st.integers(1, 90)))
    softcap = data.draw(st.sampled_from([None, 5.0]))
    expected, _ = run_steps(ReferenceBackend(), shape, bounds, softcap, bias=bias)
    backend = get_backend(name, CPU, torch.float32, block_size)
    output, _ = run_steps(backend, shape, bounds, softcap, bias=bias)
    torch.testing.assert_close(output, expected, atol=5e-5, rtol=5e-5)


@needs_kernels
def test_threads_that_share_a_sequence_count_distances_from_its_end():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 2)
        shape = SHAPES["few long decodes"]
        assert_equals_the_reference("native", shape, BOUNDS["all"], 300)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", ["mixed", "prefill", "decodes of very unequal length"])
def test_xformers_layers_with_biases_run_as_in_torch(shape: str):
    pytest.importorskip("xformers", exc_type=ImportError)
    in_blocks = SHAPES[shape].with_block_size(16)
    bias = random_bias(in_blocks.num_heads, 20)
    expected, _ = run_steps(ReferenceBackend(), in_blocks, bias=bias)
    backend = MaterialisedXformers(CPU, torch.float32, block_size=16)
    output, _ = run_steps(backend, in_blocks, bias=bias)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_biases_in_half_precision_are_as_near_as_its_rounding(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    memory = paged_memory(
        num_blocks=12, block_size=4, num_layers=1, num_kv_heads=2, head_dim=16, dtype=dtype
    )
    table = random_block_table([21, 9], 4, 12, generator)
    metadata = metadata_for(memory, [1, 5], [21, 9], table)
    query, key, value = torch.randn(6, 8, 16, generator=generator).to(dtype).split((4, 2, 2), 1)
    memory.buffer.view(dtype).copy_(torch.randn(memory.buffer.numel() // 2, generator=generator))
    scoring = Scoring(0.25, bias=random_bias(4, 12))
    outputs = []
    for backend in (get_backend("torch", CPU, dtype, 4), ReferenceBackend()):
        backend.begin_step(metadata)
        layer = layer_of(memory, 0)
        outputs.append(backend.forward(LayerCall(query, key, value, layer, metadata, scoring)))
    # The bias is rounded as scores are, and the output once more.
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(outputs[0], outputs[1], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("steps", [[61], [20, 15, 26], [20, 15, *[1] * 26], [1] * 61], ids=str)
@pytest.mark.parametrize(
    "name", ["reference", "torch", pytest.param("native", marks=needs_kernels)]
)
def test_backend_equals_attention_of_t5s_decoder_in_chunks_and_token_by_token(
    name: str, steps: list[int]
):
    torch.manual_seed(0)
    config = T5Config(
        d_model=24,
        d_kv=8,
        num_heads=3,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
        is_decoder=True,
    )
    config._attn_implementation = "eager"
    attention = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
    hidden = torch.randn(1, 61, 24)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(0.0, 0.5)
        future = torch.full((61, 61), float("-inf")).triu(1)
        expected = attention(hidden, mask=future[None, None])[0][0]
        q, k, v = (
            projection(hidden)[0].view(61, 3, 8)
            for projection in (attention.q, attention.k, attention.v)
        )
        # Of the last of 21 tokens, whose keys are 20, 19, ... 0 behind it.
        scoring = Scoring(1.0, bias=attention.compute_bias(21, 21)[0, :, -1].flip(-1))
    memory = paged_memory(num_blocks=20, block_size=4, num_layers=1, num_kv_heads=3, head_dim=8)
    table = random_block_table([61], 4, 20, torch.Generator().manual_seed(1))
    backend = get_backend(name, CPU, torch.float32, 4)
    outputs, end = [], 0
    for length in steps:
        new = slice(end, end + length)
        end += length
        metadata = metadata_for(memory, [length], [end], table)
        backend.begin_step(metadata)
        layer = layer_of(memory, 0)
        outputs.append(backend.forward(LayerCall(q[new], k[new], v[new], layer, metadata, scoring)))
    with torch.no_grad():
        output = attention.o(torch.cat(outputs).flatten(1))
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


@given(st.integers(1, 9), st.integers(0, 12), st.integers(1, 12))
def test_a_tile_of_biases_is_what_each_distance_says(
    num_queries: int, num_before: int, num_distances: int
):
    bias = random_bias(2, num_distances)
    num_keys = num_queries + num_before
    tile = bias_of_tile(bias, num_queries, num_keys)
    for query in range(num_queries):
        for key in range(num_before + query + 1):
            column = min(num_before + query - key, num_distances - 1)
            assert torch.equal(tile[:, query, key], bias[:, column])
    distances = torch.arange(num_queries)[:, None] + num_before - torch.arange(num_keys)
    assert torch.equal(tile, bias_at(bias, distances))


def test_layers_refuse_a_bias_that_fits_no_head_or_no_distance():
    spec = FullAttentionSpec(4, 2, 8, torch.float32)
    memory = paged_memory(num_blocks=4, block_size=4, num_layers=1, num_kv_heads=2, head_dim=8)
    table = random_block_table([3], 4, 4, torch.Generator().manual_seed(0))
    metadata = metadata_for(memory, [3], [3], table)
    backend = get_backend("torch", CPU, torch.float32, 4)
    backend.begin_step(metadata)
    layer = Attention("decoder.0.self", spec, 1.0)
    layer.bind(layer_of(memory, 0), 0)
    rows = torch.zeros(3, 2, 8)
    step = AttentionStep([backend], [metadata])
    for bias in (torch.zeros(3, 5), torch.zeros(2, 0), torch.zeros(5), torch.zeros(2, 5).double()):
        with pytest.raises(ValueError, match=r"float32 bias \(2, distances\)"):
            layer(rows, rows, rows, step, bias)
    across = cross_metadata_for(memory, [3], [3], [True], table)
    with pytest.raises(ValueError, match="needs causal attention"):
        layer(rows, rows, rows, dataclasses.replace(step, metadata=[across]), torch.zeros(2, 5))

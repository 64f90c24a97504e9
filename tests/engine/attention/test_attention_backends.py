"""Every backend against the reference, and isolation of queries from positions they do not see.

The reference is tested against transformers: masks, attention of Gemma 2 and of T5. xformers'
biases are materialised on a CPU; its kernels run on GPUs only. Everything that no query sees may
hold NaN: other pages, slots behind a sequence, positions that left a window.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import T5Config
from transformers.masking_utils import (
    and_masks,
    blockwise_overlay,
    causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward
from transformers.models.t5.modeling_t5 import T5Attention

from engine.attention.layer import Attention, AttentionStep
from engine.attention.metadata import AttentionBackend, LayerCall, Scoring, first_visible
from engine.attention.packed_layout import Chunks
from engine.attention.registry import get_backend
from engine.attention.torch_backend import TorchBackend, bucket_by_length
from engine.layers.mamba import ssd_scan
from prefix_cache import FullAttentionSpec, LayerKVCache
from tests.support.attention_steps import (
    BOUNDS,
    IMAGES,
    SHAPES,
    Bounds,
    Shape,
    bounded_metadata,
    run_steps,
)
from tests.support.examples import examples
from tests.support.materialised_xformers import MaterialisedXformers
from tests.support.native_kernels import needs_kernels
from tests.support.paged_batch import (
    cross_metadata_for,
    layer_of,
    memory_that_holds,
    metadata_for,
    paged_memory,
    random_block_table,
    with_garbage,
)
from tests.support.reference_attention import ReferenceBackend, visibility_mask

CPU = torch.device("cpu")
NATIVE = pytest.param("native", marks=needs_kernels)
ON_A_CPU = pytest.mark.parametrize("name", ["torch", NATIVE])
WITH_XFORMERS = pytest.mark.parametrize("name", ["torch", NATIVE, "xformers"])
ALL_BOUNDS = pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS.keys())


def backend_of(name: str, block_size: int) -> AttentionBackend:
    if name != "xformers":
        return get_backend(name, CPU, torch.float32, block_size)
    pytest.importorskip("xformers", exc_type=ImportError)
    return MaterialisedXformers(CPU, torch.float32, block_size=block_size)


def random_bias(num_heads: int, num_distances: int | None) -> Tensor | None:
    if num_distances is None:
        return None
    generator = torch.Generator().manual_seed(num_distances)
    return 2.0 * torch.randn(num_heads, num_distances, generator=generator)


@lru_cache(maxsize=256)  # every backend is compared with it
def reference_steps(
    shape: Shape, bounds: Bounds, softcap: float | None, num_distances: int | None
) -> tuple[Tensor, Tensor]:
    bias = random_bias(shape.num_heads, num_distances)
    expected, memory = run_steps(ReferenceBackend(), shape, bounds, softcap, bias=bias)
    assert expected.isfinite().all()
    return expected, memory


def assert_equals_the_reference(
    name: str,
    shape: Shape,
    bounds: Bounds = BOUNDS["all"],
    softcap: float | None = None,
    num_distances: int | None = None,
) -> None:
    if name == "xformers":
        shape = shape.with_block_size(16)
    expected, expected_memory = reference_steps(shape, bounds, softcap, num_distances)
    bias = random_bias(shape.num_heads, num_distances)
    backend = backend_of(name, shape.block_size)
    output, memory = run_steps(backend, shape, bounds, softcap, bias=bias)
    # Capped scores are ten times as large, and so are their rounding errors.
    tolerance = 1e-5 if softcap is None else 5e-5
    torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(memory, expected_memory)


@WITH_XFORMERS
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_backend_equals_the_reference_and_reads_nothing_hidden(name: str, shape: Shape):
    """Alternate a cap and a bias by distance over the bounds; the properties draw other pairs."""
    for number, (which, bounds) in enumerate(BOUNDS.items()):
        softcap = 30.0 if (number + len(shape.seq_lens)) % 2 else None
        assert_equals_the_reference(name, shape, bounds, softcap)
        if softcap is None or which == "all":
            assert_equals_the_reference(name, shape, bounds, num_distances=33)


@WITH_XFORMERS
@pytest.mark.parametrize("bounds", IMAGES.values(), ids=IMAGES.keys())
def test_tokens_of_an_image_attend_to_each_other(name: str, bounds: Bounds):
    for kind in ("prefill", "chunk after a cached prefix", "long prefills beside short"):
        assert_equals_the_reference(name, SHAPES[kind], bounds)
    assert_equals_the_reference(name, SHAPES["mixed"], bounds, softcap=30.0)


@pytest.mark.parametrize("window", [None, 5])
def test_an_images_mask_equals_transformers(window: int | None):
    images = torch.tensor([[-1, -1, 0, 0, 0, 0, 0, 0, 0, -1, 1, 1, 1, -1]])
    ends = torch.tensor([1, 2, *[9] * 7, 10, *[13] * 3, 14])
    sees = or_masks(causal_mask_function, blockwise_overlay(images))
    if window is not None:
        sees = and_masks(sliding_window_overlay(window), sees)
    places = torch.arange(14)
    theirs = sees(torch.tensor(0), torch.tensor(0), places[:, None], places[None])
    assert torch.equal(visibility_mask(14, 14, window, visible_ends=ends), theirs)


@WITH_XFORMERS
def test_distances_past_the_last_column_use_it(name: str):
    # One distance, an end inside and at the end of a tile of sixteen keys, and no end.
    for num_distances in (1, 5, 16, 33, 2000):
        shape = SHAPES["long prefills beside short"]
        assert_equals_the_reference(name, shape, num_distances=num_distances)
    biased, unbiased = (reference_steps(shape, BOUNDS["all"], None, n)[0] for n in (33, None))
    assert not torch.allclose(biased, unbiased, atol=1e-3)


@WITH_XFORMERS
@given(st.data())
@settings(max_examples=examples(60))
def test_backend_equals_the_reference_on_any_batch(name: str, data: st.DataObject):
    query_lens = sorted(data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=6)))
    seq_lens = tuple(query_len + data.draw(st.integers(0, 60)) for query_len in query_lens)
    num_kv_heads, group = data.draw(st.sampled_from([(1, 3), (2, 2), (3, 1)]))
    block_size = data.draw(st.sampled_from([1, 4, 16]))
    shape = Shape(tuple(query_lens), seq_lens, block_size, num_kv_heads * group, num_kv_heads, 8)
    length = st.none() | st.integers(1, 50)
    bounds = Bounds(window=data.draw(length))
    softcap = data.draw(st.sampled_from([None, 5.0, 30.0]))
    num_distances = data.draw(st.none() | st.integers(1, 90)) if softcap != 30.0 else None
    assert_equals_the_reference(name, shape, bounds, softcap, num_distances)


@needs_kernels
def test_threads_that_share_a_sequence_count_distances_from_its_end():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 2)  # more threads than requests: sequences are split
        for num_distances in (None, 300):
            shape = SHAPES["few long decodes"]
            assert_equals_the_reference("native", shape, num_distances=num_distances)
    finally:
        torch.set_num_threads(before)


def transformers_mask(bounds: Bounds, query_len: int, seq_len: int) -> Tensor:
    queries = torch.arange(seq_len - query_len, seq_len)[:, None]
    keys = torch.arange(seq_len)[None, :]
    batch = torch.zeros(1, 1, dtype=torch.int64)
    mask = torch.ones(query_len, seq_len, dtype=torch.bool)
    window = bounds.window or seq_len
    return mask & sliding_window_causal_mask_function(window)(batch, batch, queries, keys)


@ALL_BOUNDS
@pytest.mark.parametrize(("query_len", "seq_len"), [(1, 1), (1, 40), (30, 30), (5, 70)])
def test_masks_equal_transformers(bounds: Bounds, query_len: int, seq_len: int):
    expected = transformers_mask(bounds, query_len, seq_len)
    mask = visibility_mask(query_len, seq_len, bounds.window)
    assert torch.equal(mask, expected)
    positions = torch.arange(seq_len - query_len, seq_len)
    firsts = first_visible(positions, bounds.window)
    assert torch.equal(firsts, expected.int().argmax(1))


@ALL_BOUNDS
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_reference_equals_attention_of_gemma2(bounds: Bounds, softcap: float | None):
    generator = torch.Generator().manual_seed(1)
    memory = paged_memory(
        num_blocks=20, block_size=4, num_layers=2, num_kv_heads=2, head_dim=8, dtype=torch.float64
    )
    table = random_block_table([61], 4, 20, generator)
    metadata = metadata_for(memory, [61], [61], table, window=bounds.window)
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


@pytest.mark.parametrize("steps", [[61], [20, 15, 26], [20, 15, *[1] * 26], [1] * 61], ids=str)
@pytest.mark.parametrize("name", ["torch", pytest.param("native", marks=needs_kernels)])
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
        # For the last of 21 tokens, whose keys are at distances 20, 19, ... 0.
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scored", ["capped", "biased"])
def test_half_precision_scores_are_accurate_to_their_rounding(dtype: torch.dtype, scored: str):
    is_capped, generator = scored == "capped", torch.Generator().manual_seed(0)
    memory = paged_memory(
        num_blocks=12, block_size=4, num_layers=1, num_kv_heads=2, head_dim=16, dtype=dtype
    )
    table = random_block_table([21, 9], 4, 12, generator)
    metadata = metadata_for(memory, [1, 5], [21, 9], table, window=8 if is_capped else None)
    qkv = torch.randn(6, 8, 16, generator=generator) * (4 if is_capped else 1)
    query, key, value = qkv.to(dtype).split((4, 2, 2), dim=1)
    memory.buffer.view(dtype).copy_(torch.randn(memory.buffer.numel() // 2, generator=generator))
    scoring = Scoring(0.5, 20.0) if is_capped else Scoring(0.25, bias=random_bias(4, 12))
    outputs = []
    for backend in (get_backend("torch", CPU, dtype, 4), ReferenceBackend()):
        backend.begin_step(metadata)
        layer = layer_of(memory, 0)
        outputs.append(backend.forward(LayerCall(query, key, value, layer, metadata, scoring)))
    # The output is rounded once; a bias is rounded like the scores.
    tolerance = (1 if is_capped else 4) * torch.finfo(dtype).eps
    torch.testing.assert_close(outputs[0], outputs[1], atol=tolerance, rtol=tolerance)


def test_decodes_gather_only_the_window(monkeypatch: pytest.MonkeyPatch):
    gathered = []
    gather = TorchBackend._gather

    def watch(self: TorchBackend, pages: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        gathered.append(len(pages))
        return gather(self, pages, *args)

    monkeypatch.setattr(TorchBackend, "_gather", watch)
    shape = Shape((1, 1), (700, 90), 4)
    run_steps(get_backend("torch", CPU, torch.float32, 4), shape, Bounds(window=16))
    # The last 16 positions of 700 cover 4 blocks, of 90 they touch 5: one bucket of two rows.
    assert set(gathered) == {2 * 5}


@given(st.lists(st.integers(1, 500), max_size=30))
def test_buckets_hold_every_sequence_once_and_waste_at_most_a_quarter(lengths: list[int]):
    buckets = bucket_by_length(lengths)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(lengths)))
    for bucket in buckets:
        members = [lengths[index] for index in bucket]
        assert min(members) >= 0.75 * max(members)


@needs_kernels
@pytest.mark.parametrize(
    ("seq_len", "block_id", "message"),
    [
        (9, 1, "do not fit a block table of 8"),
        (0, 1, "0 to 0"),
        (5, -1, "id -1"),
        (5, 4, "pool of 4"),
    ],
)
def test_native_backend_refuses_block_tables_outside_its_memory(
    seq_len: int, block_id: int, message: str
):
    memory = paged_memory(num_blocks=4, block_size=4, num_layers=1, num_kv_heads=1, head_dim=8)
    metadata = dataclasses.replace(
        metadata_for(memory, [1], [5], torch.tensor([[1, 2]], dtype=torch.int32)),
        seq_lens=torch.tensor([seq_len], dtype=torch.int32),
        block_table=torch.tensor([[1, block_id]], dtype=torch.int32),
    )
    backend = get_backend("native", CPU, torch.float32, 4)
    rows = torch.zeros(1, 1, 8)
    with pytest.raises(ValueError, match=message):
        backend.begin_step(metadata)
        backend.forward(LayerCall(rows, rows, rows, layer_of(memory, 0), metadata, Scoring(1.0)))


@ON_A_CPU
def test_rows_of_other_layers_and_requests_are_unchanged(name: str):
    shape = SHAPES["mixed"]
    generator = torch.Generator().manual_seed(0)
    memory = with_garbage(
        paged_memory(num_blocks=16, block_size=16, num_layers=2, num_kv_heads=2, head_dim=16),
        generator,
    )
    before = memory.buffer.clone().view(torch.float32).view(-1, 2, 16)
    table = random_block_table(shape.seq_lens, 16, 16, generator)
    metadata = metadata_for(memory, shape.query_lens, shape.seq_lens, table)
    qkv = torch.randn(3, metadata.num_tokens, 2, 16, generator=generator)
    backend = get_backend(name, CPU, torch.float32, 16)
    backend.begin_step(metadata)
    backend.forward(LayerCall(qkv[0], qkv[1], qkv[2], layer_of(memory, 1), metadata, Scoring(1.0)))
    after = memory.buffer.view(torch.float32).view(-1, 2, 16)
    changed = (before != after).flatten(1).any(1).nonzero().flatten()
    first_key_row = 2 * 16  # of layer 1, in a page of 2 layers
    rows = torch.cat([metadata.row_mapping + first_key_row, metadata.row_mapping + 3 * 16])
    assert changed.tolist() == sorted(rows.tolist())


def test_layers_refuse_a_bias_of_a_wrong_shape():
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


def test_auto_is_torch_on_a_cpu_without_kernels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMNI_NATIVE", "0")
    assert get_backend("auto", "cpu", torch.float32, 16).name == "torch"
    with pytest.raises(ValueError, match="turned off by OMNI_NATIVE=0"):
        get_backend("native", "cpu", torch.float32, 16)


@needs_kernels
@pytest.mark.parametrize("head_dim", [24, 64, 128])
@pytest.mark.parametrize("lens", [([1, 5], [21, 9]), ([3, 260], [50, 300])], ids=str)
def test_native_reads_and_writes_pages_of_bfloat16(
    lens: tuple[list[int], list[int]], head_dim: int
):
    generator, outputs, contents = torch.Generator().manual_seed(0), [], []
    query_lens, seq_lens = lens
    qkv = torch.randn(sum(query_lens), 8, head_dim, generator=generator)
    query, key, value = qkv.split((4, 2, 2), dim=1)
    table = random_block_table(seq_lens, 16, 24, generator)
    shape = {"num_blocks": 24, "block_size": 16, "num_layers": 1, "num_kv_heads": 2}
    rounded = torch.randn(24 * 2 * 16 * 2 * head_dim, generator=generator).bfloat16()
    for backend, dtype in (
        (ReferenceBackend(), torch.float32),
        (get_backend("native", "cpu", torch.bfloat16, 16), torch.bfloat16),
    ):
        memory = paged_memory(**shape, head_dim=head_dim, dtype=dtype)  # type: ignore[arg-type]
        memory.buffer.view(dtype).copy_(rounded)
        metadata = metadata_for(memory, query_lens, seq_lens, table)
        new = (key.bfloat16().float(), value.bfloat16().float())
        given = new if dtype == torch.float32 else (key, value)
        backend.begin_step(metadata)
        call = LayerCall(query, *given, layer_of(memory, 0), metadata, Scoring(0.25))
        outputs.append(backend.forward(call))
        contents.append(memory.buffer.view(dtype).bfloat16())
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-5, rtol=1e-5)
    assert torch.equal(contents[0], contents[1])


@needs_kernels
def test_auto_is_native_on_a_cpu_in_float32_and_bfloat16():
    assert get_backend("auto", "cpu", torch.float32, 16).name == "native"
    assert get_backend("auto", "cpu", torch.bfloat16, 16).name == "native"
    assert get_backend("auto", "cpu", torch.float16, 16).name == "torch"


@pytest.mark.parametrize(
    ("name", "device", "dtype", "block_size", "message"),
    [
        ("flash", "cpu", torch.float32, 16, "known are auto, native, torch, triton, xformers"),
        ("torch", "cpu", torch.int32, 16, "floating point"),
        ("native", "cuda", torch.float32, 16, "CPUs only, not on cuda"),
        ("native", "cpu", torch.float16, 16, "float32 or bfloat16, got torch.float16"),
        ("xformers", "cpu", torch.float16, 16, "CUDA devices only, not on cpu"),
        ("xformers", "cuda", torch.float32, 16, "float16 or bfloat16, got torch.float32"),
        ("xformers", "cuda", torch.float16, 24, "multiple of 16, got 24"),
    ],
)
def test_an_unsupported_combination_names_its_requirements(
    name: str, device: str, dtype: torch.dtype, block_size: int, message: str
):
    with pytest.raises(ValueError, match=message):
        get_backend(name, device, dtype, block_size)


_NUM_LAYERS = 2


@dataclass(frozen=True)
class Spoilt:
    """One position of one request whose key or value, or both, are not finite."""

    request: int
    position: int
    parts: tuple[str, ...] = ("key", "value")
    number: float = float("nan")


def run_spoilt_step(
    backend: AttentionBackend,
    shape: Shape,
    bounds: Bounds,
    scoring: Scoring,
    spoilt: Spoilt | None,
    unused: float = float("nan"),
) -> Tensor:
    """Run one layer of a step with the same numbers in every call, except for the spoilt ones."""
    generator = torch.Generator().manual_seed(0)
    memory, num_blocks = memory_that_holds(shape.seq_lens, shape, _NUM_LAYERS)
    memory.buffer.view(torch.float32).fill_(unused)
    table = random_block_table(shape.seq_lens, shape.block_size, num_blocks, generator)
    layer = layer_of(memory, 1)
    queries: list[Tensor] = []
    parts: dict[str, list[Tensor]] = {"key": [], "value": []}
    for request, (query_len, seq_len) in enumerate(
        zip(shape.query_lens, shape.seq_lens, strict=True)
    ):
        queries.append(torch.randn(query_len, shape.num_heads, shape.head_dim, generator=generator))
        rows = torch.randn(2, seq_len, shape.num_kv_heads, shape.head_dim, generator=generator)
        both = dict(zip(("key", "value"), rows, strict=True))
        if spoilt is not None and spoilt.request == request:
            for part in spoilt.parts:
                both[part][spoilt.position] = spoilt.number
        first = bounds.first_visible(seq_len - query_len)
        for position in range(first, seq_len - query_len):
            block = int(table[request, position // shape.block_size])
            _store(layer, block, position % shape.block_size, both, position)
        for part, found in both.items():
            parts[part].append(found[seq_len - query_len :])
    metadata = bounded_metadata(memory, table, shape, bounds)
    backend.begin_step(metadata)
    query, key, value = (torch.cat(each) for each in (queries, parts["key"], parts["value"]))
    return backend.forward(LayerCall(query, key, value, layer, metadata, scoring))


def sees(shape: Shape, bounds: Bounds, spoilt: Spoilt) -> Tensor:
    """Return ``(num_tokens,)`` booleans: True for queries that see the spoilt position."""
    found = [
        request == spoilt.request and bounds.first_visible(position) <= spoilt.position <= position
        for request, (query_len, seq_len) in enumerate(
            zip(shape.query_lens, shape.seq_lens, strict=True)
        )
        for position in range(seq_len - query_len, seq_len)
    ]
    return torch.tensor(found)


def _store(
    layer: LayerKVCache, block: int, offset: int, both: dict[str, Tensor], position: int
) -> None:
    chunk = block * layer.chunks_per_page + 2 * layer.layer_index
    layer.chunks[chunk, offset] = both["key"][position]
    layer.chunks[chunk + 1, offset] = both["value"][position]


NAN, INFINITY = float("nan"), float("inf")
EVERY_BACKEND = pytest.mark.parametrize(
    "name", ["torch", pytest.param("native", marks=needs_kernels)]
)
SPOILT_SHAPES = {
    "prefill": Shape((40,), (40,), 4),
    "decodes of unequal length": Shape((1, 1, 1, 1), (9, 33, 30, 2), 16),
    "chunks after prefixes": Shape((6, 9), (26, 30), 4),
    "mixed": Shape((1, 1, 5, 70), (12, 40, 21, 75), 16),
    "several tiles": Shape((1, 259, 280), (18, 259, 300), 16, 4, 2, 8),
    "odd head dim": Shape((1, 7, 70), (12, 19, 70), 4, 4, 2, 20),
}
SCORINGS = {
    "scaled": Scoring(0.3),
    "capped": Scoring(0.3, 5.0),
    "biased": Scoring(0.3, None, torch.randn(4, 9, generator=torch.Generator().manual_seed(3))),
}


def backend_for(name: str, shape: Shape) -> AttentionBackend:
    return get_backend(name, "cpu", torch.float32, shape.block_size)


def assert_only_queries_that_see_it_change(
    name: str, shape: Shape, bounds: Bounds, scoring: Scoring, spoilt: Spoilt
) -> None:
    clean = run_spoilt_step(ReferenceBackend(), shape, bounds, scoring, None, unused=0.0)
    assert clean.isfinite().all()
    output = run_spoilt_step(backend_for(name, shape), shape, bounds, scoring, spoilt)
    touched = sees(shape, bounds, spoilt)
    torch.testing.assert_close(output[~touched], clean[~touched], atol=5e-5, rtol=5e-5)
    if "value" in spoilt.parts:
        assert not output[touched].isfinite().flatten(1).all(1).any()
    elif math.isnan(spoilt.number):
        # An infinite key may have weight zero, and torch returns zeros if no key has weight.
        is_zero = (output[touched] == 0.0).flatten(1).all(1)
        is_finite = output[touched].isfinite().flatten(1).all(1)
        assert not (is_finite & ~is_zero).any()


@EVERY_BACKEND
@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS.keys())
@pytest.mark.parametrize("shape", SPOILT_SHAPES.values(), ids=SPOILT_SHAPES.keys())
def test_unused_memory_may_hold_anything(name: str, shape: Shape, scoring: Scoring):
    for bounds in (BOUNDS["all"], BOUNDS["window of 3"]):
        clean = run_spoilt_step(ReferenceBackend(), shape, bounds, scoring, None, unused=0.0)
        for unused in (NAN, INFINITY):
            backend = backend_for(name, shape)
            output = run_spoilt_step(backend, shape, bounds, scoring, None, unused=unused)
            torch.testing.assert_close(output, clean, atol=5e-5, rtol=5e-5)


@EVERY_BACKEND
@given(st.data())
@settings(max_examples=examples(40))
def test_a_spoilt_position_changes_only_queries_that_see_it(name: str, data: st.DataObject):
    query_lens = sorted(data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=4)))
    seq_lens = tuple(query_len + data.draw(st.integers(0, 40)) for query_len in query_lens)
    block_size = data.draw(st.sampled_from([1, 4, 16]))
    shape = Shape(tuple(query_lens), seq_lens, block_size)
    length = st.none() | st.integers(1, 50)
    bounds = Bounds(window=data.draw(length))
    request = data.draw(st.integers(0, len(seq_lens) - 1))
    spoilt = Spoilt(
        request,
        data.draw(st.integers(0, seq_lens[request] - 1)),
        data.draw(st.sampled_from([("value",), ("key",), ("key", "value")])),
        data.draw(st.sampled_from([NAN, INFINITY, -INFINITY])),
    )
    scoring = data.draw(st.sampled_from(list(SCORINGS.values())))
    assert_only_queries_that_see_it_change(name, shape, bounds, scoring, spoilt)


@EVERY_BACKEND
@pytest.mark.parametrize("query_lens", [(1, 1, 1), (1, 7, 9)], ids=["decodes", "mixed"])
def test_an_encoders_nan_reaches_only_its_own_request(name: str, query_lens: tuple[int, ...]):
    def attend(backend: AttentionBackend, spoilt: bool, unused: float) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        lengths = (9, 6, 11)
        memory = paged_memory(
            num_blocks=12, block_size=4, num_layers=1, num_kv_heads=2, head_dim=16
        )
        memory.buffer.view(torch.float32).fill_(unused)
        table = random_block_table(lengths, 4, 12, generator)
        metadata = cross_metadata_for(memory, query_lens, lengths, (True,) * 3, table)
        query, key, value = (
            torch.randn(count, heads, 16, generator=generator)
            for count, heads in ((sum(query_lens), 4), (26, 2), (26, 2))
        )
        if spoilt:
            key[11], value[12] = NAN, NAN  # of the second encoder's input
        backend.begin_step(metadata)
        layer = layer_of(memory, 0)
        return backend.forward(LayerCall(query, key, value, layer, metadata, Scoring(0.3)))

    clean = attend(ReferenceBackend(), spoilt=False, unused=0.0)
    backend = get_backend(name, "cpu", torch.float32, 4)
    torch.testing.assert_close(attend(backend, False, NAN), clean, atol=1e-5, rtol=1e-5)
    output = attend(backend, True, NAN)
    start, stop = query_lens[0], sum(query_lens[:2])
    assert not output[start:stop].isfinite().flatten(1).all(1).any()
    others = [*range(start), *range(stop, len(output))]
    torch.testing.assert_close(output[others], clean[others], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("part", ["x", "a", "b", "c"])
@pytest.mark.parametrize("place", [0, 3, 70, 99])
def test_a_nan_in_a_recurrence_reaches_only_later_tokens_of_its_request(part: str, place: int):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([30, 100, 5])
    chunks = Chunks.of(lengths, torch.device("cpu"))
    numbers = {
        "x": torch.randn(135, 4, 8, generator=generator),
        "a": -torch.rand(135, 4, generator=generator),
        "b": torch.randn(135, 2, 6, generator=generator),
        "c": torch.randn(135, 2, 6, generator=generator),
    }
    states = torch.randn(3, 4, 8, 6, generator=generator)
    expected, expected_states = ssd_scan(tuple(numbers.values()), states, chunks)
    for number in (NAN, INFINITY):
        spoilt = {name: tensor.clone() for name, tensor in numbers.items()}
        spoilt[part][30 + place] = number
        y, after = ssd_scan(tuple(spoilt.values()), states, chunks)
        others = [*range(30 + place), *range(130, 135)]
        torch.testing.assert_close(y[others], expected[others])
        torch.testing.assert_close(after[[0, 2]], expected_states[[0, 2]])
        assert not y[30 + place].isfinite().all()

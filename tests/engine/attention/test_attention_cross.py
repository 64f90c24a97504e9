"""Non-causal attention: every backend against brute force, and through the layer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.attention.layer import Attention, AttentionStep
from engine.attention.metadata import AttentionBackend, LayerCall, Scoring
from engine.attention.registry import get_backend
from prefix_cache import CrossAttentionSpec, LayerKVCache
from tests.support.examples import examples
from tests.support.materialised_xformers import MaterialisedXformers
from tests.support.native_kernels import needs_kernels
from tests.support.paged_batch import (
    cross_metadata_for,
    layer_of,
    memory_that_holds,
    paged_memory,
    random_block_table,
)

_NUM_LAYERS = 2


@dataclass(frozen=True)
class CrossShape:
    """A step's requests, decodes first, and the heads.

    ``is_written`` marks requests whose encoder runs in the first step; the keys of others are in
    their pages before it. In the second step all requests only read.
    """

    query_lens: tuple[int, ...]
    encoder_lens: tuple[int, ...]
    is_written: tuple[bool, ...]
    block_size: int
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16


def assert_steps_equal_brute_force(
    backend: AttentionBackend,
    shape: CrossShape,
    *,
    softcap: float | None = None,
    null_page: float = float("nan"),
) -> None:
    """Check outputs against :func:`_brute_force`, written keys and values, and untouched memory.

    Pages that no request owns hold NaN, and by default so does the null page.
    """
    generator = torch.Generator().manual_seed(0)
    memory, num_blocks = memory_that_holds(shape.encoder_lens, shape, _NUM_LAYERS)
    table = random_block_table(shape.encoder_lens, shape.block_size, num_blocks, generator)
    pages = memory.buffer.view(torch.float32).view(num_blocks, -1)
    pages.fill_(float("nan"))
    owned = table[table > 0].long()
    pages[owned] = torch.randn(len(owned), pages.shape[1], generator=generator)
    pages[0] = null_page

    encoded = []  # per layer and request: keys and values
    for index in range(_NUM_LAYERS):
        rows = [
            torch.randn(length, 2 * shape.num_kv_heads, shape.head_dim, generator=generator)
            for length in shape.encoder_lens
        ]
        encoded.append([row.chunk(2, dim=1) for row in rows])
        for request, (keys, values) in enumerate(encoded[index]):
            if not shape.is_written[request]:
                _store(layer_of(memory, index), table[request], keys, values)
    expected_memory = memory.buffer.clone()

    none_written = (False,) * len(shape.query_lens)
    for is_written in (shape.is_written, none_written):
        metadata = cross_metadata_for(
            memory, shape.query_lens, shape.encoder_lens, is_written, table
        )
        backend.begin_step(metadata)
        for index in range(_NUM_LAYERS):
            layer = layer_of(memory, index)
            query = torch.randn(
                sum(shape.query_lens), shape.num_heads, shape.head_dim, generator=generator
            )
            written = [pair for pair, w in zip(encoded[index], is_written, strict=True) if w]
            nothing = torch.empty(0, shape.num_kv_heads, shape.head_dim)
            key, value = (
                torch.cat([nothing, *(pair[part] for pair in written)]) for part in (0, 1)
            )
            output = backend.forward(
                LayerCall(query, key, value, layer, metadata, Scoring(0.3, softcap))
            )
            expected = _brute_force(query, encoded[index], shape.query_lens, 0.3, softcap)
            torch.testing.assert_close(output.double(), expected, atol=2e-6, rtol=2e-5)
    after = memory.buffer.clone()
    memory.buffer.copy_(expected_memory)
    for index in range(_NUM_LAYERS):
        for request, (keys, values) in enumerate(encoded[index]):
            _store(layer_of(memory, index), table[request], keys, values)
    assert torch.equal(after, memory.buffer)


def _store(layer: LayerKVCache, block_ids: Tensor, keys: Tensor, values: Tensor) -> None:
    block_size = layer.chunks.shape[1]
    for position, (key, value) in enumerate(zip(keys, values, strict=True)):
        chunk = int(block_ids[position // block_size]) * layer.chunks_per_page
        chunk += 2 * layer.layer_index
        layer.chunks[chunk, position % block_size] = key
        layer.chunks[chunk + 1, position % block_size] = value


def _brute_force(
    query: Tensor,
    encoded: list[tuple[Tensor, ...]],
    query_lens: tuple[int, ...],
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Compute one token and head at a time, in float64; zeros for tokens that see nothing."""
    owners = [request for request, length in enumerate(query_lens) for _ in range(length)]
    output = torch.zeros(query.shape, dtype=torch.float64)
    for token, request in enumerate(owners):
        keys, values = (part.double() for part in encoded[request])
        for head in range(query.shape[1] if len(keys) else 0):
            kv_head = head * keys.shape[1] // query.shape[1]
            scores = keys[:, kv_head] @ query[token, head].double() * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            output[token, head] = scores.softmax(0) @ values[:, kv_head]
    return output


CPU = torch.device("cpu")
ON_A_CPU = pytest.mark.parametrize("name", ["torch", pytest.param("native", marks=needs_kernels)])
WITH_XFORMERS = pytest.mark.parametrize(
    "name", ["torch", pytest.param("native", marks=needs_kernels), "xformers"]
)


def lengths_around(block_size: int) -> tuple[int, ...]:
    return (0, 1, block_size - 1, block_size, block_size + 1, 7 * block_size + 3)


def shapes(block_size: int) -> dict[str, CrossShape]:
    lens = lengths_around(block_size)
    decodes, prefills = (1,) * 6, (2, 3, 4, 5, 6, 7)
    some = (True, False, True, False, True, False)
    return {
        "decodes": CrossShape(decodes, lens, (False,) * 6, block_size),
        "decodes of new encoders": CrossShape(decodes, lens, (True,) * 6, block_size),
        "prefills": CrossShape(prefills, lens, (True,) * 6, block_size),
        "chunks, some of known encoders": CrossShape(prefills, lens[::-1], some, block_size),
        "mixed": CrossShape((*decodes, *prefills), lens + lens, some + some[::-1], block_size),
        "nothing to see at all": CrossShape((1, 2), (0, 0), (True, False), block_size),
        "as many queries as keys": CrossShape((1, 5), (1, 5), (True, False), block_size),
        "long prefills": CrossShape((3, 270, 300), (40, 0, 290), (True, True, True), block_size),
        "many queries of one request": CrossShape((70,), (50,), (False,), block_size),
        "one kv head": CrossShape((1, 3), (30, 9), (True, False), block_size, 4, 1),
        "no grouping": CrossShape((1, 3), (30, 9), (False, True), block_size, 3, 3, 7),
        "head dim 64": CrossShape((1, 1, 3), (90, 0, 9), (False, True, True), block_size, 4, 4, 64),
    }


def assert_equals_brute_force(
    name: str, shape: CrossShape, *, softcap: float | None = None
) -> None:
    if name != "xformers":
        backend = get_backend(name, CPU, torch.float32, shape.block_size)
        assert_steps_equal_brute_force(backend, shape, softcap=softcap)
        return
    pytest.importorskip("xformers", exc_type=ImportError)
    shape = dataclasses.replace(shape, block_size=16)
    backend = MaterialisedXformers(CPU, torch.float32, block_size=16)
    # Requests that see nothing read the null page, which memory keeps at zero.
    assert_steps_equal_brute_force(backend, shape, softcap=softcap, null_page=0.0)


@pytest.mark.parametrize("shape", shapes(4))
@WITH_XFORMERS
def test_backend_equals_brute_force_and_reads_nothing_of_others(name: str, shape: str):
    assert_equals_brute_force(name, shapes(4)[shape])
    assert_equals_brute_force(name, shapes(16)[shape], softcap=2.0)


@WITH_XFORMERS
@given(st.data())
@settings(max_examples=examples(40))
def test_backend_equals_brute_force_on_any_batch(name: str, data: st.DataObject):
    query_lens = sorted(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5)))
    num_kv_heads, group = data.draw(st.sampled_from([(1, 3), (2, 2), (3, 1)]))
    block_size = data.draw(st.sampled_from([1, 4, 16]))
    shape = CrossShape(
        tuple(query_lens),
        tuple(data.draw(st.integers(0, 40)) for _ in query_lens),
        tuple(data.draw(st.booleans()) for _ in query_lens),
        block_size,
        num_kv_heads * group,
        num_kv_heads,
        8,
    )
    assert_equals_brute_force(name, shape)


@needs_kernels
def test_more_threads_than_keys_work():
    before = torch.get_num_threads()
    backend = get_backend("native", CPU, torch.float32, 4)
    try:
        torch.set_num_threads(before + 2)
        for lens in ((0, 1), (700, 2)):
            assert_steps_equal_brute_force(backend, CrossShape((1, 1), lens, (True, True), 4))
    finally:
        torch.set_num_threads(before)


@ON_A_CPU
def test_a_layer_needs_keys_only_in_the_step_of_the_encoder(name: str):
    spec = CrossAttentionSpec(4, 2, 8, torch.float32)
    memory = paged_memory(num_blocks=4, block_size=4, num_layers=1, num_kv_heads=2, head_dim=8)
    table = random_block_table([6], 4, 4, torch.Generator().manual_seed(0))
    query, key, value = torch.randn(3, 6, 2, 8, generator=torch.Generator().manual_seed(1))
    layer = Attention("decoder.0.cross", spec, 0.5)
    layer.bind(layer_of(memory, 0), 0)
    outputs = []
    for is_written in (True, False):
        metadata = cross_metadata_for(memory, [3], [6], [is_written], table)
        backend = get_backend(name, CPU, torch.float32, 4)
        backend.begin_step(metadata)
        step = AttentionStep([backend], [metadata])
        if is_written:
            with pytest.raises(ValueError, match=r"cross got no keys.*expected 6 to store"):
                layer(query[:3], None, None, step)
            outputs.append(layer(query[:3], key, value, step))
        else:
            outputs.append(layer(query[:3], None, None, step))
    assert torch.equal(outputs[0], outputs[1])
    assert outputs[0].abs().min() > 0


def test_metadata_without_causality_has_no_windows():
    memory = paged_memory(num_blocks=4, block_size=4, num_layers=1, num_kv_heads=2, head_dim=8)
    table = random_block_table([6], 4, 4, torch.Generator().manual_seed(0))
    metadata = cross_metadata_for(memory, [3], [6], [False], table)
    with pytest.raises(ValueError, match="no windows, got window=3"):
        dataclasses.replace(metadata, window=3)

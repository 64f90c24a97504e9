"""Attention without causality: every backend against brute force, and through the layer."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.layer import Attention, AttentionStep
from engine.attention.metadata import LayerCall, Scoring
from engine.attention.reference import ReferenceBackend
from engine.attention.registry import get_backend
from prefix_cache import CrossAttentionSpec
from tests.support.cross_steps import CrossShape, assert_steps_equal_brute_force
from tests.support.examples import examples
from tests.support.materialised_xformers import MaterialisedXformers
from tests.support.native_kernels import needs_kernels
from tests.support.paged_batch import (
    cross_metadata_for,
    layer_of,
    paged_memory,
    random_block_table,
)

CPU = torch.device("cpu")
ON_A_CPU = pytest.mark.parametrize(
    "name", ["reference", "torch", pytest.param("native", marks=needs_kernels)]
)
WITH_XFORMERS = pytest.mark.parametrize(
    "name", ["reference", "torch", pytest.param("native", marks=needs_kernels), "xformers"]
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
    # Whose request has nothing to see looks at the null page, which memory keeps at zero.
    assert_steps_equal_brute_force(backend, shape, softcap=softcap, null_page=0.0)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("shape", shapes(4))
@WITH_XFORMERS
def test_backend_equals_brute_force_and_reads_nothing_of_others(
    name: str, shape: str, block_size: int
):
    assert_equals_brute_force(name, shapes(block_size)[shape])
    assert_equals_brute_force(name, shapes(block_size)[shape], softcap=2.0)


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
def test_threads_may_be_more_than_there_are_keys():
    before = torch.get_num_threads()
    backend = get_backend("native", CPU, torch.float32, 4)
    try:
        torch.set_num_threads(before + 2)
        for lens in ((0, 1), (700, 2)):
            assert_steps_equal_brute_force(backend, CrossShape((1, 1), lens, (True, True), 4))
    finally:
        torch.set_num_threads(before)


@ON_A_CPU
def test_layer_needs_keys_in_the_step_of_the_encoder_and_none_later(name: str):
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
    with pytest.raises(ValueError, match="no windows or chunks, got window=3"):
        dataclasses.replace(metadata, window=3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["encoder", "cross", "cross decodes"])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_xformers_kernels_equal_the_reference_on_cuda(
    kind: str, block_size: int, dtype: torch.dtype
):
    pytest.importorskip("xformers", exc_type=ImportError)
    query_lens, lens = {
        "encoder": ((1, 17, 130), (1, 17, 130)),
        "cross": ((1, 1, 5, 40), (70, 0, 33, 0)),
        "cross decodes": ((1, 1, 1), (1, 65, 300)),
    }[kind]
    outputs = []
    for backend in (get_backend("xformers", "cuda", dtype, block_size), ReferenceBackend()):
        generator = torch.Generator().manual_seed(0)
        memory = paged_memory(
            num_blocks=40,
            block_size=block_size,
            num_layers=1,
            num_kv_heads=2,
            head_dim=64,
            dtype=dtype,
            device="cuda",
        )
        table = random_block_table(lens, block_size, 40, generator)
        on_cpu = cross_metadata_for(memory, query_lens, lens, [True] * len(lens), table)
        metadata = dataclasses.replace(
            on_cpu,
            block_table=on_cpu.block_table.cuda(),
            slot_mapping=on_cpu.slot_mapping.cuda(),
            row_mapping=on_cpu.row_mapping.cuda(),
        )
        query = torch.randn(sum(query_lens), 8, 64, generator=generator).to("cuda", dtype)
        # Values below 1: what is compared is the sum, not how coarse the type is far from 0.
        key, value = torch.randn(2, sum(lens), 2, 64, generator=generator).to("cuda", dtype) / 4
        backend.begin_step(metadata)
        layer = layer_of(memory, 0)
        outputs.append(
            backend.forward(LayerCall(query, key, value, layer, metadata, Scoring(0.125)))
        )
    torch.testing.assert_close(outputs[0], outputs[1], atol=2e-3, rtol=2e-3)

"""Every backend against the reference, and the reference against transformers' attention."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from engine.attention.metadata import LayerCall, Scoring
from engine.attention.reference import ReferenceBackend, visibility_mask
from engine.attention.registry import get_backend
from engine.attention.torch_backend import bucket_by_length
from tests.support.attention_steps import BOUNDS, NUM_LAYERS, SHAPES, Bounds, run_steps
from tests.support.materialised_xformers import MaterialisedXformers
from tests.support.native_kernels import needs_kernels
from tests.support.paged_batch import (
    layer_of,
    metadata_for,
    paged_memory,
    random_block_table,
    with_garbage,
)

CPU = torch.device("cpu")
ON_A_CPU = pytest.mark.parametrize("name", ["torch", pytest.param("native", marks=needs_kernels)])


XFORMERS_SHAPES = [
    "prefill",
    "decodes of very unequal length",
    "mixed",
    "long prefills beside short",
]


@pytest.mark.parametrize("name", XFORMERS_SHAPES)
@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS.keys())
@pytest.mark.parametrize("softcap", [None, 30.0], ids=["uncapped", "capped"])
def test_xformers_biases_and_rows_equal_the_reference(
    name: str, bounds: Bounds, softcap: float | None
):
    pytest.importorskip("xformers", exc_type=ImportError)
    shape = SHAPES[name].with_block_size(16)
    expected, expected_memory = run_steps(ReferenceBackend(), shape, bounds, softcap)
    backend = MaterialisedXformers(CPU, torch.float32, block_size=16)
    output, memory = run_steps(backend, shape, bounds, softcap)
    tolerance = 1e-5 if softcap is None else 5e-5
    torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(memory, expected_memory)


def test_reference_equals_transformers_attention_of_one_whole_sequence():
    generator = torch.Generator().manual_seed(1)
    memory = paged_memory(
        num_blocks=8, block_size=4, num_layers=NUM_LAYERS, num_kv_heads=2, head_dim=8
    )
    table = random_block_table([11], 4, 8, generator)
    metadata = metadata_for(memory, [11], [11], table)
    query, key, value = (torch.randn(11, heads, 8, generator=generator) for heads in (6, 2, 2))
    layer = layer_of(memory, 1)
    output = ReferenceBackend().forward(
        LayerCall(query, key, value, layer, metadata, Scoring(0.35))
    )

    module = torch.nn.Module()
    module.num_key_value_groups = 3  # type: ignore[assignment]
    module.is_causal = True  # type: ignore[assignment]
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    expected, _ = sdpa_attention_forward(module, q, k, v, attention_mask=None, scaling=0.35)
    torch.testing.assert_close(output, expected[0], atol=1e-5, rtol=1e-5)


@needs_kernels
def test_native_answers_do_not_depend_on_the_number_of_threads():
    shape = SHAPES["few long decodes"]
    expected, _ = run_steps(ReferenceBackend(), shape)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 2)  # parts of sequences, more than there are requests
        output, _ = run_steps(get_backend("native", CPU, torch.float32, 16), shape)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


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
def test_native_backend_follows_no_table_out_of_its_memory(
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


def test_causal_mask_is_aligned_to_the_last_token():
    assert visibility_mask(2, 4).tolist() == [[True, True, True, False], [True, True, True, True]]


@ON_A_CPU
def test_rows_of_other_layers_and_requests_are_left_alone(name: str):
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


@given(st.lists(st.integers(1, 500), max_size=30))
def test_buckets_hold_every_sequence_once_and_waste_at_most_a_quarter(lengths: list[int]):
    buckets = bucket_by_length(lengths)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(lengths)))
    for bucket in buckets:
        members = [lengths[index] for index in bucket]
        assert min(members) >= 0.75 * max(members)


def test_auto_is_torch_on_a_cpu_without_kernels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMNI_NATIVE", "0")
    assert get_backend("auto", "cpu", torch.float32, 16).name == "torch"
    with pytest.raises(ValueError, match="turned off by OMNI_NATIVE=0"):
        get_backend("native", "cpu", torch.float32, 16)


@needs_kernels
def test_auto_is_native_on_a_cpu_in_float32_alone():
    assert get_backend("auto", "cpu", torch.float32, 16).name == "native"
    assert get_backend("auto", "cpu", torch.bfloat16, 16).name == "torch"


@pytest.mark.parametrize(
    ("name", "device", "dtype", "block_size", "message"),
    [
        ("flash", "cpu", torch.float32, 16, "known are auto, native, torch, xformers, reference"),
        ("torch", "cpu", torch.int32, 16, "floating point"),
        ("native", "cuda", torch.float32, 16, "CPUs only, not on cuda"),
        ("native", "cpu", torch.bfloat16, 16, "needs float32, got torch.bfloat16"),
        ("xformers", "cpu", torch.float16, 16, "CUDA devices only, not on cpu"),
        ("xformers", "cuda", torch.float32, 16, "float16 or bfloat16, got torch.float32"),
        ("xformers", "cuda", torch.float16, 24, "multiple of 16, got 24"),
    ],
)
def test_unsupported_combination_says_what_is_needed(
    name: str, device: str, dtype: torch.dtype, block_size: int, message: str
):
    with pytest.raises(ValueError, match=message):
        get_backend(name, device, dtype, block_size)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["prefill", "decodes of very unequal length", "mixed"])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS.keys())
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["uncapped", "capped"])
def test_xformers_kernels_equal_the_reference_on_cuda(
    name: str, block_size: int, bounds: Bounds, softcap: float | None
):
    pytest.importorskip("xformers", exc_type=ImportError)
    shape = SHAPES[name]
    outputs = []
    for backend in (
        get_backend("xformers", "cuda", torch.float16, block_size),
        ReferenceBackend(),
    ):
        generator = torch.Generator().manual_seed(0)
        memory = paged_memory(
            num_blocks=32,
            block_size=block_size,
            num_layers=2,
            num_kv_heads=2,
            head_dim=64,
            dtype=torch.float16,
            device="cuda",
        )
        memory.buffer.view(torch.float16).fill_(0.1)
        table = random_block_table(shape.seq_lens, block_size, 32, generator)
        on_cpu = metadata_for(
            memory,
            shape.query_lens,
            shape.seq_lens,
            table,
            window=bounds.window,
            chunk_size=bounds.chunk_size,
        )
        metadata = dataclasses.replace(
            on_cpu,
            block_table=on_cpu.block_table.cuda(),
            slot_mapping=on_cpu.slot_mapping.cuda(),
            row_mapping=on_cpu.row_mapping.cuda(),
        )
        qkv = torch.randn(metadata.num_tokens, 8, 64, generator=generator).half().cuda()
        query, key, value = qkv.split((4, 2, 2), dim=1)
        backend.begin_step(metadata)
        layer = layer_of(memory, 1)
        outputs.append(
            backend.forward(LayerCall(query, key, value, layer, metadata, Scoring(0.125, softcap)))
        )
    torch.testing.assert_close(outputs[0], outputs[1], atol=2e-3, rtol=2e-3)

"""What a query does not see does not reach it, also where it is NaN or infinite; what it sees does.

Everything that no query sees holds NaN as well: other pages, slots behind a sequence in its last
block, positions that a window has passed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.attention.metadata import AttentionBackend, LayerCall, Scoring
from engine.attention.reference import ReferenceBackend
from engine.attention.registry import get_backend
from engine.layers.mamba import Chunks, SsdInputs, ssd_scan
from prefix_cache import LayerKVCache
from tests.support.attention_steps import BOUNDS, Bounds, Shape, bounded_metadata
from tests.support.examples import examples
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
class Spoilt:
    """One position of one request whose key, or value, or both, hold a number that is none."""

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
    """One layer of a step; the same numbers in every call, but for what is spoilt."""
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
    """``(num_tokens,)`` booleans: the queries that see the spoilt position."""
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
BACKENDS = pytest.mark.parametrize(
    "name", ["reference", "torch", pytest.param("native", marks=needs_kernels)]
)
SHAPES = {
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


def backend_of(name: str, shape: Shape) -> AttentionBackend:
    return get_backend(name, "cpu", torch.float32, shape.block_size)


def assert_only_who_sees_it_is_touched(
    name: str, shape: Shape, bounds: Bounds, scoring: Scoring, spoilt: Spoilt
) -> None:
    clean = run_spoilt_step(ReferenceBackend(), shape, bounds, scoring, None, unused=0.0)
    assert clean.isfinite().all()
    output = run_spoilt_step(backend_of(name, shape), shape, bounds, scoring, spoilt)
    touched = sees(shape, bounds, spoilt)
    torch.testing.assert_close(output[~touched], clean[~touched], atol=5e-5, rtol=5e-5)
    if "value" in spoilt.parts:
        assert not output[touched].isfinite().flatten(1).all(1).any()
    elif math.isnan(spoilt.number):
        # An infinite key may only say that it has no weight, and torch gives zeros where none has.
        is_zero = (output[touched] == 0.0).flatten(1).all(1)
        is_finite = output[touched].isfinite().flatten(1).all(1)
        assert not (is_finite & ~is_zero).any()


@BACKENDS
@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_unused_memory_may_hold_anything(name: str, shape: Shape, scoring: Scoring):
    for bounds in (BOUNDS["all"], BOUNDS["window of 3"]):
        clean = run_spoilt_step(ReferenceBackend(), shape, bounds, scoring, None, unused=0.0)
        for unused in (NAN, INFINITY):
            backend = backend_of(name, shape)
            output = run_spoilt_step(backend, shape, bounds, scoring, None, unused=unused)
            torch.testing.assert_close(output, clean, atol=5e-5, rtol=5e-5)


@BACKENDS
@given(st.data())
@settings(max_examples=examples(40))
def test_any_spoilt_position_touches_only_who_sees_it(name: str, data: st.DataObject):
    query_lens = sorted(data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=4)))
    seq_lens = tuple(query_len + data.draw(st.integers(0, 40)) for query_len in query_lens)
    block_size = data.draw(st.sampled_from([1, 4, 16]))
    shape = Shape(tuple(query_lens), seq_lens, block_size)
    length = st.none() | st.integers(1, 50)
    bounds = Bounds(window=data.draw(length), chunk_size=data.draw(length))
    request = data.draw(st.integers(0, len(seq_lens) - 1))
    spoilt = Spoilt(
        request,
        data.draw(st.integers(0, seq_lens[request] - 1)),
        data.draw(st.sampled_from([("value",), ("key",), ("key", "value")])),
        data.draw(st.sampled_from([NAN, INFINITY, -INFINITY])),
    )
    scoring = data.draw(st.sampled_from(list(SCORINGS.values())))
    assert_only_who_sees_it_is_touched(name, shape, bounds, scoring, spoilt)


@BACKENDS
@pytest.mark.parametrize("query_lens", [(1, 1, 1), (1, 7, 9)], ids=["decodes", "mixed"])
def test_an_encoders_nan_reaches_its_own_request_alone(name: str, query_lens: tuple[int, ...]):
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
def test_a_late_nan_of_a_recurrence_leaves_earlier_tokens_and_other_requests_alone(
    part: str, place: int
):
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
    expected, expected_states = ssd_scan(SsdInputs(**numbers), states, chunks)
    for number in (NAN, INFINITY):
        spoilt = {name: tensor.clone() for name, tensor in numbers.items()}
        spoilt[part][30 + place] = number
        y, after = ssd_scan(SsdInputs(**spoilt), states, chunks)
        others = [*range(30 + place), *range(130, 135)]
        torch.testing.assert_close(y[others], expected[others])
        torch.testing.assert_close(after[[0, 2]], expected_states[[0, 2]])
        assert not y[30 + place].isfinite().all()

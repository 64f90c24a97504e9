"""All cases of the triton backend, interpreted: ``make interpret``, about 20 minutes.

pytest collects this file only if it is named explicitly.
"""

from __future__ import annotations

import pytest
import torch

from engine.attention.triton_backend import TritonBackend
from tests.engine.attention.test_attention_cross import assert_steps_equal_brute_force, shapes
from tests.engine.attention.test_triton_backend import (
    CPU,
    TOLERANCES,
    assert_equals_the_reference,
)
from tests.support.attention_steps import BOUNDS, SHAPES, Bounds, Shape, run_cross_step
from tests.support.reference_attention import ReferenceBackend

pytestmark = pytest.mark.usefixtures("interpreted")

DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
# The interpreter needs minutes for prefills of hundreds of tokens: these run in one type.
LONG = ("prefix longer than a query tile", "long prefills beside short")


@DTYPES
@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS.keys())
@pytest.mark.parametrize("shape", [each for each in SHAPES if each not in LONG])
def test_every_shape_in_every_bound(shape: str, bounds: Bounds, dtype: torch.dtype):
    at_16, at_48 = (SHAPES[shape].with_block_size(size) for size in (16, 48))
    assert_equals_the_reference(at_16, bounds, dtype=dtype, num_layers=1)
    assert_equals_the_reference(at_48, bounds, 30.0, dtype=dtype, num_layers=1)


@pytest.mark.parametrize("shape", LONG)
@pytest.mark.parametrize("bounds", ["all", "window of 16"])
def test_long_prefills(shape: str, bounds: str):
    assert_equals_the_reference(SHAPES[shape], BOUNDS[bounds], num_layers=1)


@DTYPES
@pytest.mark.parametrize("num_distances", [1, 5, 16, 33, 2000])
@pytest.mark.parametrize("shape", ["mixed", "decodes of very unequal length", "few long decodes"])
def test_biases_by_distance(shape: str, num_distances: int, dtype: torch.dtype):
    assert_equals_the_reference(
        SHAPES[shape], num_distances=num_distances, dtype=dtype, num_layers=1
    )


@pytest.mark.parametrize("head_dim", [16, 20, 64, 80, 96, 128, 160, 256])
@pytest.mark.parametrize("heads", [(4, 4), (7, 1), (12, 3), (32, 1)], ids=str)
def test_every_width_and_grouping(head_dim: int, heads: tuple[int, int]):
    shape = Shape((1, 1, 9), (40, 300, 30), 16, *heads, head_dim)
    assert_equals_the_reference(shape, num_layers=1)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("shape", shapes(16))
def test_cross_attention(shape: str, block_size: int):
    backend = TritonBackend(CPU, torch.float32, block_size)
    assert_steps_equal_brute_force(backend, shapes(block_size)[shape])
    assert_steps_equal_brute_force(backend, shapes(block_size)[shape], softcap=2.0)


@DTYPES
def test_cross_attention_in_half_types(dtype: torch.dtype):
    outputs = [
        run_cross_step(backend, (1, 1, 5, 40), (300, 0, 33, 0), 16, dtype=dtype)
        for backend in (TritonBackend(CPU, dtype, 16), ReferenceBackend())
    ]
    torch.testing.assert_close(*outputs, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])

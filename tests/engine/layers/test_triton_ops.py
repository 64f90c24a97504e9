"""Triton kernels of layers against torch operations; interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from engine.layers import LayerOps, RotaryEmbedding
from tests.support.interpreted_triton import need_interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.gpu)], ids=["cpu", "gpu"])
def ops(request: pytest.FixtureRequest) -> LayerOps:
    """Interpreted or compiled kernels."""
    if not request.param:
        need_interpreter()
    elif not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from engine.layers.triton_ops import TritonLayerOps

    return TritonLayerOps()


def near(ours: Tensor, theirs: Tensor) -> None:
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[ours.dtype]
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@DTYPES
@pytest.mark.parametrize("wide_weight", [False, True])
def test_norms(ops: LayerOps, dtype: torch.dtype, wide_weight: bool):
    weight = numbers(48, dtype=torch.float32 if wide_weight else dtype)
    x, residual = numbers(5, 96, dtype=dtype)[:, 40:88], numbers(5, 48, dtype=dtype, seed=1)
    near(ops.rms_norm(x, weight, 1e-6), LayerOps().rms_norm(x, weight, 1e-6))
    ours, theirs = residual.clone(), residual.clone()
    expected = LayerOps().add_rms_norm(x, theirs, weight, 1e-6)
    near(ops.add_rms_norm(x, ours, weight, 1e-6), expected)
    near(ours, theirs)  # the interpreter truncates to bfloat16 instead of rounding


@DTYPES
@pytest.mark.parametrize("rotary_dim", [12, 20])
def test_rotations(ops: LayerOps, dtype: torch.dtype, rotary_dim: int):
    frequencies = 10.0 ** -torch.arange(rotary_dim // 2)
    rotary = RotaryEmbedding(frequencies, 1.0, 64, dtype=dtype, device=torch.device(DEVICE))
    cos, sin = rotary(torch.tensor([3, 63, 0, 7], device=DEVICE))
    together = numbers(4, 7 * 20, dtype=dtype)
    ours, theirs = together.clone(), together.clone()
    for layer_ops, rows in ((ops, ours), (LayerOps(), theirs)):
        layer_ops.rotate(rows[:, :100].view(4, 5, 20), cos, sin)  # the columns behind are unchanged
    near(ours, theirs)
    assert torch.equal(ours[:, 100:], together[:, 100:])


@DTYPES
@pytest.mark.parametrize("activation", [nn.SiLU(), nn.GELU()], ids=str)
def test_gates(ops: LayerOps, dtype: torch.dtype, activation: nn.Module):
    x = numbers(3, 2 * 1100, dtype=dtype)
    near(ops.gate(x, activation), LayerOps().gate(x, activation))
    assert ops.gate(x[:0], activation).shape == (0, 1100)

"""Products with 8-bit and 4-bit weights against products with the dequantized matrix."""

from __future__ import annotations

from copy import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.checkpoints.checkpoint import Checkpoint
from engine.checkpoints.quantized_weight import SCHEMES, QuantizedWeight
from engine.layers import LayerOps, Linear, NativeLayerOps
from engine.models.base import CausalModel, ModelSettings
from engine.models.model_loader import load_model
from engine.native import load_kernels
from omni.seeded.language_models import build_causal_lm
from tests.support.native_kernels import needs_kernels

CPU = torch.device("cpu")


NATIVE = [
    pytest.param(way, marks=needs_kernels) for way in ("native", "native-rows", "native-floats")
]


@pytest.fixture(params=["torch", *NATIVE])
def ops(request: pytest.FixtureRequest) -> LayerOps:
    """Each implementation: torch, and the kernels with tiles, with integers, and with floats."""
    if request.param == "torch":
        return LayerOps()
    kernels = copy(load_kernels())
    whole = request.param != "native-floats"
    kernels.has_tiles &= request.param == "native"
    kernels.has_whole_codes &= whole
    kernels.has_bfloat16 &= whole
    return NativeLayerOps(kernels)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Check a relative error of at most 5e-3, the tolerance of a layer."""
    assert actual.shape == expected.shape
    assert (actual - expected).norm() <= 5e-3 * expected.norm()


@pytest.mark.parametrize(("name", "error"), [("int8", 0.01), ("int4", 0.1)])
@pytest.mark.parametrize("width", [1, 31, 32, 100])
def test_weights_are_rounded_to_the_nearest_code(name: str, error: float, width: int):
    weight = normal(6, width) * torch.tensor([1e-6, 1e-2, 1, 1e4, 0, 1])[:, None]
    held = SCHEMES[name].quantize(weight)
    rounded = held.dequantize()
    # Half a step plus the error of scales and offsets of eleven bits.
    steps = held.scales.repeat_interleave(held.group_size, dim=1)[:, :width]
    allowed = steps / 2 + weight.abs().amax(1, keepdim=True) / 500
    assert bool(((rounded - weight).abs() <= allowed).all())
    assert (rounded - weight).norm() <= error * weight.norm()


@pytest.mark.parametrize("rows", [0, 1, 3, 70])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_product_of_parts_equals_that_with_dequantized_weights(
    scheme: str, rows: int, ops: LayerOps
):
    sizes = {"a": 8, "b": 39, "c": 17}
    linear = Linear(72, sizes, bias=True, dtype=torch.float32, device=CPU)
    linear.hold_quantized(SCHEMES[scheme], ops)
    places = dict(linear.targets(""))
    plain = {name: normal(n, 72, seed=n) for name, n in sizes.items()}
    biases = [normal(n, seed=n + 1) for n in sizes.values()]
    for name, bias in zip(("c", "a", "b"), (biases[2], *biases), strict=False):
        places[f"{name}.weight"].copy_(plain[name])
        places[f"{name}.bias"].copy_(bias)
    x = normal(rows, 100)[:, :72]
    matrix = torch.cat([SCHEMES[scheme].quantize(w).dequantize() for w in plain.values()])
    assert_near(linear(x), F.linear(x, matrix, torch.cat(biases)))
    assert linear.nbytes < 0.5 * matrix.nbytes


def test_parts_may_have_different_layouts(ops: LayerOps):
    linear = Linear(64, {"a": 32, "b": 32, "c": 16}, dtype=torch.float32, device=CPU)
    linear.hold_quantized(None, ops)
    codes = torch.arange(32 * 64, dtype=torch.uint8).view(32, 64) % 16
    a = QuantizedWeight(codes, normal(32, 2), normal(32, 2, seed=1), 32, 4)
    b = QuantizedWeight(codes * 4, normal(32, 4), normal(32, 4, seed=2), 16, 8)
    c = normal(16, 64, seed=3)
    for name, came in (("a", a), ("b", b), ("c", c)):
        linear.hold(name, came)
    x = normal(3, 64, seed=4)
    assert_near(linear(x), F.linear(x, torch.cat([a.dequantize(), b.dequantize(), c])))


@pytest.mark.parametrize("rows", [0, 1, 13, 16, 17, 70])
@pytest.mark.parametrize(("out", "width"), [(32, 64), (39, 71), (200, 33)])
def test_a_product_with_bfloat16_equals_that_in_float32(
    rows: int, out: int, width: int, ops: LayerOps
):
    weight, bias = normal(out, width).bfloat16(), normal(out, seed=1)
    x = normal(rows, 100, seed=2)[:, :width]
    expected = F.linear(x, weight.float(), bias)
    if type(ops) is LayerOps:  # computes in bfloat16 throughout, including x and the result
        x, bias = x.bfloat16(), bias.bfloat16()
    assert_near(ops.pack_weight(weight).multiply(x, bias).float(), expected)


@needs_kernels
@pytest.mark.parametrize("rows", [16, 31, 300])
def test_tiles_equal_rows_up_to_rounding(rows: int):
    """Also where rows are more than one piece takes; in tiles, a row's bits are its own."""
    kernels, weight = load_kernels(), normal(96, 1500).bfloat16()
    packed, x = kernels.pack_bfloat16(weight), normal(rows, 1500, seed=1)
    tiled = kernels.quantized(packed, x, None, in_tiles=True)
    torch.testing.assert_close(tiled, kernels.quantized(packed, x, None), rtol=1e-4, atol=1e-3)
    again = kernels.quantized(packed, x.flip(0)[:16], None, in_tiles=True)
    assert torch.equal(again, tiled.flip(0)[:16])
    x[3], x[5, 7] = torch.nan, torch.inf
    broken = kernels.quantized(packed, x, None, in_tiles=True)
    finite = [row for row in range(rows) if row not in (3, 5)]
    assert torch.equal(broken[finite], tiled[finite])
    assert not broken[[3, 5]].isfinite().any()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_non_finite_row_affects_only_itself(scheme: str, ops: LayerOps):
    weight = SCHEMES[scheme].quantize(normal(40, 96))
    x = normal(5, 96, seed=1)
    expected = F.linear(x, weight.dequantize())
    x[1, 3], x[3, 90], x[4] = torch.nan, torch.inf, 0
    product = ops.pack_quantized(weight).multiply(x, None)
    assert not product[[1, 3]].isfinite().any()
    assert_near(product[[0, 2]], expected[[0, 2]])
    assert not product[4].any()


@pytest.mark.parametrize("family", ["qwen2", "jamba"])
def test_a_model_keeps_its_weights_quantized(family: str, tmp_path: Path):
    folder = build_causal_lm(tmp_path, family, num_hidden_layers=2, with_tokenizer=False)

    def load(quantization: str | None) -> CausalModel:
        settings = ModelSettings(torch.float32, CPU, 4, 96, quantization=quantization)  # type: ignore[arg-type]
        return load_model(Checkpoint.open(folder), settings)

    plain, int8, int4 = load(None), load("int8"), load("int4")
    assert plain.weight_nbytes > int8.weight_nbytes > int4.weight_nbytes
    hidden = normal(5, plain.hidden_size)
    expected = plain.compute_logits(hidden)
    assert (int8.compute_logits(hidden) - expected).norm() < 0.02 * expected.norm()

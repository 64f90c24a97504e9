"""Linear, norm and MLP against torch and transformers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from engine.layers import GatedMLP, HeadNorm, Linear, RMSNorm, can_pack

CPU = torch.device("cpu")


def filled_linear(*, bias: bool) -> tuple[Linear, dict[str, Tensor]]:
    linear = Linear(24, {"a": 8, "b": 40}, bias=bias, dtype=torch.float32, device=CPU)
    generator = torch.Generator().manual_seed(0)
    targets = {name: place for name, place in linear.targets("x.") if isinstance(place, Tensor)}
    for target in targets.values():
        target.normal_(generator=generator)
    return linear, targets


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 16, 65])
def test_merged_linear_equals_its_parts_side_by_side(rows: int, bias: bool, packed: bool):
    linear, parts = filled_linear(bias=bias)
    parts = {name: tensor.clone() for name, tensor in parts.items()}
    if packed:
        linear.pack()
    x = torch.randn(rows, 24, generator=torch.Generator().manual_seed(1))
    expected = [F.linear(x, parts[f"x.{n}.weight"], parts.get(f"x.{n}.bias")) for n in ("a", "b")]
    torch.testing.assert_close(linear(x), torch.cat(expected, dim=1), atol=1e-5, rtol=1e-5)


def test_packing_keeps_one_copy_of_the_weight_and_may_be_repeated():
    linear, _ = filled_linear(bias=True)
    before = linear.nbytes
    linear.pack()
    linear.pack()
    assert linear.nbytes == before == (48 * 24 + 48) * 4
    assert [name for name, _ in linear.named_parameters()] == ["bias"]
    with pytest.raises(RuntimeError, match="packed already"):
        list(linear.targets(""))


def test_packed_linear_takes_strided_rows():
    linear, _ = filled_linear(bias=True)
    wide = torch.randn(5, 48, generator=torch.Generator().manual_seed(2))
    expected = linear(wide[:, :24])
    linear.pack()
    torch.testing.assert_close(linear(wide[:, :24]), expected, atol=1e-5, rtol=1e-5)


def test_only_float32_on_a_cpu_is_packed():
    assert can_pack(CPU, torch.float32) == torch.backends.mkldnn.is_available()
    assert not can_pack(CPU, torch.bfloat16)
    assert not can_pack(torch.device("cuda"), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_equals_transformers(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(32, 1e-5, dtype=dtype, device=CPU)
    norm.weight.data.normal_(1.0, 0.2, generator=generator)
    theirs = LlamaRMSNorm(32, 1e-5)
    theirs.weight.data = norm.weight.data
    x = (10 * torch.randn(7, 32, generator=generator)).to(dtype)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(norm(x), theirs(x).detach(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_with_an_offset_equals_gemmas(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    theirs = Gemma3RMSNorm(32, 1e-6)
    theirs.weight.data.normal_(0.0, 0.2, generator=generator)
    theirs.to(dtype)
    norm = RMSNorm(32, 1e-6, offset=1.0, dtype=dtype, device=CPU)
    norm.weight.data.copy_(theirs.weight.data)
    norm.finish_loading()
    x = (10 * torch.randn(7, 32, generator=generator)).to(dtype)
    # In half precision to the last bit: nothing is rounded in between.
    tolerance = 1e-6 if dtype == torch.float32 else 0.0
    torch.testing.assert_close(norm(x), theirs(x).detach(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("offset", "norm"), [(0.0, LlamaRMSNorm), (1.0, Gemma3RMSNorm)])
def test_head_norm_equals_transformers(offset: float, norm: type[nn.Module], dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    ours = HeadNorm(4, 2, 16, 1e-6, offset=offset, dtype=dtype, device=CPU)
    theirs = {name: norm(16, 1e-6).to(dtype) for name in ("q_norm.weight", "k_norm.weight")}
    for name, target in ours.targets(""):
        weight = theirs[name].get_parameter("weight").data
        weight.normal_(1.0 - offset, 0.2, generator=generator)
        target.copy_(weight)
    ours.finish_loading()
    heads = torch.randn(5, 6, 16, generator=generator).to(dtype)
    query, key = (theirs[f"{part}_norm.weight"] for part in "qk")
    expected = torch.cat([query(heads[:, :4]), key(heads[:, 4:])], dim=1).detach()
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(ours(heads), expected, atol=tolerance, rtol=tolerance)


def test_norm_adds_to_the_residual_in_place():
    norm = RMSNorm(32, 1e-5, dtype=torch.float32, device=CPU)
    norm.weight.data.fill_(1.5)
    x, residual = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0))
    total = x + residual
    normed = norm.add(x, residual)
    assert torch.equal(residual, total)
    assert torch.equal(normed, norm(total))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
def test_mlp_equals_transformers(activation: str):
    config = LlamaConfig(
        hidden_size=16,
        num_attention_heads=1,
        intermediate_size=40,
        hidden_act=activation,
        mlp_bias=True,
    )
    theirs = LlamaMLP(config)
    mlp = GatedMLP(16, 40, activation, bias=True, dtype=torch.float32, device=CPU)
    for name, target in mlp.targets(""):
        target.copy_(theirs.get_parameter(name).data)
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(mlp(x), theirs(x).detach(), atol=1e-5, rtol=1e-5)


def test_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="activation must be one of gelu, .*, got 'zelu'"):
        GatedMLP(4, 4, "zelu", dtype=torch.float32, device=CPU)

"""Layers against torch and transformers: products, norms, MLPs, rotary tables, experts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, JambaConfig, LlamaConfig, PhiConfig, Qwen2_5_VLTextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.jamba.modeling_jamba import JambaSparseMoeBlock
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerTextConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerTextSparseMoeBlock,
)

from engine.layers import (
    MLP,
    ExpertsConfig,
    HeadNorm,
    Linear,
    MultiAxisRotaryEmbedding,
    NativeLayerOps,
    RMSNorm,
    RotaryEmbedding,
    SparseMoE,
    apply_rotary,
    can_pack,
    rope_frequencies,
)
from engine.native import load_kernels
from tests.support.native_kernels import needs_kernels
from tests.support.pretended_cuda import pretended_cuda

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


def test_packed_linear_accepts_strided_rows():
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
    # Exact in half precision: no intermediate result is rounded.
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
    mlp = MLP(16, 40, activation, bias=True, dtype=torch.float32, device=CPU)
    for name, target in mlp.targets(""):
        target.copy_(theirs.get_parameter(name).data)
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(mlp(x), theirs(x).detach(), atol=1e-5, rtol=1e-5)


MAX_LEN = 96
HEAD_DIM = 16
THETA = {"rope_theta": 10_000.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 3.0, **THETA},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, **THETA},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        **THETA,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, **THETA},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0 + 0.1 * i for i in range(HEAD_DIM // 2)],
        "long_factor": [2.0 + 0.5 * i for i in range(HEAD_DIM // 2)],
        **THETA,
    },
}


def config_for(parameters: dict[str, Any], max_positions: int = MAX_LEN) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=max_positions,
        rope_parameters=dict(parameters),
    )


def rotary_for(config: Any, max_model_len: int) -> RotaryEmbedding:
    inv_freq, scaling = rope_frequencies(config, max_model_len)
    return RotaryEmbedding(inv_freq, scaling, max_model_len, dtype=torch.float32, device=CPU)


def heads(num_tokens: int, num_heads: int) -> Tensor:
    return torch.randn(
        num_tokens, num_heads, HEAD_DIM, generator=torch.Generator().manual_seed(num_heads)
    )


@pytest.mark.parametrize("max_model_len", [24, MAX_LEN])
@pytest.mark.parametrize("parameters", VARIANTS.values(), ids=VARIANTS.keys())
def test_rotation_equals_transformers(parameters: dict[str, Any], max_model_len: int):
    """At the maximum length, at which the length-dependent variants agree by definition."""
    config = config_for(parameters)
    query, key = heads(max_model_len, 4), heads(max_model_len, 2)
    positions = torch.arange(max_model_len)
    cos, sin = LlamaRotaryEmbedding(config)(query, positions[None])
    expected = apply_rotary_pos_emb(query, key, cos[0], sin[0], unsqueeze_dim=1)

    own_cos, own_sin = rotary_for(config, max_model_len)(positions)
    rotated = apply_rotary(torch.cat((query, key), dim=1), own_cos, own_sin)
    torch.testing.assert_close(rotated, torch.cat(expected, dim=1), atol=1e-5, rtol=1e-5)


def test_dynamic_beyond_the_trained_length_equals_transformers_at_the_longest():
    config = config_for(VARIANTS["dynamic"], max_positions=32)
    positions = torch.arange(MAX_LEN)
    cos, sin = LlamaRotaryEmbedding(config)(heads(MAX_LEN, 1), positions[None])
    own_cos, own_sin = rotary_for(config, MAX_LEN)(positions)
    half = HEAD_DIM // 2
    torch.testing.assert_close(own_cos[:, 0], cos[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(own_sin[:, 0, half:], sin[0, :, half:], atol=1e-5, rtol=0)


def test_partial_rotation_keeps_the_other_channels():
    config = PhiConfig(
        hidden_size=64,
        num_attention_heads=4,
        rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5, **THETA},
    )
    positions = torch.tensor([3, 11, 50])
    x = heads(3, 2)
    cos, sin = PhiRotaryEmbedding(config)(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x[..., :8], x[..., :8], cos[0], sin[0])
    rotated = apply_rotary(x.clone(), *rotary_for(config, 64)(positions))
    torch.testing.assert_close(rotated[..., :8], expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(rotated[..., 8:], x[..., 8:])


def test_rotation_works_inside_a_wider_tensor():
    qkv = torch.randn(5, 6 * HEAD_DIM, generator=torch.Generator().manual_seed(0))
    kept = qkv.clone()
    view = qkv[:, : 4 * HEAD_DIM].view(5, 4, HEAD_DIM)
    rotary = rotary_for(config_for(VARIANTS["default"]), MAX_LEN)
    cos, sin = rotary(torch.arange(5))
    expected = apply_rotary(view.clone(), cos, sin)
    apply_rotary(view, cos, sin)
    assert torch.equal(qkv[:, : 4 * HEAD_DIM], expected.flatten(1))
    assert torch.equal(qkv[:, 4 * HEAD_DIM :], kept[:, 4 * HEAD_DIM :])


def test_old_style_rope_scaling_is_read(tmp_path: Path):
    old = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "rope_theta": 500.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }
    (tmp_path / "config.json").write_text(json.dumps(old))
    inv_freq, scaling = rope_frequencies(AutoConfig.from_pretrained(tmp_path), MAX_LEN)
    plain, _ = rope_frequencies(config_for({"rope_type": "default", "rope_theta": 500.0}), MAX_LEN)
    torch.testing.assert_close(inv_freq, plain / 2.0)
    assert scaling == 1.0


def test_config_without_rope_is_refused():
    config = config_for(VARIANTS["default"])
    config.rope_parameters = None
    with pytest.raises(ValueError, match="LlamaConfig has no rope_parameters"):
        rope_frequencies(config, MAX_LEN)


@pytest.mark.parametrize("sections", [[2, 3, 3], [1, 0, 7], [2, 1, 1, 2, 1, 1]])
def test_several_axes_equal_transformers(sections: list[int]):
    rope = {"rope_type": "default", "mrope_section": sections, **THETA}
    config = Qwen2_5_VLTextConfig(
        hidden_size=4 * HEAD_DIM, num_attention_heads=4, rope_parameters=rope
    )
    positions = torch.randint(0, MAX_LEN, (3, 50), generator=torch.Generator().manual_seed(0))
    expected = Qwen2_5_VLRotaryEmbedding(config)(torch.zeros(1), positions[:, None])
    inv_freq, scaling = rope_frequencies(config, MAX_LEN)
    rotary = MultiAxisRotaryEmbedding(
        inv_freq, scaling, MAX_LEN, sections=sections, dtype=torch.float32, device=CPU
    )
    cos, sin = rotary(positions)
    sign = torch.ones(HEAD_DIM)
    sign[: HEAD_DIM // 2] = -1
    torch.testing.assert_close(cos[:, 0], expected[0][0])
    torch.testing.assert_close(sin[:, 0] * sign, expected[1][0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_type": "spiral"}, "rope_type 'spiral'; known are default, .*yarn"),
        ({"rope_type": ["default"]}, "rope_type must be a name, got"),
        ({"partial_rotary_factor": 1e9}, "partial_rotary_factor must be above 0 and at most 1"),
        ({"rope_theta": 0.0}, "give no finite frequencies"),
        ({"rope_theta": "large"}, "rope_parameters .* cannot be used: TypeError"),
        ({"rope_type": "yarn"}, "rope_parameters .* cannot be used: KeyError: 'factor'"),
    ],
)
def test_invalid_rope_parameters_are_refused(changes: dict[str, Any], message: str) -> None:
    config = config_for(VARIANTS["default"])
    config.rope_parameters = VARIANTS["default"] | changes
    with pytest.raises(ValueError, match=message):
        rope_frequencies(config, MAX_LEN)


def test_heads_that_are_too_wide_are_refused_before_a_table_is_made() -> None:
    config = config_for(VARIANTS["default"])
    config.head_dim, config.hidden_size = None, 10**12
    with pytest.raises(ValueError, match=r"head_dim, or hidden_size by .*must be 1 to 65536"):
        rope_frequencies(config, MAX_LEN)


def test_a_table_made_in_pieces_is_the_one_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
    inv_freq, scaling = rope_frequencies(config_for(VARIANTS["default"]), MAX_LEN)
    whole = RotaryEmbedding(inv_freq, scaling, MAX_LEN, **options).table
    monkeypatch.setattr("engine.layers.layer_ops._ROWS_AT_ONCE", 7)
    assert torch.equal(RotaryEmbedding(inv_freq, scaling, MAX_LEN, **options).table, whole)


HIDDEN, WIDTH = 32, 64

SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "num_experts_per_tok": 2, "hidden_act": "silu"}
PLAIN = ExpertsConfig(5, 2, WIDTH)


def qwen3() -> nn.Module:
    sizes = SIZES | {"moe_intermediate_size": WIDTH, "num_experts": 5, "norm_topk_prob": True}
    return Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**sizes))


def talker() -> nn.Module:
    sizes = SIZES | {"moe_intermediate_size": WIDTH, "num_experts": 5, "norm_topk_prob": True}
    config = Qwen3OmniMoeTalkerTextConfig(**sizes, shared_expert_intermediate_size=96)
    return Qwen3OmniMoeTalkerTextSparseMoeBlock(config)


KINDS: dict[str, tuple[Callable[[], nn.Module], ExpertsConfig]] = {
    "router of its own": (
        lambda: JambaSparseMoeBlock(JambaConfig(**SIZES, intermediate_size=WIDTH, num_experts=5)),
        replace(PLAIN, router="router"),
    ),
    "normalised": (qwen3, replace(PLAIN, normalize=True)),
    "named by numbers": (
        lambda: MixtralSparseMoeBlock(
            MixtralConfig(**SIZES, intermediate_size=WIDTH, num_local_experts=5)
        ),
        replace(PLAIN, normalize=True, names=("w1", "w3", "w2")),
    ),
    "with a shared one": (talker, replace(PLAIN, normalize=True, shared_size=96)),
}


@cache
def experts(kind: str) -> tuple[SparseMoE, nn.Module]:
    make, config = KINDS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        theirs = make().eval()
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    ours = SparseMoE(HIDDEN, config, "silu", dtype=torch.float32, device=CPU)
    stored = dict(theirs.state_dict())
    gate_up, down = stored.pop("experts.gate_up_proj"), stored.pop("experts.down_proj")
    for index, (both, last) in enumerate(zip(gate_up, down, strict=True)):
        parts = (*both.chunk(2), last)
        names = [f"experts.{index}.{name}.weight" for name in config.names]
        stored |= dict(zip(names, parts, strict=True))
    targets = dict(ours.targets(""))
    assert targets.keys() == stored.keys()
    for name, tensor in stored.items():
        targets[name].copy_(tensor)
    return ours, theirs


def rows(count: int) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("num_tokens", [1, 2, 37])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_experts_equal_transformers(kind: str, num_tokens: int) -> None:
    ours, theirs = experts(kind)
    x = rows(num_tokens)
    torch.testing.assert_close(ours(x), theirs(x[None])[0], atol=1e-6, rtol=1e-5)


@torch.inference_mode()
def test_an_expert_runs_only_over_its_own_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = experts("normalised")
    x = rows(3)
    expected = theirs(x[None])[0]
    chosen = ours._route(x)[1]
    counts = chosen.flatten().bincount(minlength=5).tolist()
    ran: dict[int, int] = {}
    for index, expert in enumerate(ours.experts):
        forward = expert.up.forward

        def note(given: Tensor, index: int = index, forward: Any = forward) -> Tensor:
            ran[index] = len(given)
            result: Tensor = forward(given)
            return result

        monkeypatch.setattr(expert.up, "forward", note)
    torch.testing.assert_close(ours(x), expected, atol=1e-6, rtol=1e-5)
    assert ran == {index: count for index, count in enumerate(counts) if count}
    assert 0 < len(ran) < 5


@torch.inference_mode()
def test_experts_on_cuda_need_no_synchronization(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, _ = experts("with a shared one")
    config = KINDS["with a shared one"][1]
    here = SparseMoE(HIDDEN, config, "silu", dtype=torch.bfloat16, device=CPU)
    here.load_state_dict(ours.state_dict())
    x = rows(37).bfloat16()
    expected = here(x)
    with pretended_cuda(monkeypatch) as crossings:
        cuda = torch.device("cuda:0")
        there = SparseMoE(HIDDEN, config, "silu", dtype=torch.bfloat16, device=cuda)
        for target, source in zip(there.parameters(), here.parameters(), strict=True):
            target.copy_(source)
        x = x.to(cuda)
        crossings.clear()
        mixed = there(x)
        assert not crossings.places
        torch.testing.assert_close(mixed.cpu(), expected)


@needs_kernels
@torch.inference_mode()
def test_packed_experts_with_the_c_kernels_equal_the_plain_ones() -> None:
    config = KINDS["with a shared one"][1]
    ours, theirs = experts("with a shared one")
    ops = NativeLayerOps(load_kernels())
    packed = SparseMoE(HIDDEN, config, "silu", dtype=torch.float32, device=CPU, ops=ops)
    packed.load_state_dict(ours.state_dict())
    for module in packed.modules():
        if isinstance(module, Linear):
            module.pack(ops)
    x = rows(37)
    torch.testing.assert_close(packed(x), theirs(x[None])[0], atol=1e-5, rtol=1e-5)

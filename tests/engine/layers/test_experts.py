"""Mixtures of experts against transformers' modules, and what each expert reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import JambaConfig
from transformers.models.jamba.modeling_jamba import JambaSparseMoeBlock
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerTextConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerTextSparseMoeBlock,
)

from engine.layers import ExpertsConfig, Linear, NativeLayerOps, SparseMoE
from engine.native import load_kernels
from tests.support.native_kernels import needs_kernels
from tests.support.pretended_cuda import pretended_cuda

HIDDEN, WIDTH = 32, 64
CPU = torch.device("cpu")
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
def test_an_expert_runs_over_its_own_rows_and_no_other_is_read(
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
def test_on_cuda_nobody_waits_for_how_many_rows_an_expert_has(
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


def test_more_experts_to_a_token_than_there_are_are_refused() -> None:
    with pytest.raises(ValueError, match=r"1 to 4 experts.*num_experts_per_tok is 5"):
        ExpertsConfig(4, 5, 8)

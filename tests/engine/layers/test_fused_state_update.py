"""The seam for fused recurrences: what the CUDA kernel would get is what torch computes with.

The kernel itself needs a GPU and ``mamba_ssm``; here a plain version of its contract stands in.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine import EngineConfig, LLMEngine, SamplingParams, TokensPrompt
from engine.layers.recurrent_mixer import fused_state_update

PROMPTS = [TokensPrompt(tuple(range(20, 20 + n))) for n in (3, 11, 30)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def plain_update(state: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """As mamba_ssm documents ``selective_state_update``: both layouts, the state in place."""
    if state.ndim == 4:
        assert dt.stride(-1) == 0 and a.stride()[-2:] == (0, 0), "the kernel ties a head by strides"
        per_group = x.shape[1] // b.shape[1]
        b, c = (t.repeat_interleave(per_group, 1).unsqueeze(-2) for t in (b, c))
    else:
        b, c = b.unsqueeze(1), c.unsqueeze(1)
    state.mul_(torch.exp(dt.unsqueeze(-1) * a)).add_((dt * x).unsqueeze(-1) * b)
    return (state * c).sum(-1)


@pytest.mark.parametrize(("name", "module"), [("jamba", "mamba"), ("bamba", "mamba2")])
def test_decodes_through_the_seam_equal_torch(
    seeded: Callable[[str], str], name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def update(*args: Tensor) -> Tensor:
        calls.append(args[0].shape[0])
        return plain_update(*args)

    def run() -> list[Tensor]:
        engine = LLMEngine(EngineConfig(model=seeded(name), block_size=4, max_model_len=64))
        outputs = engine.generate(PROMPTS, GREEDY)
        return [output.outputs[0].tensors["hidden_states"] for output in outputs]

    expected = run()
    assert not calls
    monkeypatch.setattr(f"engine.layers.{module}.fused_state_update", lambda device: update)
    for ours, theirs in zip(run(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert len(PROMPTS) in calls


def test_there_is_no_fused_kernel_on_a_cpu() -> None:
    assert fused_state_update(torch.device("cpu")) is None

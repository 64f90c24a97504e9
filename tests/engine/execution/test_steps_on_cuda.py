"""Engines on a pretended CUDA device: the CPU's tokens, nothing mixed, and one wait a step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine import EngineConfig, LLMEngine, RequestOutput, SamplingParams, TokensPrompt
from tests.support.pretended_cuda import (
    BLOCKING_READ,
    BLOCKING_UPLOAD,
    READ,
    UPLOAD,
    WAIT,
    pretended_cuda,
)

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(
    max_tokens=4,
    temperature=0.8,
    top_p=0.9,
    top_k=20,
    seed=3,
    logprobs=2,
    ignore_eos=True,
    repetition_penalty=1.2,
)
# Of the second a page is filled by a decode.
PROMPTS = tuple(TokensPrompt(tuple(range(5, 5 + length))) for length in (5, 14))


def run(
    engine: LLMEngine, params: SamplingParams, after_step: Callable[[], None] = lambda: None
) -> list[tuple[int, ...]]:
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), prompt, params)
    done: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests:
        done |= {output.request_id: output for output in engine.step() if output.finished}
        after_step()
    assert not any(output.error for output in done.values())
    return [done[str(index)].outputs[0].token_ids for index in range(len(PROMPTS))]


@pytest.mark.parametrize(
    ("family", "params", "uploads", "reads"),
    [
        ("t5", GREEDY, 1, 1),
        # Beside the step's: penalties, what shapes a distribution, shares, time orders of states;
        # and how many tokens each expert has, in two layers of float32.
        ("jamba", DRAWN, 9, 3),
    ],
)
def test_decodes_on_cuda_wait_once_a_step_and_give_the_cpus_tokens(
    seeded: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    params: SamplingParams,
    uploads: int,
    reads: int,
):
    def config(device: str, backend: str) -> EngineConfig:
        return EngineConfig(
            model=seeded(family),
            dtype="float32",
            num_blocks=32,
            device=device,
            attention_backend=backend,
        )

    expected = run(LLMEngine(config("cpu", "torch")), params)
    with pretended_cuda(monkeypatch) as crossings:
        engine = LLMEngine(config("cuda:0", "auto"))
        assert engine.memory_plan.attention == "triton"
        steps: list[dict[str, int]] = []

        def after_step() -> None:
            kinds = (UPLOAD, BLOCKING_UPLOAD, READ, BLOCKING_READ, WAIT)
            steps.append({kind: crossings.count(kind) for kind in kinds})
            crossings.clear()

        crossings.clear()
        assert run(engine, params, after_step) == expected
    # Of requests that end, the blocks that they end in are looked at as well.
    _, *decodes, _ = steps
    assert len(decodes) == 2
    for crossed in decodes:
        assert crossed[BLOCKING_UPLOAD] == 0
        # The sampled tokens; when they are there, so are the rows, and what is awaited.
        assert crossed[BLOCKING_READ] == reads
        assert crossed[READ] <= 2
        assert crossed[WAIT] == 1
        assert crossed[UPLOAD] <= uploads


def test_the_pretended_device_refuses_what_cuda_refuses(monkeypatch: pytest.MonkeyPatch):
    with pretended_cuda(monkeypatch) as crossings:
        there = torch.arange(4, device="cuda")
        with pytest.raises(RuntimeError, match="tensors on both devices"):
            there + torch.arange(4)
        with pytest.raises(RuntimeError, match=r"numpy\(\) of a tensor on CUDA"):
            there.numpy()
        assert there.device == torch.device("cuda:0")
        assert not crossings.count(BLOCKING_READ, BLOCKING_UPLOAD)
        assert (there + 1).sum().item() == 10
        assert there[there > 1].tolist() == [2, 3]
        assert crossings.count(BLOCKING_READ) == 3
        torch.arange(4).to("cuda", non_blocking=True)  # not pinned
        assert crossings.count(BLOCKING_UPLOAD) == 1
        torch.arange(4).pin_memory().to("cuda", non_blocking=True)
        assert crossings.count(UPLOAD) == 1

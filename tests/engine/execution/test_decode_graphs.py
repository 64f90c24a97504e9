"""Decode steps in static buffers (graphs) give the same outputs as eager steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine import (
    EmbedsPrompt,
    EngineConfig,
    LLMEngine,
    Prompt,
    RequestOutput,
    SamplingParams,
    TokensPrompt,
)
from engine.execution.input_batch import InputBatch
from tests.support.called_graphs import CalledGraphs, call_graphs
from tests.support.model_trial import TRIALS

GREEDY = SamplingParams(max_tokens=7, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(
    max_tokens=9,
    temperature=0.8,
    top_p=0.9,
    seed=3,
    logprobs=2,
    ignore_eos=True,
    repetition_penalty=1.2,
    n=2,
)
Asks = list[tuple[Prompt, SamplingParams]]


def decoder_asks() -> Asks:
    rows = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    return [
        (TokensPrompt((5,)), GREEDY),
        (TokensPrompt(tuple(range(5, 38))), DRAWN),
        (EmbedsPrompt(rows), GREEDY),
        (TokensPrompt(tuple(range(5, 30))), GREEDY),
    ]


def picture_asks() -> Asks:
    trial = TRIALS["qwen2_5_vl"]
    assert trial.prompt is not None
    return [(TokensPrompt((5, 6, 7)), GREEDY), (trial.prompt(), DRAWN), ("a fox", GREEDY)]


def encoder_decoder_asks() -> Asks:
    prompts = [TokensPrompt(tuple(range(5, 5 + n))) for n in (20, 3, 40)]
    return [
        (prompt, params) for prompt, params in zip(prompts, (GREEDY, DRAWN, GREEDY), strict=True)
    ]


ASKS: Mapping[str, Callable[[], Asks]] = {
    "qwen2": decoder_asks,
    "gemma3": decoder_asks,
    "qwen2_5_vl": picture_asks,
    "t5": encoder_decoder_asks,
}


def start(model: str, **changes: Any) -> LLMEngine:
    settings: dict[str, Any] = {"num_blocks": 64, "max_num_seqs": 6, "block_size": 16}
    return LLMEngine(EngineConfig(model=model, device="cpu", **settings | changes))


def run(engine: LLMEngine, asks: Asks) -> list[RequestOutput]:
    """Run requests arriving one step after another, so that batches grow and shrink."""
    done: dict[str, RequestOutput] = {}
    waiting = list(enumerate(asks))
    while waiting or engine.has_unfinished_requests:
        if waiting:
            index, (prompt, params) = waiting.pop(0)
            engine.add_request(str(index), prompt, params)
        done |= {output.request_id: output for output in engine.step() if output.finished}
    return [done[str(index)] for index in range(len(asks))]


def assert_equal(ours: list[RequestOutput], theirs: list[RequestOutput]) -> None:
    for our, their in zip(ours, theirs, strict=True):
        assert not our.error and not their.error
        for one, other in zip(our.outputs, their.outputs, strict=True):
            assert one.token_ids == other.token_ids
            assert one.tensors.keys() == other.tensors.keys()
            for name, rows in one.tensors.items():
                torch.testing.assert_close(rows, other.tensors[name], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("family", ASKS)
def test_graphs_give_the_outputs_of_eager_steps(
    seeded: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, family: str
):
    expected = run(start(seeded(family)), ASKS[family]())
    call_graphs(monkeypatch)
    engine = start(seeded(family))
    for _ in range(2):  # the second run reuses cached blocks, graphs and rows
        assert_equal(run(engine, ASKS[family]()), expected)
    assert CalledGraphs.num_replays > 10
    buffer = engine._runner._memory.buffer
    null_page = buffer[: engine.memory_plan.page_bytes]
    assert not null_page.any()
    engine.check_integrity()


def test_rows_of_a_failed_request_do_not_reach_later_steps(
    qwen2_checkpoint: str, monkeypatch: pytest.MonkeyPatch
):
    expected = run(start(qwen2_checkpoint), decoder_asks()[1:])
    call_graphs(monkeypatch)
    engine = start(qwen2_checkpoint)
    model = engine._runner._model
    embed: Callable[[Tensor], Tensor] = model.embed

    def spoilt(token_ids: Tensor) -> Tensor:
        rows = embed(token_ids)
        return rows.fill_(torch.nan) if len(token_ids) == 4 else rows

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "embed", spoilt)
        errors = [output.error for output in run(engine, decoder_asks())]
    assert any(error and "NaN" in error for error in errors)
    engine.reset_prefix_cache()
    assert_equal(run(engine, decoder_asks()[1:]), expected)


def test_preempted_requests_resume_in_graphs(
    qwen2_checkpoint: str, monkeypatch: pytest.MonkeyPatch
):
    asks: Asks = [(TokensPrompt(tuple(range(5, 5 + n))), DRAWN) for n in (30, 31, 45)]
    expected = run(start(qwen2_checkpoint), asks)
    call_graphs(monkeypatch)
    engine = start(qwen2_checkpoint, num_blocks=8, max_model_len=96)
    assert_equal(run(engine, asks), expected)
    assert engine.stats().num_preemptions


def test_padding_rows_refer_only_to_the_null_page():
    batch = InputBatch(max_num_seqs=4, max_model_len=12, block_sizes=[4])
    for name, blocks in (("a", [3, 1]), ("b", [2])):
        batch.add(name, [7, 8, 9, 10, 11])
        batch.append_blocks(name, blocks)
    step = batch.prepare(["a", "b"], [4, 2], [1, 1])
    padded = batch.pad(step, 4)
    assert padded.token_ids.tolist() == [11, 9, 0, 0]
    assert padded.query_start_loc.tolist() == [0, 1, 2, 3, 4]
    assert padded.seq_lens.tolist() == [5, 3, 1, 1]
    assert padded.positions.tolist() == [4, 2, 0, 0]
    assert padded.groups[0].slot_mapping.tolist() == [4, 10, 0, 0]
    expected = np.array([[3, 1, 0], [2, 0, 0], [0, 0, 0], [0, 0, 0]])
    assert np.array_equal(padded.groups[0].block_table, expected)
    assert batch.pad(step, 2).groups[0].block_table.shape == (2, 3)

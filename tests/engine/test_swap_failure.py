"""A step that fails while pages are on their way to the host."""

from __future__ import annotations

import pytest

from engine import EngineConfig, FinishReason, LLMEngine
from prefix_cache import PagedMemory
from tests.support.request_stream import BLOCK_SIZE, Alone, Ask, assert_same


def test_requests_swapped_out_by_a_failed_step_are_recomputed(
    qwen2_checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LLMEngine(
        EngineConfig(
            model=qwen2_checkpoint,
            block_size=BLOCK_SIZE,
            num_blocks=12,
            max_num_seqs=3,
            max_num_batched_tokens=16,
            preemption="swap",
        )
    )
    asks = {f"r{family}": Ask(family, 8, 0, 20, False, False, 0, None) for family in range(3)}
    for request_id, ask in asks.items():
        engine.add_request(request_id, ask.prompt, ask.params)
    copy_pages = PagedMemory.copy_pages
    failures = iter([True])

    def fail_once(*args: object) -> None:
        if next(failures, False):
            raise OSError("the host's memory is gone")
        copy_pages(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(PagedMemory, "copy_pages", fail_once)
    alone = Alone(qwen2_checkpoint)
    reasons = []
    while engine.has_unfinished_requests:
        for output in engine.step():
            if output.finished:
                reasons.append(output.outputs[0].finish_reason)
                assert_same(output, alone.answer(asks[output.request_id]))
        engine.check_integrity()
    assert not next(failures, False)
    assert reasons == [FinishReason.LENGTH] * len(asks)

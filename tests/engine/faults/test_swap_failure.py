"""Pages that cannot be copied to the host, or back, cost nobody anything but time."""

from __future__ import annotations

import pytest

from engine import EngineConfig, FinishReason, LLMEngine, RequestOutput
from prefix_cache import PagedMemory
from tests.support.request_stream import BLOCK_SIZE, Ask, alone_with, assert_same


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
    alone = alone_with(qwen2_checkpoint)
    reasons = []
    while engine.has_unfinished_requests:
        for output in engine.step():
            if output.finished:
                reasons.append(output.outputs[0].finish_reason)
                assert_same(output, alone.answer(asks[output.request_id]))
        engine.check_integrity()
    assert not next(failures, False)
    assert reasons == [FinishReason.LENGTH] * len(asks)


# With two seats one goes, and the other has the step alone.
@pytest.mark.parametrize(("num_blocks", "seats"), [(12, 4), (16, 4), (20, 4), (12, 2)])
@pytest.mark.parametrize("caching", [True, False])
def test_where_copying_always_fails_requests_are_recomputed(
    qwen2_checkpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    num_blocks: int,
    caching: bool,
    seats: int,
) -> None:
    engine = LLMEngine(
        EngineConfig(
            model=qwen2_checkpoint,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_num_seqs=seats,
            max_model_len=40,
            max_num_batched_tokens=16,
            preemption="swap",
            enable_prefix_caching=caching,
        )
    )

    tries = []

    def fail(*_: object) -> None:
        tries.append(True)
        raise OSError("the host's memory is gone")

    monkeypatch.setattr(PagedMemory, "copy_pages", fail)
    alone = alone_with(qwen2_checkpoint)
    asks = {f"r{number}": Ask(number, 8, 0, 25, False, False, 0, None) for number in range(5)}
    for request_id, ask in asks.items():
        engine.add_request(request_id, ask.prompt, ask.params)
    done: dict[str, RequestOutput] = {}
    for _ in range(300):
        done |= {output.request_id: output for output in engine.step() if output.finished}
        engine.check_integrity()
    assert engine.stats().num_preemptions > 1
    assert len(tries) == 1, "once it has failed, nobody is sent there any more"
    assert done.keys() == asks.keys()
    for request_id, output in done.items():
        assert output.error is None, "the fault of a copy is nobody's who ran beside it"
        assert_same(output, alone.answer(asks[request_id]))

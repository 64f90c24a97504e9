"""Swapping that fails costs time alone, and pages may move both ways in one step."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine import EngineConfig, LLMEngine, RequestOutput
from engine.execution.model_runner import ModelRunner, SampledToken
from engine.scheduling.scheduler import PageMove, SchedulerOutput
from prefix_cache import PagedMemory
from tests.support.request_stream import BLOCK_SIZE, Ask, alone_with, assert_same


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


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[PageMove, ...]]:
    """What each step that ran has moved."""
    noted: list[tuple[PageMove, ...]] = []
    execute = ModelRunner.execute

    def noting(runner: ModelRunner, output: SchedulerOutput) -> list[SampledToken]:
        noted.append(output.page_moves)
        return execute(runner, output)

    monkeypatch.setattr(ModelRunner, "execute", noting)
    return noted


def host_pages(move: PageMove) -> set[tuple[int, int]]:
    return {
        (copy.group_id, page)
        for copy in move.copies
        for page in (copy.targets if move.to_host else copy.sources)
    }


# One group of pages; and two, one of which keeps a window.
@pytest.mark.parametrize(
    ("name", "num_blocks", "num_swap_blocks"), [("qwen2", 15, 7), ("gemma2", 29, 13)]
)
def test_one_may_leave_for_where_another_came_back_from(
    seeded: Callable[[str], str],
    moves: list[tuple[PageMove, ...]],
    name: str,
    num_blocks: int,
    num_swap_blocks: int,
) -> None:
    engine = LLMEngine(
        EngineConfig(
            model=seeded(name),
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            num_swap_blocks=num_swap_blocks,
            max_num_seqs=3,
            max_num_batched_tokens=64,
            max_model_len=48,
            preemption="swap",
        )
    )
    asks = {
        request_id: Ask(family, 16, 0, 9, False, False, family, None)
        for family, request_id in enumerate(("rests", "ends", "comes back", "waits"))
    }
    done: dict[str, RequestOutput] = {}

    def add(request_id: str) -> None:
        ask = asks[request_id]
        engine.add_request(request_id, ask.prompt, ask.params, priority=ask.priority)

    def step() -> None:
        done.update((output.request_id, output) for output in engine.step() if output.finished)
        engine.check_integrity()

    for request_id in ("rests", "ends", "comes back"):
        add(request_id)
    while not any(move.to_host for made in moves for move in made):
        step()
    # Now the host holds the last, and there is room for it to come back; not for one more, unless
    # the one that rests goes where it was.
    engine.pause("rests")
    engine.abort("ends")
    add("waits")
    moves.clear()
    step()
    back, out = moves[0]
    assert (back.to_host, out.to_host) == (False, True)
    assert host_pages(back) & host_pages(out)
    engine.resume("rests")
    while engine.has_unfinished_requests:
        step()
    alone = alone_with(seeded(name))
    assert done.keys() == asks.keys() - {"ends"}
    for request_id, output in done.items():
        assert_same(output, alone.answer(asks[request_id]))

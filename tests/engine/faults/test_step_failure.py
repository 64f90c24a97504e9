"""A failed step fails only the request that caused it; a failed copy of pages fails none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine import (
    EngineConfig,
    FinishReason,
    LLMEngine,
    RequestOutput,
    SamplingParams,
    TokensPrompt,
)
from engine.execution.input_batch import InputBatch, ModelInputs
from engine.execution.model_runner import ModelRunner, SampledToken
from engine.interface.engine import NewRequest
from engine.models.qwen2_5_vl.qwen2_5_vl import ImageTower
from engine.requests.request import RequestStatus
from engine.scheduling.scheduler import PageMove, SchedulerOutput
from prefix_cache import PagedMemory
from tests.support.examples import examples
from tests.support.idle_engine import finish
from tests.support.pictures import picture
from tests.support.request_stream import (
    BLOCK_SIZE,
    Ask,
    Script,
    alone_with,
    assert_same,
    run_stream,
    scripts,
)

POINTS = ("prepared", "computed", "sampled", "written")
"""Where a step fails: before the forward pass, after it, after sampling, after writing the
output rows."""


class Faults:
    """Makes an engine's steps of several requests fail as planned; steps of one succeed.

    Args:
        engine: not used elsewhere.

    Attributes:
        count: number of failed steps.
        batches: request ids of every step, including failed ones.
        num_isolated_steps: number of steps with an isolated request.
        violations: steps in which an isolated request ran with others, or was swapped out.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.count = 0
        self.batches: list[tuple[str, ...]] = []
        self.num_isolated_steps = 0
        self.violations: list[str] = []
        self._plan: Iterator[str | None] = iter(())
        self._point: str | None = None
        runner = engine._runner
        self._wrap_execute(runner)
        self._wrap(runner, "_forward", "prepared", "computed")
        self._wrap(runner, "_sample", None, "sampled")
        self._wrap(runner, "_write_outputs", None, "written")

    def plan(self, points: Iterable[str | None]) -> None:
        """Set where each of the next steps of several requests fails; None for a success."""
        self._plan = iter(points)

    def _wrap_execute(self, runner: Any) -> None:
        plain = runner.execute

        def execute(output: SchedulerOutput) -> Any:
            self._note(output)
            self._point = next(self._plan, None) if len(output.scheduled) > 1 else None
            return plain(output)

        runner.execute = execute

    def _note(self, output: SchedulerOutput) -> None:
        running = [item.request for item in output.scheduled]
        self.batches.append(tuple(request.request_id for request in running))
        has_isolated = any(request.is_isolated for request in running)
        self.num_isolated_steps += has_isolated
        if len(running) > 1 and has_isolated:
            self.violations.append(f"step {len(self.batches)} is shared: {self.batches[-1]}")
        swapped = [r.request_id for r in output.preempted if r.status is RequestStatus.SWAPPED]
        isolated = [r.request_id for r in output.preempted if r.is_isolated]
        if set(swapped) & set(isolated):
            self.violations.append(f"step {len(self.batches)} swaps an isolated request: {swapped}")

    def _wrap(self, runner: Any, name: str, before: str | None, after: str) -> None:
        plain = getattr(runner, name)

        def wrapped(*arguments: Any) -> Any:
            self._fall(before)
            result = plain(*arguments)
            self._fall(after)
            return result

        setattr(runner, name, wrapped)

    def _fall(self, point: str | None) -> None:
        if point is not None and point == self._point:
            self._point = None
            self.count += 1
            raise RuntimeError(f"a fault on purpose, {point}")


POISON = 700
IMAGE = 8


def build(checkpoint: str, **settings: Any) -> LLMEngine:
    usual = {"block_size": BLOCK_SIZE, "num_blocks": 64, "max_num_seqs": 4, "max_model_len": 60}
    return LLMEngine(EngineConfig(model=checkpoint, **(usual | settings)))


def prompt(first: int, length: int) -> TokensPrompt:
    return TokensPrompt(tuple(range(first, first + length)))


def tokens(number: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=number, ignore_eos=True)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step that computes the token ``POISON`` fails, after the forward pass."""
    plain = ModelRunner._forward

    def forward(self: ModelRunner, inputs: ModelInputs) -> Any:
        tensors = plain(self, inputs)
        assert inputs.step.token_ids is not None
        if POISON in inputs.step.token_ids.tolist():
            raise RuntimeError("a poisoned token")
        return tensors

    monkeypatch.setattr(ModelRunner, "_forward", forward)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("caching", "preemption", "num_blocks", "place"),
    [
        *((True, "recompute", 64, 0), (True, "swap", 24, 13), (True, "recompute", 24, 29)),
        *((False, "swap", 64, 29), (False, "recompute", 24, 13), (False, "swap", 24, 0)),
        (True, "swap", 64, 13),
    ],
)
def test_the_culprit_fails_alone_and_the_others_give_their_usual_output(
    qwen2_checkpoint: str, caching: bool, preemption: str, num_blocks: int, place: int
) -> None:
    engine = build(
        qwen2_checkpoint,
        enable_prefix_caching=caching,
        preemption=preemption,
        num_blocks=num_blocks,
        max_num_batched_tokens=12,  # the poisoned token may come in a later chunk
    )
    asks = {f"r{n}": Ask(n % 2, 8 + n, n, 30, False, False, 0, None) for n in range(4)}
    ids = list(range(30, 60))
    ids[place] = POISON
    for number, (request_id, ask) in enumerate(asks.items()):
        if number == 2:
            engine.add_request("bad", TokensPrompt(tuple(ids)), tokens(4))
        engine.add_request(request_id, ask.prompt, ask.params)
    alone = alone_with(qwen2_checkpoint)
    done = finish(engine)
    assert done.keys() == {"bad", *asks}
    bad = done.pop("bad")
    assert bad.error is not None and "a poisoned token" in bad.error
    assert bad.outputs[0].finish_reason is FinishReason.ERROR
    for request_id, output in done.items():
        assert output.error is None
        assert_same(output, alone.answer(asks[request_id]))
    assert bool(engine.stats().num_preemptions) == (num_blocks < 64)


def test_an_image_that_breaks_the_tower_fails_its_request_alone(
    seeded: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(seeded("qwen2_5_omni"), part="thinker", max_num_batched_tokens=64)
    prompts = {
        name: TokensPrompt((30, 31, IMAGE, 32, 33), {"image": [picture(number)]})
        for number, name in enumerate(("good", "bad", "better"))
    }
    expected = {
        name: engine.generate(prompt, tokens(6))[0].outputs[0].token_ids
        for name, prompt in prompts.items()
    }
    engine.reset_prefix_cache()
    plain = ImageTower.forward
    seen: list[int] = []
    (request,) = engine._inputs.process(NewRequest("probe", prompts["bad"]))
    marks = [float(item.features["pixel_values"].sum()) for item in request.multimodal_inputs]

    def forward(self: ImageTower, inputs: Any) -> list[Tensor]:
        seen.append(len(inputs))
        if any(float(item.features["pixel_values"].sum()) in marks for item in inputs):
            raise RuntimeError("a broken image")
        return plain(self, inputs)

    monkeypatch.setattr(ImageTower, "forward", forward)
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, tokens(6))
    done = finish(engine)
    assert seen[0] > 1, "the three were meant to begin together"
    assert done["bad"].error is not None and "a broken image" in done["bad"].error
    for name in ("good", "better"):
        assert done[name].outputs[0].token_ids == expected[name]
    stats = engine.stats().kv
    assert stats is not None and stats.items is not None
    assert stats.items.held == 0 and stats.items.cached >= 2


def test_a_table_row_whose_allocation_fails_is_not_lost(
    qwen2_checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(qwen2_checkpoint, max_num_seqs=2)
    expected = engine.generate([prompt(30, 9), prompt(60, 9)], tokens(4))
    engine.reset_prefix_cache()

    def fail(self: InputBatch, request_id: str, token_ids: list[int]) -> None:
        self._free_rows.pop()
        raise MemoryError("no room for a row")

    # A third request holds blocks and a row in the step that fails.
    engine.add_request("paused", prompt(90, 9), tokens(9))
    (moved,) = engine.step()
    engine.pause("paused")
    with monkeypatch.context() as patch:
        patch.setattr(InputBatch, "add", fail)
        engine.add_request("ill", prompt(30, 9), tokens(4))
        (output,) = engine.step()
    assert output.error is not None and "no room for a row" in output.error
    engine.resume("paused")
    engine.add_request("well", prompt(60, 9), tokens(4))
    done = finish(engine)
    assert_same(done["well"], expected[1])
    assert done["paused"].outputs[0].token_ids[:1] == moved.outputs[0].token_ids
    again = engine.generate([prompt(30, 9), prompt(60, 9), prompt(90, 9)], tokens(9))
    assert again[2].outputs[0].token_ids == done["paused"].outputs[0].token_ids


def test_a_model_that_always_fails_fails_all_requests(
    qwen2_checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(qwen2_checkpoint)

    def forward(*_: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(engine._runner, "_forward", forward)
    outputs = engine.generate([prompt(30 * n, 9) for n in range(1, 9)], tokens(4))
    assert all("out of order" in str(output.error) for output in outputs)
    engine.check_integrity()


def test_a_cleared_request_is_not_isolated_again_after_preemption(qwen2_checkpoint: str) -> None:
    engine = build(
        qwen2_checkpoint,
        num_blocks=40,
        max_num_seqs=6,
        max_model_len=150,
        max_num_batched_tokens=24,
        enable_prefix_caching=False,
    )
    faults = Faults(engine)
    faults.plan(["computed"])
    outputs = engine.generate([prompt(30 + 20 * n, 16) for n in range(6)], tokens(100))
    assert not any(output.error for output in outputs)
    assert engine.stats().num_preemptions > 5
    assert faults.count == 1
    assert 0 < faults.num_isolated_steps <= len(faults.batches[0]), "once for each of the batch"


MAX_PROMPT = 24
KINDS = {
    "recomputed": {"preemption": "recompute"},
    "swapped": {"preemption": "swap"},
    "uncached": {"enable_prefix_caching": False},
}


class Faulty:
    """An engine with a small pool and injected faults."""

    def __init__(self, checkpoint: str, kind: str, output_names: tuple[str, ...] | None) -> None:
        self.engine = LLMEngine(
            EngineConfig(
                model=checkpoint,
                block_size=BLOCK_SIZE,
                num_blocks=16,
                max_num_seqs=4,
                max_num_batched_tokens=16,
                **KINDS[kind],
            ),
            output_names=output_names,
        )
        self.faults = Faults(self.engine)
        self.alone = alone_with(checkpoint, output_names)


# Without outputs, only the blocks' hashes protect later requests from keys and values that a
# failed step did not write.
@pytest.fixture(scope="module", params=[(kind, names) for kind in KINDS for names in (None, ())])
def faulty(request: pytest.FixtureRequest, qwen2_checkpoint: str) -> Faulty:
    return Faulty(qwen2_checkpoint, *request.param)


@settings(max_examples=examples(24))
@given(
    script=scripts(MAX_PROMPT), points=st.lists(st.sampled_from([None, None, *POINTS]), max_size=40)
)
def test_random_faults_change_no_output_then_or_later(
    faulty: Faulty, script: Script, points: list[str | None]
) -> None:
    faulty.faults.plan(points)
    run_stream(faulty.engine, script, faulty.alone)
    faulty.faults.plan(())
    again: Script = [("add", ask) for _, ask in script if isinstance(ask, Ask)]
    run_stream(faulty.engine, again, faulty.alone)
    assert not faulty.faults.violations


def test_the_streams_fail_and_preempt(faulty: Faulty) -> None:
    """Guards the property above against being vacuous."""
    busy: Script = [
        ("add", Ask(family, 6, tail, 20, False, False, 0, None))
        for family in range(3)
        for tail in (1, 2)
    ]
    faults, preemptions = faulty.faults.count, faulty.engine.stats().num_preemptions
    faulty.faults.plan([None, "prepared", "computed", None, "sampled", None, "written"])
    run_stream(faulty.engine, busy, faulty.alone)
    assert faulty.faults.count == faults + 4
    assert faulty.engine.stats().num_preemptions > preemptions


# With two seats, one request is preempted, and the other has the step alone.
@pytest.mark.parametrize(
    ("num_blocks", "seats", "caching"),
    [(12, 4, True), (16, 4, False), (20, 4, True), (12, 2, True), (12, 2, False)],
)
def test_where_copying_always_fails_requests_are_recomputed(
    qwen2_checkpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    num_blocks: int,
    caching: bool,
    seats: int,
) -> None:
    engine = build(
        qwen2_checkpoint,
        num_blocks=num_blocks,
        max_num_seqs=seats,
        max_model_len=40,
        max_num_batched_tokens=16,
        preemption="swap",
        enable_prefix_caching=caching,
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
    done = finish(engine)
    assert engine.stats().num_preemptions > 1
    assert len(tries) == 1, "once it has failed, nobody is sent there any more"
    assert done.keys() == asks.keys()
    for request_id, output in done.items():
        assert output.error is None, "the fault of a copy is nobody's who ran beside it"
        assert_same(output, alone.answer(asks[request_id]))


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[PageMove, ...]]:
    """Page moves of each executed step."""
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


# One group of pages; and two, one of them with a window.
@pytest.mark.parametrize(
    ("name", "num_blocks", "num_swap_blocks"), [("qwen2", 15, 7), ("gemma2", 29, 13)]
)
def test_a_request_is_swapped_out_to_pages_that_another_returns_from(
    seeded: Callable[[str], str],
    moves: list[tuple[PageMove, ...]],
    name: str,
    num_blocks: int,
    num_swap_blocks: int,
) -> None:
    engine = build(
        seeded(name),
        num_blocks=num_blocks,
        num_swap_blocks=num_swap_blocks,
        max_num_seqs=3,
        max_num_batched_tokens=64,
        max_model_len=48,
        preemption="swap",
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
    # Now the host holds the last request, and there is room for it to return, but not for one
    # more, unless the paused one is swapped out to its pages.
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

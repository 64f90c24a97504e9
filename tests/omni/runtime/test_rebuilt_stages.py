"""A broken stage is rebuilt by its pipeline, which continues with the same outputs."""

from __future__ import annotations

import gc
import logging
import re
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from engine import EncoderEngine, EngineConfig, LLMEngine, SamplingParams, TokensPrompt
from omni import AutoregressiveStage, EncoderStage, Omni, OmniOutput, OmniRequest, Pipeline
from stages import StageInputs, StageOutput
from stages.worker.guarded_stage import MAX_REBUILDS
from tests.support.fake_speech import Thinker
from tests.support.fake_stage import FakeStage
from tests.support.line_faults import LineFault
from tests.support.same_outputs import assert_same
from tests.support.speech_pipeline import (
    last_outputs,
    speech_stages,
    start,
    text_and_sound,
    until,
    whole,
)
from tests.support.whole_orchestrator import WholeOrchestrator

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
IDS = [tuple(range(start, start + 21)) for start in (20, 20, 50, 90)]
REQUESTS = [OmniRequest(TokensPrompt(ids), f"r{number}") for number, ids in enumerate(IDS)]
ENGINE = ("engine", "prefix_cache")
AGAIN = "it broke while it had this request, and was rebuilt: ask again"


class Fragile(FakeStage):
    """Breaks, in that step or call, until it is rebuilt."""

    def __init__(self, name: str, *, breaks: Collection[str] = (), **options: Any) -> None:
        super().__init__(name, **options)
        self.breaks = breaks
        self.broken = False
        self.rebuilds = 0
        self.unwilling: Exception | None = None

    @property
    def is_broken(self) -> bool:
        return self.broken

    def add_request(self, request: Any) -> None:
        if self.broken:
            raise RuntimeError("broken")
        super().add_request(request)

    def step(self) -> list[StageOutput]:
        self.broken |= any(request_id in self.breaks for request_id in self.held)
        if self.broken:
            raise RuntimeError("broken")
        return super().step()

    def rebuild(self) -> None:
        self.rebuilds += 1
        self.held.clear()
        if self.unwilling is not None:
            raise self.unwilling
        self.broken = False


def ask(orchestrator: WholeOrchestrator, *request_ids: str) -> dict[str, OmniOutput]:
    for request_id in request_ids:
        orchestrator.add_request(OmniRequest(request_id, request_id))
    return last_outputs(orchestrator)


def test_requests_without_sent_output_are_restarted() -> None:
    """The stage feeds another one, so its output is sent only when it has finished."""
    fragile = Fragile("b", sources=("a",), final=False, steps=3)
    stages = [FakeStage("a", steps=1), fragile, FakeStage("c", ("b",))]
    orchestrator = WholeOrchestrator(Pipeline(stages))
    for request_id in ("x", "y"):
        orchestrator.add_request(OmniRequest(request_id, request_id))
    until(orchestrator, lambda: len(fragile.held) == 2)
    fragile.broken = True
    last = last_outputs(orchestrator)
    assert fragile.rebuilds == 1
    for request_id in ("x", "y"):
        assert last[request_id].error is None
        assert last[request_id].stages["c"].text == f"c(b(a({request_id})))"
    for stage in stages:
        stage.check_integrity()


def test_a_request_with_sent_output_fails_and_the_next_one_works() -> None:
    fragile = Fragile("a", steps=4)
    orchestrator = WholeOrchestrator(Pipeline([fragile, FakeStage("beside", steps=9)]))
    orchestrator.add_request(OmniRequest("x", "x"))
    until(orchestrator, lambda: bool(fragile.held))
    orchestrator.step()
    orchestrator.step()  # one step of each stage
    orchestrator.add_request(OmniRequest("late", "late"))
    fragile.broken = True
    last = last_outputs(orchestrator)
    assert str(last["x"].error).startswith(f"stage 'a': {AGAIN} (RuntimeError: broken)")
    assert last["late"].error is None, "it was not notified"
    assert ask(orchestrator, "x")["x"].error is None
    assert fragile.rebuilds == 1


def test_a_request_that_breaks_the_stage_each_time_fails_and_spares_those_after_it() -> None:
    fragile = Fragile("a", breaks=("bad",))
    orchestrator = WholeOrchestrator(Pipeline([fragile]))
    last = ask(orchestrator, "bad", "x")
    assert AGAIN in str(last["bad"].error) and AGAIN in str(last["x"].error)
    assert fragile.rebuilds == 2, "both start again once"
    assert ask(orchestrator, "y")["y"].error is None


def test_a_stage_that_broke_unseen_is_rebuilt_for_the_next_request() -> None:
    fragile = Fragile("a")
    orchestrator = WholeOrchestrator(Pipeline([fragile]))
    fragile.broken = True
    assert ask(orchestrator, "x")["x"].error is None
    assert fragile.rebuilds == 1


def test_rebuilds_in_a_row_are_limited_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    fragile = Fragile("a", breaks=("bad",))
    orchestrator = WholeOrchestrator(Pipeline([fragile, FakeStage("b")]))
    for _ in range(2):  # each time it breaks twice: the request starts again once
        error = str(ask(orchestrator, "bad")["bad"].error)
    assert "it cannot be used any more: it broke 4 times in a row" in error
    assert fragile.rebuilds == MAX_REBUILDS
    error = str(ask(orchestrator, "x")["x"].error)
    assert re.search("stage 'a': it cannot be used any more.*pipeline again", error)
    reported = [
        record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
    ]
    assert f"3 of at most {MAX_REBUILDS} times in a row" in reported[-1] and len(reported) == 3


def test_a_request_that_comes_through_begins_the_count_again() -> None:
    fragile = Fragile("a", breaks=("bad",))
    orchestrator = WholeOrchestrator(Pipeline([fragile]))
    for _ in range(2 * MAX_REBUILDS):
        ask(orchestrator, "bad")
        assert ask(orchestrator, "x")["x"].error is None
    assert fragile.rebuilds == 4 * MAX_REBUILDS


def test_a_stage_that_cannot_be_built_now_is_tried_again() -> None:
    fragile = Fragile("a")
    orchestrator = WholeOrchestrator(Pipeline([fragile]))
    fragile.broken, fragile.unwilling = True, MemoryError("no room")
    error = str(ask(orchestrator, "x")["x"].error)
    assert "could not be rebuilt: MemoryError: no room" in error
    assert not orchestrator.has_unfinished_requests
    fragile.unwilling = None
    assert ask(orchestrator, "x")["x"].error is None


@pytest.mark.parametrize("turns", range(0, 30, 4))
def test_a_streamed_request_has_sent_output_to_the_next_stage(turns: int) -> None:
    """A streamed request cannot start again; those not begun, or finished here, continue."""

    class Breaking(Thinker):
        broken = False

        @property
        def is_broken(self) -> bool:
            return self.broken

        def step(self) -> list[StageOutput]:
            if self.broken:
                raise RuntimeError("broken")
            return super().step()

        def rebuild(self) -> None:
            self.live.clear()
            self.broken = False

    plain = speech_stages((1, 1), talker={"steps_per_token": 4, "max_pending": 1})
    thinker = Breaking("thinker")
    orchestrator = start([thinker, *plain[1:]])
    last: dict[str, OmniOutput] = {}
    for _ in range(turns):
        last |= {output.request_id: output for output in orchestrator.step() if output.finished}
    has_any, thinker.broken = bool(thinker.live), True
    last |= last_outputs(orchestrator)
    failed = {request_id for request_id in "xyz" if last[request_id].error is not None}
    assert all(AGAIN in str(last[request_id].error) for request_id in failed)
    assert failed or turns == 0 or not has_any
    for request_id in set("xyz") - failed:
        assert text_and_sound(last[request_id]) == text_and_sound(whole()[request_id])
    for stage in (thinker, *plain[1:]):
        stage.check_integrity()


@dataclass
class Rig:
    """Two decoders and an encoder, and their undisturbed outputs."""

    pipeline: Pipeline
    expected: dict[str, OmniOutput]


def build(seeded: Callable[[str], str]) -> Pipeline:
    decoder = EngineConfig(model=seeded("qwen2"), block_size=4, num_blocks=64, max_model_len=64)
    encoder = EngineConfig(model=seeded("bert"), block_size=4, num_blocks=64, max_model_len=64)
    return Pipeline(
        [
            AutoregressiveStage("writer", decoder, sampling=GREEDY, final_output=()),
            AutoregressiveStage(
                "reader",
                decoder,
                sampling=GREEDY,
                inputs=StageInputs(("writer",), "hidden_states_as_prompt_embeds"),
                final_output=("text", "tensors"),
            ),
            EncoderStage("reads", encoder, inputs=StageInputs(("writer",), "text_as_prompt")),
        ]
    )


@pytest.fixture
def rig(seeded: Callable[[str], str]) -> Iterator[Rig]:
    pipeline = build(seeded)
    yield Rig(pipeline, run(WholeOrchestrator(pipeline)))
    pipeline.close()


def run(orchestrator: WholeOrchestrator) -> dict[str, OmniOutput]:
    for request in REQUESTS:
        orchestrator.add_request(request)
    return last_outputs(orchestrator)


def forbid_mending(engine: LLMEngine | EncoderEngine, patch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise MemoryError("no room to mend it")

    patch.setattr(engine, "_restart", fail)


def engines_of(pipeline: Pipeline) -> list[LLMEngine | EncoderEngine]:
    return [vars(stage)["engine"] for stage in pipeline.stages.values()]


@pytest.mark.parametrize("mends", [False, True])
@pytest.mark.parametrize("error", [MemoryError, OSError])
@pytest.mark.parametrize("turn", [0, 1, 3, 9])
def test_a_pipeline_continues_after_an_error_at_any_line_of_any_stage(
    rig: Rig, error: type[Exception], turn: int, mends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault comes at a line of the step, and maybe another one while the engine recovers.

    An engine that recovers restarts all its requests, and fails none.
    """
    orchestrator = WholeOrchestrator(rig.pipeline)
    engines = engines_of(rig.pipeline)
    for request in REQUESTS:
        orchestrator.add_request(request)
    last: dict[str, OmniOutput] = {}

    def take(outputs: Sequence[OmniOutput]) -> None:
        last.update({output.request_id: output for output in outputs if output.finished})

    for _ in range(turn):
        take(orchestrator.step())
    for engine in engines:
        if not mends:
            forbid_mending(engine, monkeypatch)
    with LineFault(53 + 7 * turn, error, folders=ENGINE) as fault:
        take(orchestrator.step())
    assert fault.place is not None
    monkeypatch.undo()
    take(list(last_outputs(orchestrator).values()))
    pairs = zip(engines, engines_of(rig.pipeline), strict=True)
    assert [one is other for one, other in pairs].count(False) == (0 if mends else 1)
    for request in REQUESTS:
        output = last[str(request.request_id)]
        if output.error is not None:
            assert AGAIN in output.error and not mends
        else:
            assert_same([output], [rig.expected[output.request_id]])
    for request_id, output in run(orchestrator).items():
        assert_same([output], [rig.expected[request_id]])
    for stage in rig.pipeline.stages.values():
        stage.check_integrity()


def test_the_broken_engine_is_gone_before_another_one_is_built(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback that is kept, for example by a log handler, keeps no weights and no blocks."""
    stage = rig.pipeline.stages["writer"]
    assert isinstance(stage, AutoregressiveStage)
    stage.enable_prefix_caching = False
    counted, gone = stage.stats(), weakref.ref(stage.engine)
    weights = weakref.ref(stage.engine._runner._model)
    build_engine = AutoregressiveStage._build_engine
    alive: list[object] = []

    def spy(self: AutoregressiveStage) -> LLMEngine:
        alive.extend([gone(), weights()])
        return build_engine(self)

    with monkeypatch.context() as patch:
        patch.setattr(AutoregressiveStage, "_build_engine", spy)

        def fail() -> None:
            raise MemoryError("a step")

        vars(stage.engine).update(_step_deltas=fail, _restart=fail)
        last = run(WholeOrchestrator(rig.pipeline))
    assert alive == [None, None]
    for request_id, output in last.items():
        assert_same([output], [rig.expected[request_id]])
    assert not stage.enable_prefix_caching, "what was set stays set"
    assert stage.stats().since(counted).num_steps > 0
    assert stage.stats().prompt_tokens == 2 * counted.prompt_tokens, "and counted"


def test_an_engine_that_came_from_outside_is_its_makers_to_rebuild(
    seeded: Callable[[str], str],
) -> None:
    config = EngineConfig(model=seeded("qwen2"), block_size=4, num_blocks=32, max_model_len=64)
    engine = LLMEngine(config)
    with Omni(Pipeline([AutoregressiveStage("writer", engine, sampling=GREEDY)])) as omni:
        engine._broken_by = "MemoryError: a step"
        (output,) = omni.generate(REQUESTS[0])
        assert "stage 'writer': it cannot be used any more: it broke by EngineBrokenError" in str(
            output.error
        )
        assert "it was given its engine, which its maker must rebuild" in str(output.error)
    gc.collect()


def test_an_omni_goes_on_over_a_stage_that_broke(rig: Rig) -> None:
    with Omni(rig.pipeline) as omni:
        stage = rig.pipeline.stages["reader"]
        assert isinstance(stage, AutoregressiveStage)
        stage.engine._broken_by = "MemoryError: a step"
        for output in omni.generate(REQUESTS):
            assert_same([output], [rig.expected[output.request_id]])

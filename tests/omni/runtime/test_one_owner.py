"""A stage has one pipeline, a pipeline one Omni, and each refuses a second owner."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from engine import Prompt
from omni import Omni, OmniRequest, Pipeline
from omni.runtime import omni as omni_module
from omni.runtime.orchestrator import Orchestrator
from omni.verification.verify import verify
from stages import TransformContext
from tests.support.fake_stage import FakeStage
from tests.support.patience import PATIENCE_S

ENDLESS = 10**9


def test_a_second_omni_on_a_pipeline_is_refused_and_the_first_goes_on() -> None:
    pipeline = Pipeline([FakeStage("a")])
    with Omni(pipeline) as omni:
        with pytest.raises(RuntimeError, match="this pipeline belongs to another Omni already"):
            Omni(pipeline)
        assert omni.generate("x")[0].stages["a"].text == "a(x)"


def test_a_stage_of_one_pipeline_is_refused_by_another() -> None:
    shared = FakeStage("shared")
    first = Pipeline([FakeStage("a"), shared])
    others = [FakeStage("b"), FakeStage("c", ("shared",))]
    with pytest.raises(
        RuntimeError, match="stage 'shared' belongs to a pipeline of the stages a, shared already"
    ):
        Pipeline([others[0], shared, others[1]])
    Pipeline(others[:1])  # what the failed one had claimed is free again
    first.close()
    with pytest.raises(RuntimeError, match="stage 'shared' is closed: build a new one"):
        Pipeline([shared])


def test_a_pipeline_that_is_refused_owns_none_of_its_stages() -> None:
    stages = [FakeStage("a"), FakeStage("b", ("nowhere",))]
    with pytest.raises(ValueError, match="'nowhere'"):
        Pipeline(stages)
    Pipeline(stages[:1])


def test_a_pipeline_that_was_dropped_owns_nothing() -> None:
    stage = FakeStage("a")
    Pipeline([stage])
    gc.collect()
    assert Omni(Pipeline([stage])).generate("x")[0].error is None


def test_an_omni_that_failed_half_way_owns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Pipeline([FakeStage("a")])

    def fail(*_: Any) -> None:
        raise MemoryError("no thread")

    with monkeypatch.context() as patch:
        patch.setattr(omni_module, "Driver", fail)
        with pytest.raises(MemoryError):
            Omni(pipeline)
    gc.collect()
    with Omni(pipeline) as omni:
        assert omni.generate("x")[0].error is None


def test_what_is_closed_is_refused_in_one_sentence() -> None:
    pipeline = Pipeline([FakeStage("a")])
    omni = Omni(pipeline)
    omni.close()
    omni.close()
    pipeline.close()

    async def first() -> None:
        async for _ in omni.astream("x"):
            pass

    for call in (
        lambda: omni.generate("x"),
        lambda: omni.generate([]),
        lambda: list(omni.stream("x")),
        lambda: first().send(None),
        lambda: omni.abort("x"),
        lambda: verify(omni, [OmniRequest("x")]),
    ):
        with pytest.raises(RuntimeError, match="this Omni is closed: build a new one"):
            call()
    for build in (Omni, Orchestrator):
        with pytest.raises(RuntimeError, match="this pipeline is closed: build a new one"):
            build(pipeline)
    assert omni.stats().keys() == {"a"}, "what it has counted can still be read"


def test_two_pipelines_run_at_once() -> None:
    with Omni(Pipeline([FakeStage("a")])) as one, Omni(Pipeline([FakeStage("a")])) as other:
        with ThreadPoolExecutor(2) as pool:
            results = pool.map(lambda each: each.generate(["x"] * 20), (one, other))
        for outputs in results:
            assert [output.stages["a"].text for output in outputs] == ["a(x)"] * 20


def test_a_pipeline_is_lent_to_one_thread_at_a_time() -> None:
    with Omni(Pipeline([FakeStage("a")])) as omni, ThreadPoolExecutor(1) as pool:
        with omni.paused(), omni.paused():  # the owner may pause again, as verify does
            second = pool.submit(lambda: omni.paused().__enter__())
            with pytest.raises(RuntimeError, match="lent to another thread, which drives its"):
                second.result(PATIENCE_S)
        with omni.paused():
            pass
        assert omni.generate("x")[0].error is None


def test_a_thread_does_not_wait_for_itself() -> None:
    with Omni(Pipeline([FakeStage("a")])) as omni:
        with omni.paused():
            for wait in (omni.generate, lambda prompt: list(omni.stream(prompt))):
                with pytest.raises(RuntimeError, match="lent to this thread .* leave the with"):
                    wait("x")
        assert omni.generate("x")[0].error is None


def test_a_transform_does_not_wait_for_its_own_pipeline() -> None:
    def asking(context: TransformContext) -> Prompt:
        return str(made[0].generate("y"))

    made: list[Omni] = []
    stages = [FakeStage("a"), FakeStage("b", ("a",), transform=asking)]
    with Omni(Pipeline(stages)) as omni:
        made.append(omni)
        (output,) = omni.generate("x")
        assert "a transform or a stage cannot wait for requests of the pipeline" in str(
            output.error
        )


def test_closing_ends_the_wait_of_all_others() -> None:
    stage, started = FakeStage("a", steps=ENDLESS), threading.Event()
    omni = Omni(Pipeline([stage]))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(omni.generate, "x", on_progress=lambda _: started.set())
        assert started.wait(PATIENCE_S)
        closing = [pool.submit(omni.close) for _ in range(2)]
        assert "closed before it finished" in str(first.result(PATIENCE_S)[0].error)
        for each in closing:
            each.result(PATIENCE_S)
    assert stage.closed

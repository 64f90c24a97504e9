"""Any number of callers share one pipeline; a caller that leaves aborts its requests."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import pytest

from omni import Omni, OmniOutput, OmniRequest, Pipeline, SamplingParams
from omni.pipelines.pipeline_config import PipelineConfig
from omni.pipelines.runtime_config import RuntimeConfig
from omni.runtime.driver import Driver, Ticket
from stages import StageOutput
from tests.support.fake_stage import FakeStage
from tests.support.patience import PATIENCE_S
from tests.support.settled_stages import check_integrity
from tests.support.shared_worker import omni_apart

ENDLESS = 10**9


Make: TypeAlias = Callable[..., Omni]

# A worker ends by itself: see test_shared_worker.
inline_only = pytest.mark.parametrize("make", ["inline"], indirect=True)


@pytest.fixture(params=["inline", "apart"])
def make(request: pytest.FixtureRequest) -> Make:
    """A factory of an ``Omni`` of stages, which run in its own process or in workers."""
    return omni_apart if request.param == "apart" else lambda *stages: Omni(Pipeline(stages))


@pytest.fixture
def omni(make: Make) -> Iterator[Omni]:
    """Two stages, of which the second shows three pieces of text."""
    with make(FakeStage("a", final=False), FakeStage("b", ("a",), steps=3)) as made:
        yield made


def text(output: OmniOutput) -> str | None:
    return output.stages["b"].text


def check_nothing_is_held_soon(omni: Omni) -> None:
    for _ in range(1000):
        try:
            return check_integrity(omni)
        except RuntimeError:
            time.sleep(0.01)
    raise AssertionError("requests are still running")


def test_generate_answers_in_the_order_of_the_requests(omni: Omni) -> None:
    outputs = omni.generate(["x", OmniRequest("y", request_id="named"), "z"])
    assert [text(output) for output in outputs] == ["b(a(x))", "b(a(y))", "b(a(z))"]
    assert outputs[1].request_id == "named"
    assert len({output.request_id for output in outputs}) == 3


def test_generate_takes_one_prompt_or_none(omni: Omni) -> None:
    assert [text(output) for output in omni.generate("x")] == ["b(a(x))"]
    assert omni.generate([]) == []


@pytest.mark.parametrize("requests", [None, 3, {"prompt": "x"}, b"x"])
def test_what_is_no_request_is_refused_and_nothing_runs(omni: Omni, requests: Any) -> None:
    """A mapping above all: its keys must not be run as prompts."""
    kind = type(requests).__name__
    with pytest.raises(ValueError, match=f"requests must be a prompt .* got {kind}"):
        omni.generate(requests)
    with pytest.raises(ValueError, match="requests must be a prompt"):
        list(omni.stream(requests))


def test_generate_reports_its_progress(omni: Omni) -> None:
    seen: list[OmniOutput] = []
    omni.generate(["x", "y"], on_progress=seen.append)
    assert sum(output.finished for output in seen) == 2
    deltas = [output.stages["b"].delta for output in seen if output.stages]
    assert sorted("".join(deltas)) == sorted("b(a(x))b(a(y))")


def test_a_bad_request_has_its_error_and_its_neighbours_finish(omni: Omni) -> None:
    outputs = omni.generate(["x", OmniRequest("y", sampling={"nowhere": {}}), "z"])
    assert [output.error is None for output in outputs] == [True, False, True]
    assert "'nowhere'" in str(outputs[1].error)
    assert text(outputs[2]) == "b(a(z))"


def test_the_second_of_two_requests_of_one_id_fails_alone(
    omni: Omni, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = Driver.submit

    def slowly(self: Driver, *args: Any) -> Ticket:
        time.sleep(0.05)  # the first would finish now if it began before the others
        return submit(self, *args)

    monkeypatch.setattr(Driver, "submit", slowly)
    outputs = omni.generate([OmniRequest("x", "same"), OmniRequest("y", "same"), "z"])
    assert [text(outputs[0]), text(outputs[2])] == ["b(a(x))", "b(a(z))"]
    assert "'same' belongs to a request that is still running" in str(outputs[1].error)


def test_an_exception_in_the_callback_aborts_the_rest(make: Make) -> None:
    def give_up(output: OmniOutput) -> None:
        raise InterruptedError

    with make(FakeStage("b", steps=ENDLESS)) as omni:
        with pytest.raises(InterruptedError):
            omni.generate(["x", "y"], on_progress=give_up)
        check_integrity(omni)


def test_the_pieces_of_a_stream_make_up_the_whole(omni: Omni) -> None:
    outputs = list(omni.stream("x"))
    assert "".join(output.stages["b"].delta for output in outputs) == "b(a(x))"
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


@inline_only
def test_a_stream_shows_every_piece(omni: Omni) -> None:
    assert len(list(omni.stream("x"))) == 3, "a worker may be faster than whoever shows them"


def test_leaving_a_stream_early_aborts_its_requests(make: Make) -> None:
    with make(FakeStage("b", steps=ENDLESS)) as omni:
        for output in omni.stream(["x", "y"]):
            assert not output.finished
            break
        gc.collect()
        check_integrity(omni)


def test_a_stream_of_a_taken_id_does_not_end_the_one_that_has_it(make: Make) -> None:
    with make(FakeStage("b", steps=ENDLESS)) as omni:
        first = omni.stream(OmniRequest("x", "same"))
        next(first)
        second = omni.stream(OmniRequest("y", "same"))
        assert "still running" in str(next(second).error)
        second.close()
        assert not next(first).finished
        first.close()
        check_integrity(omni)


def test_abort_ends_the_wait_of_another_thread(make: Make) -> None:
    with make(FakeStage("b", steps=ENDLESS)) as omni, ThreadPoolExecutor(1) as pool:
        started = threading.Event()
        waiting = pool.submit(
            omni.generate, OmniRequest("x", "mine"), on_progress=lambda _: started.set()
        )
        assert started.wait(PATIENCE_S)
        omni.abort("unknown")
        omni.abort("mine")
        assert [output.error for output in waiting.result(PATIENCE_S)] == ["aborted"]
        check_integrity(omni)


def test_threads_share_one_pipeline(omni: Omni) -> None:
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda n: omni.generate([f"x{n}", f"y{n}"]), range(12)))
    for number, outputs in enumerate(results):
        assert [text(output) for output in outputs] == [f"b(a(x{number}))", f"b(a(y{number}))"]


def test_coroutines_share_one_pipeline(omni: Omni) -> None:
    async def consume(prompt: str) -> str:
        return "".join([output.stages["b"].delta async for output in omni.astream(prompt)])

    async def several() -> list[str]:
        return await asyncio.gather(*(consume(f"x{number}") for number in range(8)))

    assert asyncio.run(several()) == [f"b(a(x{number}))" for number in range(8)]


def test_cancelling_a_consumer_aborts_its_request_alone(make: Make) -> None:
    async def scenario(omni: Omni) -> OmniOutput:
        entered = asyncio.Event()

        async def endless() -> None:
            async for _ in omni.astream("endless"):
                entered.set()

        task = asyncio.create_task(endless())
        await asyncio.wait_for(entered.wait(), PATIENCE_S)
        beside = [output async for output in omni.astream(OmniRequest("short", "short"))]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return beside[-1]

    class Slow(FakeStage):
        def _advance(self, request_id: str) -> StageOutput | None:
            self.steps = 3 if request_id == "short" else ENDLESS
            return super()._advance(request_id)

    with make(Slow("b")) as omni:
        assert text(asyncio.run(scenario(omni))) == "b(short)"
        check_integrity(omni)


def test_coroutines_wait_for_whole_answers(omni: Omni) -> None:
    seen: list[OmniOutput] = []

    async def several() -> tuple[list[OmniOutput], ...]:
        return await asyncio.gather(
            omni.agenerate(["x", OmniRequest("y", sampling={"nowhere": {}}), "z"]),
            omni.agenerate("v", on_progress=seen.append),
            omni.agenerate([]),
        )

    (first, second, third) = asyncio.run(several())
    assert [text(output) for output in (first[0], first[2])] == ["b(a(x))", "b(a(z))"]
    assert "'nowhere'" in str(first[1].error)
    assert seen[-1] is second[0]
    assert "".join(output.stages["b"].delta for output in seen) == "b(a(v))"
    assert third == []


def test_a_coroutine_that_is_cancelled_or_fails_at_its_progress_aborts_its_request_alone(
    make: Make,
) -> None:
    async def scenario(omni: Omni) -> list[OmniOutput]:
        begun = asyncio.Event()
        task = asyncio.create_task(omni.agenerate("x", on_progress=lambda _: begun.set()))
        await asyncio.wait_for(begun.wait(), PATIENCE_S)

        def give_up(_: OmniOutput) -> None:
            raise InterruptedError

        with pytest.raises(InterruptedError):
            await omni.agenerate(["y", "z"], on_progress=give_up)
        assert not task.done()
        other = asyncio.create_task(omni.agenerate(OmniRequest("v", "mine")))
        await asyncio.sleep(0)  # in which it is submitted
        omni.abort("mine")
        outputs = await other
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return outputs

    with make(FakeStage("b", steps=ENDLESS)) as omni:
        assert [output.error for output in asyncio.run(scenario(omni))] == ["aborted"]
        check_integrity(omni)


def test_close_fails_what_is_running_and_closes_the_stages(make: Make) -> None:
    stage = FakeStage("b", steps=ENDLESS)
    omni = make(stage)
    with ThreadPoolExecutor(1) as pool:
        started = threading.Event()
        waiting = pool.submit(omni.generate, "x", on_progress=lambda _: started.set())
        assert started.wait(PATIENCE_S)
        omni.close()
        (output,) = waiting.result(PATIENCE_S)
    assert "closed before it finished" in str(output.error)
    assert stage.closed
    if omni.pipeline.stages["b"] is stage:  # a worker ends with all it holds
        stage.check_integrity()
    omni.close()
    with pytest.raises(RuntimeError, match="closed"):
        omni.generate("x")
    with pytest.raises(RuntimeError, match="closed"), omni.paused():
        pass


def test_an_unused_or_dropped_pipeline_is_closed(make: Make) -> None:
    others = set(threading.enumerate())
    stage = FakeStage("b", steps=1)
    with make(stage):
        pass
    assert stage.closed
    stage = FakeStage("b", steps=1)
    make(stage).generate("x")
    gc.collect()
    assert stage.closed
    left = set(threading.enumerate()) - others
    assert all(thread.name != "omni-driver" for thread in left)


@inline_only
def test_a_crash_of_the_driver_reaches_every_consumer(make: Make) -> None:
    class Liar(FakeStage):
        @property
        def has_unfinished_requests(self) -> bool:
            raise MemoryError("no memory")

    with make(Liar("b", steps=ENDLESS)) as omni:
        with pytest.raises(RuntimeError, match="crashed") as caught:
            omni.generate(["x", "y"])
        assert isinstance(caught.value.__cause__, MemoryError)
        with pytest.raises(RuntimeError, match="crashed"):
            list(omni.stream("x"))
        with pytest.raises(RuntimeError, match="crashed"), omni.paused():
            pass


@inline_only
def test_not_even_a_system_exit_in_a_users_code_leaves_callers_waiting(make: Make) -> None:
    class Quitter(FakeStage):
        def step(self) -> list[StageOutput]:
            raise SystemExit("enough")

    with make(Quitter("b")) as omni:
        with pytest.raises(RuntimeError, match="crashed") as caught:
            omni.generate(["x", "y"])
        assert isinstance(caught.value.__cause__, SystemExit)


@inline_only
def test_a_stage_that_cannot_read_a_requests_sampling_fails_that_request_alone(
    omni: Omni, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(override: object) -> SamplingParams:
        raise KeyError("not mine")

    monkeypatch.setattr(omni.pipeline.stages["a"], "merge_sampling", fail)
    outputs = omni.generate([OmniRequest("x", sampling={"a": {}}), "y"])
    assert outputs[0].error == "KeyError('not mine')"
    assert text(outputs[1]) == "b(a(y))"


def test_a_request_whose_consumer_fails_is_aborted(make: Make) -> None:
    """For example those of an event loop that was closed under its coroutines."""
    with make(FakeStage("b", steps=ENDLESS)) as omni:

        def refuse(output: OmniOutput | BaseException) -> None:
            raise RuntimeError("Event loop is closed")

        omni._driver.submit(OmniRequest("x"), "gone", refuse)
        (output,) = omni.generate(OmniRequest("y", sampling={"nowhere": {}}))
        assert output.error is not None, "requests beside it are still answered"
        check_nothing_is_held_soon(omni)


@pytest.mark.parametrize("reported", [True, False])
def test_undeliverable_outputs_are_logged_unless_their_consumer_left_before(
    make: Make, reported: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A coroutine leaves its stream, then its loop closes, while an output is in transit."""
    with make(FakeStage("b", steps=ENDLESS)) as omni:
        first, left = threading.Event(), threading.Event()

        def refuse(output: OmniOutput | BaseException) -> None:
            first.set()
            assert left.wait(PATIENCE_S)
            raise RuntimeError("Event loop is closed")

        ticket = omni._driver.submit(OmniRequest("x"), "gone", refuse)
        assert first.wait(PATIENCE_S)
        if reported:
            omni._driver.discard([ticket])
        left.set()
        check_nothing_is_held_soon(omni)
        assert not getattr(omni._driver, "_discarded", None)
    assert ("the outputs of request 'gone' are not taken" in caplog.text) is not reported


def test_requests_wait_while_the_pipeline_is_lent_out(omni: Omni) -> None:
    with ThreadPoolExecutor(1) as pool:
        with omni.paused() as pipeline:
            waiting = pool.submit(omni.generate, "x")
            assert pipeline is omni.pipeline
            assert not pipeline.stages["a"].has_unfinished_requests
            assert not waiting.done()
        assert text(waiting.result(PATIENCE_S)[0]) == "b(a(x))"


def test_a_busy_pipeline_is_not_lent_out(make: Make) -> None:
    with make(FakeStage("b", steps=ENDLESS)) as omni:
        stream = omni.stream("x")
        next(stream)
        with pytest.raises(RuntimeError, match="1 requests are running"), omni.paused():
            pass
        stream.close()
        check_integrity(omni)


def test_overrides_need_a_file() -> None:
    with pytest.raises(ValueError, match="overrides"):
        Omni(Pipeline([FakeStage("a")]), overrides={"stages.a.model": "x"})


def test_a_runtime_that_is_given_whole_is_not_changed_by_overrides() -> None:
    for place, value in (("runtime.max_retries", 3), ("runtime", {"max_retries": 3})):
        with pytest.raises(ValueError, match=rf"^overrides: {place}: the whole runtime is given"):
            Omni("two_step", overrides={place: value}, runtime=RuntimeConfig(max_retries=2))


def test_a_config_with_replicas_runs_in_one_process_as_its_file_does() -> None:
    overrides = {"runtime.kind": "processes", "stages.writer.placement.replicas": 2}
    config = PipelineConfig.load("two_step", overrides)
    with Omni(config, runtime="inline") as omni:
        assert omni.worker_states() == {}
        assert omni.generate("Hello")[0].error is None

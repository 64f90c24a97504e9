"""Whichever worker dies, and whenever: every request ends as if nothing had happened."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni.pipelines.pipeline import Pipeline
from omni.requests.request import OmniOutput, OmniRequest
from omni.runtime.orchestrator import refusal, streamed_edges
from stages import Stage, StageRequest
from stages.remote import supervisor, worker
from stages.remote.messages import Events, StageSpec
from stages.remote.remote_stage import RemoteStage
from stages.remote.supervisor import Connection, WorkerSupervisor, start_workers
from stages.worker.guarded_stage import MAX_REBUILDS
from stages.worker.stage_link import WorkerState, why_lost
from tests.support.examples import examples
from tests.support.fake_stage import FakeStage
from tests.support.patience import PATIENCE_S, wait_for
from tests.support.remote_stages import one_stage, remote_stage, several_stages
from tests.support.speech_pipeline import (
    PROMPTS,
    drain,
    speech_stages,
    text_and_sound,
    until,
    whole,
)
from tests.support.thread_workers import ThreadWorkers
from tests.support.whole_orchestrator import WholeOrchestrator

Make = Callable[[], list[Any]]


class Rig:
    """A pipeline whose workers build their own stages each time they are started."""

    def __init__(
        self,
        make: Make,
        max_retries: int = 1,
        stall_timeout_s: float = 120.0,
        *,
        shared: bool = False,
    ) -> None:
        self.shared = shared
        shapes: list[Stage] = make()
        plain = Pipeline(shapes)
        edges = streamed_edges(plain.stages)
        self.transforms = plain.transforms
        self.make = make
        self.built: list[Any] = []
        self.workers = ThreadWorkers(self._build)
        of_each = [(name, edges[name]) for name in plain.order]
        together = {"all": of_each} if shared else {name: [(name, e)] for name, e in of_each}
        specs = [several_stages(*each) for each in together.items()]
        workers = start_workers(specs, self.workers.connect, stall_timeout_s)
        self.stages = [
            RemoteStage(
                shape.name,
                shape,
                [worker for worker in workers if shape.name in worker.inboxes],
                max_retries,
            )
            for shape in shapes
        ]
        self.orchestrator = WholeOrchestrator(Pipeline(self.stages))

    def _build(self, spec: StageSpec) -> tuple[Stage, Any]:
        (stage,) = (each for each in self.make() if each.name == spec.name)
        self.built.append(stage)
        return stage, self.transforms.get(spec.name)

    def kill(self, name: str) -> None:
        """Kill the worker of a stage."""
        self.workers.kill("all" if self.shared else name)

    def let_raise(self, name: str) -> None:
        """Make the next step of a stage's current worker raise an unexpected error."""
        stage = [each for each in self.built if each.name == name][-1]

        def step() -> Any:
            del stage.step
            raise ArithmeticError("boom")

        stage.step = step

    def spoil(self, name: str) -> None:
        """Make it raise likewise, and release no request from then on: it is unusable."""
        self.let_raise(name)
        stage = [each for each in self.built if each.name == name][-1]

        def abort(request_id: str) -> None:
            raise KeyError("gone")

        stage.abort = abort

    def add(self, prompts: Mapping[str, str]) -> None:
        for request_id, prompt in prompts.items():
            self.orchestrator.add_request(OmniRequest(prompt, request_id))


@contextmanager
def rig(make: Make, **options: Any) -> Iterator[Rig]:
    made = Rig(make, **options)
    try:
        yield made
    finally:
        for stage in made.stages:
            stage.close()
        made.workers.join()


def assert_told_once(outputs: list[OmniOutput]) -> None:
    """Check that the streamed deltas add up to the request's final output."""
    last = outputs[-1]
    for name, stage in last.stages.items():
        pieces = [each.stages[name] for each in outputs if name in each.stages]
        if stage.text is not None:
            assert "".join(piece.delta for piece in pieces) == stage.text
        if stage.audio is not None:
            heard = [each.audio_delta.samples for each in pieces if each.audio_delta is not None]
            assert torch.equal(torch.cat(heard), stage.audio.samples)


def chain(**options: Any) -> Make:
    def make() -> list[Any]:
        return [FakeStage("a", steps=3), FakeStage("b", ("a",), **{"steps": 4, **options})]

    return make


def holds(pipeline: Rig, name: str, run: int) -> bool:
    """Return True if the n-th worker of a stage has a request."""
    built = [stage for stage in pipeline.built if stage.name == name]
    return len(built) == run and built[-1].has_unfinished_requests


pytestmark = pytest.mark.usefixtures("no_delay")


@pytest.fixture(autouse=True)
def many_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "MAX_STARTS", 100)


faults = st.lists(
    st.tuples(
        st.integers(0, 60),
        st.sampled_from(["thinker", "talker", "code2wav"]),
        st.sampled_from(["dies", "raises", "spoils"]),
    ),
    max_size=6,
)


@settings(max_examples=examples(6))
@given(
    schedule=faults,
    chunks=st.tuples(st.none() | st.integers(1, 4), st.none() | st.integers(1, 4)),
    slow=st.integers(1, 3),
    shared=st.booleans(),
)
def test_a_second_run_goes_on_where_the_first_one_ended(
    schedule: list[tuple[int, str, str]],
    chunks: tuple[int | None, int | None],
    slow: int,
    shared: bool,
) -> None:
    def make() -> list[Any]:
        return speech_stages(chunks, code2wav={"steps_per_token": slow, "max_pending": 1})

    turn = 0
    with rig(make, max_retries=20, shared=shared) as pipeline:
        pipeline.add(PROMPTS)

        def each_turn() -> None:
            nonlocal turn
            turn += 1
            for when, victim, what in schedule:
                if when == turn and what == "dies":
                    pipeline.kill(victim)
                elif when == turn and what == "spoils":
                    pipeline.spoil(victim)
                elif when == turn:
                    pipeline.let_raise(victim)

        outputs = drain(pipeline.orchestrator, each_turn)
        expected = whole()
        for request_id, of_request in outputs.items():
            assert of_request[-1].error is None
            assert text_and_sound(of_request[-1]) == text_and_sound(expected[request_id])
            assert_told_once(of_request)


def test_past_the_last_retry_the_requests_in_the_worker_fail_and_no_others() -> None:
    """The gate holds b's requests until its worker has died twice."""
    with rig(chain(steps=10**6), max_retries=1) as pipeline:
        pipeline.add({"x": "x"})
        for run in (1, 2):
            until(pipeline.orchestrator, lambda: holds(pipeline, "b", run))  # noqa: B023
            pipeline.workers.kill("b")
        last = drain(pipeline.orchestrator)["x"][-1]
        assert last.error == (
            "stage 'b': its worker was killed by a test while it had this request; "
            "it was run 2 times"
        )
        assert last.stages["a"].text == "a(x)"


@pytest.mark.parametrize("max_retries", [0, 2])
def test_a_request_that_the_stage_ends_with_an_error_is_run_again_and_no_other(
    max_retries: int,
) -> None:
    """The first two runs of x in b fail."""
    runs: list[Any] = []

    def make() -> list[Any]:
        a, b = chain()()
        add = b.add_request

        def adding(request: StageRequest) -> None:
            runs.append(request.request_id)
            b.fail = ("x",) if runs.count("x") <= 2 else ()
            add(request)

        b.add_request = adding
        return [a, b]

    with rig(make, max_retries=max_retries) as pipeline:
        pipeline.add({"x": "x", "y": "y"})
        outputs = drain(pipeline.orchestrator)
        assert outputs["y"][-1].error is None
        last = outputs["x"][-1]
        assert last.error == (None if max_retries else "stage 'b': told to fail")
        assert last.stages["b"].text == "b(a(x))"
        assert_told_once(outputs["x"])
        assert sorted(runs) == ["x"] * (max_retries + 1) + ["y"]
        assert pipeline.workers.started == ["a", "b"]


def test_a_worker_that_dies_idle_is_restarted_unnoticed() -> None:
    with rig(chain(), max_retries=0) as pipeline:
        pipeline.workers.kill("a")
        pipeline.add({"x": "x"})
        assert drain(pipeline.orchestrator)["x"][-1].error is None
        assert pipeline.workers.started == ["a", "b", "a"]


def test_an_abort_while_the_worker_is_down_ends_the_request() -> None:
    with rig(chain(), max_retries=3) as pipeline:
        pipeline.add({"x": "x", "y": "y"})
        pipeline.workers.kill("a")
        output = pipeline.orchestrator.abort("x")
        assert output is not None and output.error == "aborted"
        outputs = drain(pipeline.orchestrator)
        assert list(outputs) == ["y"] and outputs["y"][-1].error is None


def test_what_was_for_a_worker_that_has_died_does_not_reach_the_next_one_twice() -> None:
    """It is up before anybody notices that the first one is not."""
    runs: list[str] = []

    def make() -> list[Any]:
        a, b = chain()()
        add = a.add_request

        def adding(request: StageRequest) -> None:
            runs.append(request.request_id)
            add(request)

        a.add_request = adding
        return [a, b]

    with rig(make, max_retries=3) as pipeline:
        pipeline.add({"x": "x", "y": "y"})
        pipeline.workers.kill("a")
        (life,) = pipeline.stages[0].workers
        wait_for(lambda: life.is_up)
        outputs = drain(pipeline.orchestrator)
        assert [outputs[each][-1].error for each in ("x", "y")] == [None, None]
        assert sorted(runs) == ["x", "y"]


def test_an_id_may_be_used_again_right_after_an_abort() -> None:
    with rig(chain(), max_retries=3) as pipeline:
        for prompt in ("one", "two", "three"):
            pipeline.add({"x": prompt})
            pipeline.orchestrator.step()
            pipeline.orchestrator.abort("x")
        pipeline.add({"x": "last"})
        outputs = drain(pipeline.orchestrator)["x"]
        assert outputs[-1].stages["b"].text == "b(a(last))"
        assert_told_once(outputs)


def test_a_worker_that_can_never_be_built_again_fails_what_comes_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "MAX_STARTS", 3)
    with rig(chain(), max_retries=9) as pipeline:
        build = pipeline._build

        def refuse(spec: StageSpec) -> tuple[Stage, Any]:
            raise MemoryError("no room")

        pipeline.workers._build = refuse
        pipeline.add({"x": "x"})
        pipeline.workers.kill("b")
        error = str(drain(pipeline.orchestrator)["x"][-1].error)
        assert error.startswith("stage 'b': it cannot be used any more: its worker ended")
        with pytest.raises(ValueError, match=f"^{re.escape(error)}$"):
            pipeline.add({"comes late": "x"})
        pipeline.workers._build = build


def test_a_worker_without_a_node_is_retried_and_its_requests_fail_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "MAX_STARTS", 3)
    monkeypatch.setattr(supervisor, "_FIRST_DELAY_S", 0.005)
    reported = (
        "stage 'b': it takes no requests until there is a place for it: its worker could not be "
        "started: no node has what it needs"
    )
    with rig(chain(), max_retries=9) as pipeline:
        _, stage = pipeline.stages
        (worker,) = stage.workers
        pipeline.workers.has_place = False
        pipeline.add({"waits": "x"})
        pipeline.workers.kill("b")
        assert drain(pipeline.orchestrator)["waits"][-1].error == reported
        assert stage.worker_states()[0].state == "waiting"
        with pytest.raises(ValueError, match=f"^{reported}$"):
            pipeline.add({"comes late": "x"})
        with pytest.raises(RuntimeError, match="stage 'b': its worker is being started again"):
            stage.reset_prefix_cache()
        num_restarts = stage.worker_states()[0].num_restarts
        pipeline.workers.has_place = True
        wait_for(lambda: worker.is_up)
        for _ in range(2):
            pipeline.add({"x": "x"})
            assert drain(pipeline.orchestrator)["x"][-1].error is None
            assert stage.worker_states()[0].state == "up"
            pipeline.workers.kill("b")
        assert stage.worker_states()[0].num_restarts == num_restarts + 2


def test_what_is_asked_of_a_worker_that_ended_is_asked_of_the_next_one() -> None:
    with rig(chain(), max_retries=0) as pipeline:
        stage, _ = pipeline.stages
        pipeline.workers.kill("a")
        stage.reset_prefix_cache()
        stage.check_integrity()
        stage.enable_prefix_caching = False
        assert [each.enable_prefix_caching for each in pipeline.built] == [True, True, False]
        assert [each.resets for each in pipeline.built] == [0, 0, 1]
        pipeline.workers.kill("a")
        stage.reset_prefix_cache()
        assert not pipeline.built[-1].enable_prefix_caching, "what was set stays set"


def test_a_worker_gives_signs_of_life_while_it_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_HEARTBEAT_S", 0.001)
    heard = threading.Semaphore(0)
    receive = WorkerSupervisor._receive

    def receiving(supervisor: WorkerSupervisor, number: int, message: Any) -> None:
        receive(supervisor, number, message)
        if isinstance(message, Events) and not message.events:
            heard.release()

    monkeypatch.setattr(WorkerSupervisor, "_receive", receiving)
    with rig(chain(), max_retries=1) as pipeline:
        build = pipeline._build

        def slow(spec: StageSpec) -> tuple[Stage, Any]:
            while heard.acquire(blocking=False):
                pass
            for _ in range(3):
                assert heard.acquire(timeout=PATIENCE_S)
            return build(spec)

        pipeline.workers._build = slow
        pipeline.workers.kill("b")
        pipeline.add({"x": "x"})
        assert drain(pipeline.orchestrator)["x"][-1].error is None
        assert pipeline.workers.started == ["a", "b", "b"]


def test_a_silent_worker_counts_as_dead() -> None:
    """Its loop is blocked in a step; only the link reads a clock."""
    with rig(chain(), max_retries=1, stall_timeout_s=0.5) as pipeline:
        (first,) = (stage for stage in pipeline.built if stage.name == "b")
        gate = threading.Event()
        step = type(first).step

        def held_up() -> Any:
            gate.wait()
            return step(first)

        first.step = held_up  # type: ignore[method-assign]
        pipeline.add({"x": "x"})
        last = drain(pipeline.orchestrator)["x"][-1]
        gate.set()
        assert last.error is None and last.stages["b"].text == "b(a(x))"
        assert pipeline.workers.started.count("b") == 2


class _Silent(Connection):
    """A worker that hangs before its first message."""

    start_timeout_s = 0.0

    def __init__(self, on_end: Callable[[str], None]) -> None:
        self._on_end = on_end

    def send(self, message: Any) -> None:
        raise ConnectionError("it never came so far")

    def kill(self, reason: str) -> None:
        self._on_end(reason)

    def close(self, grace_s: float) -> None:
        pass


def test_a_worker_that_hangs_before_its_first_word_is_not_waited_for_for_ever() -> None:
    (shape,) = (stage for stage in speech_stages((None, None)) if stage.name == "thinker")
    specs = [one_stage("thinker")]
    with pytest.raises(ValueError, match=r"its worker gave no sign of life for 0\.01 s, before it"):
        remote_stage(shape, specs, lambda _, __, on_end: _Silent(on_end), stall_timeout_s=0.01)


# Stages that a failure leaves unusable: their workers are restarted as if they had died.


def held_up_at_first() -> Make:
    """A chain; the first workers, made from the shapes, never end a request."""
    number = itertools.count()

    def make() -> list[Any]:
        a, b = chain()()
        b.endless = ("x", "y") if next(number) <= 2 else ()
        return [a, b]

    return make


def test_without_retries_only_the_requests_in_it_fail_and_say_why() -> None:
    with rig(held_up_at_first(), max_retries=0) as pipeline:
        pipeline.add({"x": "x"})
        until(pipeline.orchestrator, lambda: holds(pipeline, "b", 1))
        pipeline.spoil("b")
        last = drain(pipeline.orchestrator)["x"][-1]
        assert str(last.error).startswith("stage 'b': its worker was ended (it broke by KeyError")
        assert "after ArithmeticError: boom" in str(last.error)
        pipeline.add({"y": "y"})
        assert drain(pipeline.orchestrator)["y"][-1].error is None


def test_a_stage_that_breaks_when_it_has_no_requests_is_replaced_before_the_next_one() -> None:
    with rig(held_up_at_first(), max_retries=0) as pipeline:
        pipeline.add({"x": "x"})
        until(pipeline.orchestrator, lambda: holds(pipeline, "b", 1))
        (first,) = (each for each in pipeline.built if each.name == "b")

        def reset() -> None:
            raise KeyError("gone")

        first.reset_prefix_cache = reset  # as after a failed step
        pipeline.let_raise("b")
        drain(pipeline.orchestrator)
        wait_for(lambda: pipeline.workers.started == ["a", "b", "b"])
        pipeline.add({"y": "y"})
        assert drain(pipeline.orchestrator)["y"][-1].error is None


@pytest.mark.parametrize(
    ("error", "num_tries", "message"),
    [
        (MemoryError("no room"), 1, "could not be rebuilt: MemoryError: no room"),
        (None, MAX_REBUILDS, "it broke 4 times in a row"),
    ],
)
def test_a_stage_that_cannot_be_rebuilt_or_breaks_again_gets_another_worker(
    error: Exception | None, num_tries: int, message: str
) -> None:
    """Inline it would be retried when the next request comes: there is no alternative."""
    tries = 0
    shapes = held_up_at_first()

    def make() -> list[Any]:
        a, b = shapes()

        def rebuild() -> None:
            nonlocal tries
            tries += 1
            if error is not None:
                raise error
            b.held.clear()
            pipeline.spoil("b")

        b.rebuild = rebuild
        return [a, b]

    with rig(make, max_retries=9) as pipeline:
        pipeline.add({"x": "x"})
        until(pipeline.orchestrator, lambda: holds(pipeline, "b", 1))
        pipeline.spoil("b")
        last = drain(pipeline.orchestrator)["x"][-1]
        assert last.error is None and last.stages["b"].text == "b(a(x))"
        assert tries == num_tries
        (state,) = pipeline.stages[1].worker_states()
        assert message in str(state.last_end)


# While a stage has no worker, a request is refused at once, and no other stage works for it.

UP, STARTING = WorkerState("up", 3, "was killed"), WorkerState("starting", 1, "was killed")
WAITING = WorkerState("waiting", 1, "could not be started: no node has what it needs")
DOWN = WorkerState("down", 5, "was killed by SIGKILL")
WAITS = (
    "it takes no requests until there is a place for it: its worker could not be started: no node "
    "has what it needs"
)
IS_DOWN = "it cannot be used any more: its worker was killed by SIGKILL"


@pytest.mark.parametrize(
    ("workers", "why"),
    [
        ([WAITING], WAITS),
        ([DOWN], IS_DOWN),
        ([DOWN, WAITING], WAITS),
        ([DOWN, DOWN], IS_DOWN),
        ([DOWN, STARTING], None),
        ([WAITING, UP], None),
        ([STARTING], None),
    ],
)
def test_a_request_that_would_come_to_a_stage_without_a_worker_does_not_begin(
    workers: Sequence[WorkerState], why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last stage's restarts are simulated."""
    assert why_lost(workers) == why
    with rig(chain(), max_retries=0) as pipeline:
        first, last = pipeline.stages
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(last, "worker_states", lambda: tuple(workers))
            if why is None:
                pipeline.add({"x": "x"})
            else:
                with pytest.raises(ValueError, match=f"^stage 'b': {why}$") as caught:
                    pipeline.add({"x": "x"})
                assert not refusal("x", caught.value).refused, "it is not the client's to fix"
                assert not pipeline.orchestrator.has_unfinished_requests
                assert not first.has_unfinished_requests
        if why is not None:
            pipeline.add({"x": "x"})  # its id is free
        assert drain(pipeline.orchestrator)["x"][-1].error is None


def test_a_worker_that_is_back_gets_the_first_request_that_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No driver turn, which would process its news, runs between its return and the request."""
    monkeypatch.setattr(supervisor, "MAX_STARTS", 2)
    with rig(chain(), max_retries=0) as pipeline:
        first, _ = pipeline.stages
        (worker,) = first.workers
        pipeline.workers.has_place = False
        pipeline.add({"x": "x"})
        pipeline.workers.kill("a")
        assert WAITS in str(drain(pipeline.orchestrator)["x"][-1].error)
        pipeline.workers.has_place = True
        wait_for(lambda: worker.is_up)
        pipeline.add({"x": "x"})
        assert drain(pipeline.orchestrator)["x"][-1].error is None

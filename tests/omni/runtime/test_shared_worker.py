"""Stages that share a worker produce their inline outputs, and the cause of its end is reported."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from engine import SamplingParams
from omni import Omni, OmniOutput, OmniRequest, Pipeline, TextPrompt
from omni.pipelines.pipeline_config import PipelineConfig
from stages import StageOutput
from tests.support.fake_speech_kind import fake_speech
from tests.support.fake_stage import FakeStage
from tests.support.one_writer import one_writer
from tests.support.patience import PATIENCE_S, wait_for
from tests.support.same_outputs import assert_same, streamed
from tests.support.shared_worker import apart, omni_apart, worker_of

INLINE: dict[str, Any] = {"kind": "inline"}
ENDLESS = 10**9

pytestmark = pytest.mark.usefixtures("no_delay")


# What the worker runs.


@pytest.mark.parametrize("chunk_size", [2, None])
def test_speech_is_the_same_as_inline(chunk_size: int | None) -> None:
    inputs = {"from": "talker", "transform": "talker_to_code2wav", "chunk_size": chunk_size}
    config = fake_speech(INLINE, code2wav={"inputs": inputs})
    prompts = ["hello there", "hm", "what is it that you hear"]
    with Omni(config) as omni:
        expected = streamed(omni, prompts)
    with apart(config) as (omni, _):
        for _ in range(2):
            assert_same(streamed(omni, prompts), expected)


@pytest.fixture(scope="module")
def writer(checkpoint_cache: object) -> PipelineConfig:
    return one_writer(
        "writing",
        engine={"num_blocks": 64},
        sampling={"temperature": 1.0, "seed": 5, "max_tokens": 12},
        outputs=["hidden_states"],
        final_output=["text", "tensors"],
    )


@pytest.mark.parametrize("sampling", [{}, {"n": 3}, {"logprobs": 2}, {"n": 2, "logprobs": 1}])
def test_a_models_answers_are_the_same_as_inline_from_the_cache_or_not(
    writer: PipelineConfig, sampling: dict[str, Any]
) -> None:
    requests = [
        OmniRequest(text, text, sampling={"writer": sampling})
        for text in ("A quick brown fox jumps over the lazy dog, " * 4, "A quick brown fox")
    ]
    with Omni(writer) as omni:
        expected = omni.generate(requests)
    with apart(writer) as (omni, _):
        found = omni.generate(requests)
        assert_same(found, expected)
        hits = omni.generate(requests)
        assert_same(hits, expected)
        assert hits[0].stages["writer"].num_cached_tokens > 0
        deltas = [output.stages["writer"].delta for output in omni.stream(requests[0])]
        assert "".join(deltas) == expected[0].stages["writer"].text
        assert omni.stats()["writer"].cached_tokens > 0
        with omni.paused() as pipeline:
            pipeline.stages["writer"].reset_prefix_cache()
            pipeline.stages["writer"].check_integrity()
            pipeline.stages["writer"].enable_prefix_caching = False
        (again,) = omni.generate(requests[0])
        assert again.stages["writer"].num_cached_tokens == 0


def test_a_voice_has_its_other_names_there_too() -> None:
    sampling = {"thinker": {"max_tokens": 6}, "talker": {"max_tokens": 20}}
    config = PipelineConfig.load("omni_speech", {"voices": {"narrator": "Ethan"}})
    with apart(config) as (omni, _):
        narrator, ethan, chelsie = (
            output.stages["code2wav"].audio.encoded("pcm16")
            for output in omni.generate(
                [
                    OmniRequest(TextPrompt("Hello"), sampling=sampling, speaker=name)
                    for name in ("narrator", "ash", "alloy")
                ]
            )
        )
    assert narrator == ethan != chelsie


def test_a_remote_stage_has_the_properties_of_the_stage(writer: PipelineConfig) -> None:
    with Omni(writer) as inline, apart(writer) as (omni, _):
        ours, theirs = omni.pipeline.stages["writer"], inline.pipeline.stages["writer"]
        for name in ("hidden_size", "dtype", "sampling", "seed", "speakers", "has_cache"):
            assert getattr(ours, name) == getattr(theirs, name), name
        assert ours.describe() == theirs.describe()
        with pytest.raises(ValueError, match="logprobs"):
            ours.check_sampling(SamplingParams(logprobs=10**6))
        for use in (ours.step, lambda: ours.abort("x"), lambda: ours.add_request(None)):
            with pytest.raises(RuntimeError, match="'writer' runs elsewhere"):
                use()


# What is wrong with a request.


def test_a_prompt_that_cannot_be_sent_is_refused_alone() -> None:
    with omni_apart(FakeStage("b")) as omni:
        refused, good = omni.generate([OmniRequest(object()), "y"])  # type: ignore[arg-type]
        assert refused.refused and refused.error is not None
        assert "cannot be sent to another process: it is of type builtins.object" in refused.error
        assert good.stages["b"].text == "b(y)"


def test_an_output_that_cannot_be_sent_ends_its_request_alone() -> None:
    class Odd(FakeStage):
        def step(self) -> list[StageOutput]:
            outputs = super().step()
            for each in outputs:
                if each.finished and each.request_id == "odd":
                    object.__setattr__(each, "windows", (object(),))
            return outputs

    with omni_apart(Odd("b")) as omni:
        odd, good = omni.generate([OmniRequest("x", "odd"), "y"])
        assert odd.error is not None and "its output cannot be handed on: ValueError" in odd.error
        assert good.stages["b"].text == "b(y)"
        with omni.paused():  # nothing is running
            pass


def test_a_composed_pipeline_needs_another_runtime() -> None:
    with pytest.raises(ValueError, match="apart=True needs a config"):
        Omni(Pipeline([FakeStage("a")]), apart=True)


def test_a_stage_that_cannot_be_built_is_named() -> None:
    config = fake_speech(INLINE, talker={"tail": -1})
    refused = pytest.raises(ValueError, match="stage 'talker': tail must not be negative, got -1")
    with refused, apart(config):
        pass


# What ends the worker.


def begun(omni: Omni, number: int = 1) -> tuple[list[threading.Thread], list[OmniOutput]]:
    """Start requests; return their threads and a list for their outputs."""
    seen = threading.Semaphore(0)
    ended: list[OmniOutput] = []

    def run(prompt: str) -> None:
        ended.extend(omni.generate(prompt, on_progress=lambda _: seen.release()))

    threads = [threading.Thread(target=run, args=(f"x{each}",)) for each in range(number)]
    for thread in threads:
        thread.start()
    for _ in range(3 * number):
        assert seen.acquire(timeout=PATIENCE_S)
    return threads, ended


def test_when_it_dies_its_requests_are_run_again_in_the_next_one() -> None:
    config = fake_speech(INLINE, thinker={"pause_s": 0.001})
    with apart(config) as (omni, workers):
        whole = omni.generate("what is it that you hear")
        with omni.paused() as pipeline:
            pipeline.stages["thinker"].enable_prefix_caching = False
        num_steps = omni.stats()["thinker"].num_steps
        outputs = omni.stream(["what is it that you hear"] * 2)
        last = []
        for number, output in enumerate(outputs):
            if number == 3:
                workers.connections[0].kill("was killed by a test")
            if output.finished:
                last.append(output)
        assert_same(last, whole * 2)
        assert len(workers.connections) == 2
        for states in omni.worker_states().values():
            (state,) = states
            assert (state.state, state.num_restarts) == ("up", 1)
            assert state.last_end == "was killed by a test"
        stats = omni.stats()["thinker"]
        assert stats.num_steps > num_steps and stats.num_restarts == 1
        assert not omni.pipeline.stages["thinker"].enable_prefix_caching


def test_a_stage_that_can_be_used_no_more_is_built_again_with_its_worker() -> None:
    class Spoilt(FakeStage):
        def step(self) -> list[StageOutput]:
            if any(held.prompt == "bad" for held, _ in self.held.values()):
                raise ArithmeticError("boom")
            return super().step()

        def abort(self, request_id: str) -> None:
            raise KeyError("gone")

    shapes = [Spoilt("a", final=False), FakeStage("b", ("a",))]
    make = lambda: [Spoilt("a", final=False), FakeStage("b", ("a",))]  # noqa: E731
    with omni_apart(*shapes, make=make) as omni:
        (failed,) = omni.generate("bad")
        broke = "it broke by KeyError: 'gone' (after ArithmeticError: boom)"
        assert failed.error is not None and broke in failed.error
        wait_for(lambda: omni.worker_states()["b"][0].num_restarts == 1 and worker_of(omni).is_up)
        (state,) = omni.worker_states()["b"]
        assert str(state.last_end).startswith(f"was ended (stage 'a': {broke}")
        (good,) = omni.generate("y")
        assert good.stages["b"].text == "b(a(y))"


def test_one_that_is_forgotten_in_a_thread_that_has_its_locks_is_closed() -> None:
    stage = FakeStage("b", steps=1)
    owned = [omni_apart(stage)]
    worker = worker_of(owned[0])

    def forget() -> None:
        with worker._lock:
            owned.clear()

    thread = threading.Thread(target=forget, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "it waits for itself"
    wait_for(lambda: stage.closed)


def test_what_comes_while_it_is_started_again_waits_for_it() -> None:
    with apart(fake_speech(INLINE)) as (omni, workers):
        for number in range(3):
            workers.connections[number].kill("was killed by a test")
            wait_for(lambda: worker_of(omni).state.num_restarts > number)  # noqa: B023 - now
            for output in omni.generate(["hm", "hello"]):
                assert output.error is None


def test_a_stage_can_be_changed_between_steps_of_its_requests() -> None:
    with omni_apart(FakeStage("b", steps=ENDLESS)) as omni:
        begun = threading.Event()
        thread = threading.Thread(
            target=lambda: omni.generate("x", on_progress=lambda _: begun.set())
        )
        thread.start()
        assert begun.wait(PATIENCE_S)
        stage = omni.pipeline.stages["b"]
        stage.enable_prefix_caching = False
        assert not stage.enable_prefix_caching
        assert omni.stats()["b"] is not None
        assert thread.is_alive()
    thread.join(PATIENCE_S)

"""A pipeline in a process of its own says what it says inline, and whatever ends it is told."""

from __future__ import annotations

import os
import threading
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import FinishReason, RequestMetrics, SamplingParams, TokenLogprobs, Waveform
from engine.interface.deferred import with_fields
from omni import Omni, OmniOutput, OmniRequest, Pipeline, TextPrompt
from omni.pipelines.pipeline_config import PipelineConfig
from omni.requests.stage_time import StageTime
from omni.runtime.apart.apart_messages import apart_codec
from omni.runtime.apart.shown_outputs import OutputShortener, ShownRequest, packed, unpacked
from stages import StageOutput
from stages.remote import process_connection, worker_life
from stages.remote.worker_life import WorkerLife
from stages.stage_output import Completion
from tests.support.apart_threads import ApartThreads, omni_apart
from tests.support.examples import examples
from tests.support.fake_speech_kind import fake_speech
from tests.support.fake_stage import FakeStage
from tests.support.patience import PATIENCE_S, wait_for
from tests.support.same_outputs import assert_same, streamed

INLINE: dict[str, Any] = {"kind": "inline"}
ENDLESS = 10**9


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_life, "_FIRST_DELAY_S", 0.0)


def life_of(omni: Omni) -> WorkerLife:
    life: WorkerLife = omni._runner._life  # type: ignore[attr-defined]
    return life


# What crosses.


def same(ours: StageOutput, theirs: StageOutput) -> bool:
    def plain(value: Any) -> Any:
        if isinstance(value, Waveform):
            return value.samples.tolist(), value.sampling_rate
        if isinstance(value, dict):
            return {name: tensor.tolist() for name, tensor in value.items()}
        return value

    return all(
        plain(getattr(ours, each.name)) == plain(getattr(theirs, each.name))
        for each in fields(StageOutput)
    )


@st.composite
def progress(draw: st.DrawFn) -> list[OmniOutput]:
    """The outputs of one request, whose stages grow by turns, as an orchestrator shows them."""
    names = draw(st.sampled_from([("writer",), ("writer", "speaker"), ("speaker",)]))
    has_logprobs, num_completions = draw(st.booleans()), draw(st.sampled_from([0, 1, 1, 2]))
    adds_up = draw(st.booleans())
    text = ""
    ids: tuple[int, ...] = ()
    sound: list[torch.Tensor] = []
    visible: dict[str, StageOutput] = {}
    outputs = []
    count = draw(st.integers(1, 8))
    for turn in range(count):
        is_last = turn == count - 1
        moved = names if is_last else draw(st.lists(st.sampled_from(names), unique=True))
        for name, each in visible.items():  # as a snapshot leaves them
            visible[name] = StageOutput(
                **{f.name: getattr(each, f.name) for f in fields(StageOutput)}
                | {"delta": "", "audio_delta": None}
            )
        for name in moved:
            if name in visible and visible[name].finished:
                continue
            finished = is_last or draw(st.booleans())
            common: dict[str, Any] = {
                "num_prompt_tokens": turn,
                "metrics": RequestMetrics(0.5, None, 2.0 if finished else None, 3),
                "finish_reason": FinishReason.STOP if finished else None,
            }
            if name == "writer":
                more = draw(st.sampled_from(["", "a", "bc"]))
                text, ids = text + more, (*ids, turn)
                told = tuple(TokenLogprobs(5, -0.5, ()) for _ in ids)
                logprobs = told if has_logprobs else None
                one = Completion(text, ids, common["finish_reason"], logprobs)
                visible[name] = StageOutput(
                    "r",
                    name,
                    finished,
                    text=text,
                    delta=more,
                    token_ids=ids,
                    logprobs=logprobs,
                    completions=(one,) * num_completions,
                    tensors={"rows": torch.ones(2)} if finished else {},
                    prompt_token_ids=(1, 2) if finished else (),
                    **common,
                )
                continue
            delta = None
            if draw(st.booleans()):
                delta = Waveform(torch.arange(draw(st.integers(0, 3)), dtype=torch.float32), 8)
                sound.append(delta.samples)
            whole = torch.cat(sound) if sound else torch.zeros(0)
            audio = Waveform(whole if adds_up else whole + 1, 8) if finished else None
            visible[name] = StageOutput(
                "r", name, finished, audio=audio, audio_delta=delta, **common
            )
        times = (StageTime("writer", 1.5, None, num_tokens=turn),) if draw(st.booleans()) else ()
        outputs.append(OmniOutput("r", dict(visible), is_last, timeline=times))
    return outputs


@settings(max_examples=examples(200))
@given(st.lists(progress(), min_size=1, max_size=3), st.randoms())
def test_outputs_arrive_as_they_were(requests: list[list[OmniOutput]], order: Any) -> None:
    codec, shortener = apart_codec(), OutputShortener()
    left = {number: list(outputs) for number, outputs in enumerate(requests)}
    arrived = {number: ShownRequest("r") for number in left}
    while left:
        turn = order.sample(sorted(left), order.randint(1, len(left)))
        expected = [(number, left[number].pop(0)) for number in turn]
        left = {number: outputs for number, outputs in left.items() if outputs}
        message = packed([shortener.shorten(*each) for each in expected])
        for (number, theirs), short in zip(
            expected, unpacked(codec.decode(codec.encode(message))), strict=True
        ):
            ours = arrived[number].whole(short)
            assert ours.stages.keys() == theirs.stages.keys()
            for name, stage in theirs.stages.items():
                assert same(ours.stages[name], stage), (ours.stages[name], stage)
            assert (ours.finished, ours.timeline) == (theirs.finished, theirs.timeline)
    assert not shortener._told, "of requests that have ended nothing is kept"


def test_what_is_as_it_was_is_not_sent_again() -> None:
    shortener = OutputShortener()
    sound = Waveform(torch.ones(10_000), 8)
    speaker = StageOutput("r", "speaker", True, audio=sound, audio_delta=sound)
    quiet = with_fields(speaker, audio_delta=None)
    first = packed([shortener.shorten(0, OmniOutput("r", {"speaker": speaker}, False))])
    second = packed([shortener.shorten(0, OmniOutput("r", {"speaker": quiet}, False))])
    assert 40_000 < len(first.packed) < 41_000, "the whole is what its pieces were"
    assert len(second.packed) < 50
    assert first.beside == second.beside == ((),)


def test_what_is_no_output_is_refused() -> None:
    message = packed([])
    with pytest.raises(ValueError, match="outputs that cannot be read"):
        list(unpacked(type(message)(b"\x91\x01", ((),))))


# What it runs.


@pytest.mark.parametrize("chunk_size", [2, None])
def test_speech_is_the_same_as_inline(chunk_size: int | None) -> None:
    inputs = {"from": "talker", "transform": "talker_to_code2wav", "chunk_size": chunk_size}
    config = fake_speech(INLINE, code2wav={"inputs": inputs})
    prompts = ["hello there", "hm", "what is it that you hear"]
    with Omni(config) as omni:
        expected = streamed(omni, prompts)
    with ApartThreads().omni(config) as omni:
        for _ in range(2):
            assert_same(streamed(omni, prompts), expected)


@pytest.fixture(scope="module")
def writer(checkpoint_cache: object) -> PipelineConfig:
    stage = {
        "kind": "autoregressive",
        "model": "seeded:qwen2",
        "engine": {"num_blocks": 64},
        "sampling": {"temperature": 1.0, "seed": 5, "max_tokens": 12},
        "outputs": ["hidden_states"],
        "final_output": ["text", "tensors"],
    }
    return PipelineConfig.model_validate({"name": "writing", "stages": {"writer": stage}})


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
    with ApartThreads().omni(writer) as omni:
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
    with ApartThreads().omni(config) as omni:
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


def test_what_its_user_knows_of_a_stage_is_what_it_says(writer: PipelineConfig) -> None:
    with Omni(writer) as inline, ApartThreads().omni(writer) as omni:
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
        with omni.paused():  # nothing runs any more
            pass


def test_only_what_can_run_apart_does() -> None:
    with pytest.raises(ValueError, match="apart=True needs a config"):
        Omni(Pipeline([FakeStage("a")]), apart=True)
    with pytest.raises(ValueError, match="trace: stages in one process of their own"):
        Omni("two_step", apart=True, trace="trace.json")


def test_a_stage_that_cannot_be_built_is_told_with_its_name() -> None:
    config = fake_speech(INLINE, talker={"tail": -1})
    refused = pytest.raises(ValueError, match="stage 'talker': tail must not be negative, got -1")
    with refused, ApartThreads().omni(config):
        pass


# What ends it.


def begun(omni: Omni, number: int = 1) -> tuple[list[threading.Thread], list[OmniOutput]]:
    """Requests that are under way, and what becomes of them."""
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


def test_when_it_dies_its_requests_fail_and_it_is_started_again() -> None:
    config = fake_speech(INLINE, thinker={"pause_s": 0.001})
    hosts = ApartThreads()
    with hosts.omni(config) as omni:
        whole = omni.generate("what is it that you hear")
        with omni.paused() as pipeline:
            pipeline.stages["thinker"].enable_prefix_caching = False
        num_steps = omni.stats()["thinker"].num_steps
        threads, ended = begun(omni, 2)
        hosts.connections[0].kill("was killed by a test")
        for thread in threads:
            thread.join(PATIENCE_S)
        for each in ended:
            assert each.error == (
                "pipeline 'fake_speech': its process was killed by a test while it had this request"
            )
            assert not each.refused
        wait_for(lambda: life_of(omni).is_up)
        assert_same(omni.generate("what is it that you hear"), whole)
        assert len(hosts.hosts) == 2
        for states in omni.worker_states().values():
            (state,) = states
            assert (state.state, state.num_restarts) == ("up", 1)
            assert state.last_end == "was killed by a test"
        stats = omni.stats()["thinker"]
        assert stats.num_steps > num_steps and stats.num_restarts == 1
        wait_for(lambda: not hosts.hosts[1]._pipeline.stages["thinker"].enable_prefix_caching)


def test_a_crash_of_its_driver_is_told_and_it_is_started_again() -> None:
    class Bad(FakeStage):
        def step(self) -> list[StageOutput]:
            if any(held.prompt == "bad" for held, _ in self.held.values()):
                raise SystemExit("enough")
            return super().step()

    with omni_apart(Bad("b"), make=lambda: [Bad("b")]) as omni:
        (failed,) = omni.generate("bad")
        assert failed.error is not None
        assert "its process was ended (its driver crashed by SystemExit: enough)" in failed.error
        wait_for(lambda: life_of(omni).is_up)
        (good,) = omni.generate("y")
        assert good.stages["b"].text == "b(y)"


def test_a_stage_that_is_of_no_use_any_more_is_built_anew_with_its_process() -> None:
    class Spoilt(FakeStage):
        def step(self) -> list[StageOutput]:
            if any(held.prompt == "bad" for held, _ in self.held.values()):
                raise ArithmeticError("boom")
            return super().step()

        def abort(self, request_id: str) -> None:
            raise KeyError("gone")

    with omni_apart(Spoilt("b"), make=lambda: [Spoilt("b")]) as omni:
        (failed,) = omni.generate("bad")
        assert failed.error == "stage 'b': its step failed: ArithmeticError: boom"
        wait_for(lambda: omni.worker_states()["b"][0].num_restarts == 1 and life_of(omni).is_up)
        (state,) = omni.worker_states()["b"]
        assert state.last_end == (
            "was ended (stage 'b': it broke by KeyError: 'gone' (after ArithmeticError: boom) and "
            "cannot be built anew: a Spoilt has no method rebuild)"
        )
        (good,) = omni.generate("y")
        assert good.stages["b"].text == "b(y)"


def test_one_that_is_forgotten_in_a_thread_that_has_its_locks_is_closed() -> None:
    stage = FakeStage("b", steps=1)
    owned = [omni_apart(stage)]
    life = life_of(owned[0])

    def forget() -> None:
        with life._lock:
            owned.clear()

    thread = threading.Thread(target=forget, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "it waits for itself"
    wait_for(lambda: stage.closed)


def test_what_comes_while_it_is_started_again_waits_for_it() -> None:
    hosts = ApartThreads()
    with hosts.omni(fake_speech(INLINE)) as omni:
        for number in range(3):
            hosts.connections[number].kill("was killed by a test")
            wait_for(lambda: life_of(omni).state.num_restarts > number)  # noqa: B023 - now
            for output in omni.generate(["hm", "hello"]):
                assert output.error is None


def test_what_waits_for_one_that_never_comes_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = ApartThreads()
    with hosts.omni(fake_speech(INLINE)) as omni:
        monkeypatch.setattr(worker_life, "MOST_STARTS", 2)

        def fail(*_: object) -> None:
            raise OSError("no more of them")

        monkeypatch.setattr(life_of(omni), "_connect", fail)
        hosts.connections[0].kill("was killed by a test")
        wait_for(lambda: life_of(omni).state.num_restarts > 0)
        (output,) = omni.generate("hm")
        assert output.error == (
            "pipeline 'fake_speech' cannot be used any more: its process could not be started: "
            "OSError: no more of them"
        )


def test_what_waits_when_the_pipeline_is_closed_is_told() -> None:
    omni = omni_apart(FakeStage("b"))
    ended: list[OmniOutput] = []
    runner: Any = omni._runner
    thread = threading.Thread(target=lambda: ended.extend(omni.generate("x")))
    with omni.paused():
        thread.start()
        wait_for(lambda: runner._held_back)
        omni.close()
        thread.join(PATIENCE_S)
    assert [each.error for each in ended] == ["the pipeline was closed before it finished"]
    with pytest.raises(RuntimeError, match="closed"):
        omni.generate("y")


def test_a_fork_that_gives_up_a_request_leaves_it_to_its_parent() -> None:
    with omni_apart(FakeStage("b", steps=50)) as omni:
        outputs = omni.stream("x")
        next(outputs)
        if not (pid := os.fork()):
            outputs.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        (*_, last) = outputs
        assert (last.finished, last.error) == (True, None)


def test_what_comes_while_it_is_not_up_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_life, "MOST_STARTS", 1)
    hosts = ApartThreads()
    with hosts.omni(fake_speech(INLINE)) as omni:
        hosts.connections[0].kill("was killed by a test")
        wait_for(lambda: life_of(omni).state.state == "down")
        (output,) = omni.generate("x")
        assert output.error == (
            "pipeline 'fake_speech' cannot be used any more: its process was killed by a test"
        )


def test_a_stage_can_be_changed_between_steps_of_its_requests() -> None:
    with omni_apart(FakeStage("b", steps=ENDLESS)) as omni:
        threads, ended = begun(omni)
        stage = omni.pipeline.stages["b"]
        stage.enable_prefix_caching = False
        assert not stage.enable_prefix_caching
        assert omni.stats()["b"] is not None
        assert not ended
    threads[0].join(PATIENCE_S)


def test_one_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    class Stuck(FakeStage):
        def step(self) -> list[StageOutput]:
            assert gate.wait(PATIENCE_S)
            return super().step()

    with omni_apart(Stuck("b")) as omni:
        monkeypatch.setattr(process_connection, "_EXIT_PATIENCE_S", 0.0)  # no thread can be killed
        monkeypatch.setattr(life_of(omni), "_stall_timeout_s", 1.0)
        (output,) = omni.generate("x")
        gate.set()
        assert "gave no sign of life for" in str(output.error)


def test_what_waits_for_the_stages_that_are_lent_out_can_be_aborted() -> None:
    with omni_apart(FakeStage("b")) as omni:
        ended: list[OmniOutput] = []
        runner: Any = omni._runner
        thread = threading.Thread(target=lambda: ended.extend(omni.generate(OmniRequest("x", "a"))))
        with omni.paused():
            thread.start()
            wait_for(lambda: runner._held_back)
            omni.abort("a")
            thread.join(PATIENCE_S)
        assert [each.error for each in ended] == ["aborted"]


def test_what_comes_while_the_stages_are_lent_out_waits_and_survives_a_death() -> None:
    hosts = ApartThreads()
    with hosts.omni(fake_speech(INLINE)) as omni:
        answered: list[OmniOutput] = []
        thread = threading.Thread(target=lambda: answered.extend(omni.generate("hm")))
        with omni.paused():
            thread.start()
            runner: Any = omni._runner
            wait_for(lambda: runner._held_back)
            hosts.connections[0].kill("was killed by a test")
            wait_for(lambda: len(hosts.hosts) == 2 and life_of(omni).is_up)
            assert not answered
        thread.join(PATIENCE_S)
        assert answered[0].error is None

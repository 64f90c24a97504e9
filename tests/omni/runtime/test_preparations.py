"""One request's preparation delays no other, and no output depends on its duration."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from engine import ChatPrompt, EmbedsPrompt, EngineConfig, SamplingParams, TextPrompt, TokensPrompt
from omni.pipelines.pipeline import Pipeline
from omni.requests.request import OmniOutput, OmniRequest
from omni.runtime import orchestrator
from omni.runtime.omni import Omni
from stages import AutoregressiveStage, StageRequest
from stages.stage import Prepared
from stages.worker import preparations as preparing
from stages.worker.preparations import Preparations, is_light
from tests.support.fake_stage import FakeStage
from tests.support.patience import wait_for

PATIENCE_S = 60.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


class Gate:
    """Holds up prompts with a certain word until it is opened."""

    def __init__(self, word: str = "slow") -> None:
        self._word = word
        self._open = threading.Event()
        self.reached = threading.Event()

    def pass_through(self, text: object) -> None:
        if self._word in str(text):
            self.reached.set()
            assert self._open.wait(PATIENCE_S), "nobody opened the gate"

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def omni(
    seeded: Callable[[str], str], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Omni]:
    """A writer whose tokenizer is held up by the gate."""
    config = EngineConfig(model=seeded("qwen2"), block_size=4, num_blocks=64, max_model_len=64)
    stage = AutoregressiveStage("writer", config, sampling=GREEDY)
    tokenizer = type(stage.engine.tokenizer)
    tokenize = tokenizer.__call__

    def held_up(self: Any, text: Any, *arguments: Any, **options: Any) -> Any:
        gate.pass_through(text)
        return tokenize(self, text, *arguments, **options)

    monkeypatch.setattr(tokenizer, "__call__", held_up)
    with Omni(Pipeline([stage])) as omni:
        yield omni
        gate.open()


def token_ids(output: OmniOutput) -> tuple[int, ...]:
    assert output.error is None
    return output.stages["writer"].token_ids


def ended(outputs: Iterator[OmniOutput]) -> OmniOutput:
    """Return the next last output."""
    return next(output for output in outputs if output.finished)


def test_a_request_finishes_while_another_is_tokenized(omni: Omni, gate: Gate) -> None:
    outputs = omni.stream([OmniRequest("slow", "s"), OmniRequest("fast", "f")])
    first = ended(outputs)
    assert first.request_id == "f" and gate.reached.is_set()
    gate.open()
    second = ended(outputs)
    assert second.request_id == "s" and list(outputs) == []
    alone = omni.generate(["slow", "fast"])
    assert [token_ids(second), token_ids(first)] == [token_ids(each) for each in alone]


def test_one_that_runs_goes_on_while_another_is_tokenized(omni: Omni, gate: Gate) -> None:
    long = OmniRequest("fast", "f", sampling={"writer": {"max_tokens": 40, "ignore_eos": True}})
    outputs = omni.stream(long)
    next(outputs)
    with ThreadPoolExecutor(1) as other:
        slow = other.submit(omni.generate, "slow")
        assert gate.reached.wait(PATIENCE_S)
        assert len(token_ids(ended(outputs))) == 40
        gate.open()
        assert token_ids(slow.result(PATIENCE_S)[0])


def test_an_abort_reaches_a_request_that_is_being_prepared(
    omni: Omni, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A driver that waited here would also delay commands of other callers.
    monkeypatch.setattr(orchestrator, "_WAIT_TIMEOUT_S", 3 * PATIENCE_S)
    with ThreadPoolExecutor(1) as other:
        slow = other.submit(omni.generate, OmniRequest("slow", "s"))
        assert gate.reached.wait(PATIENCE_S)
        omni.abort("s")
        (output,) = slow.result(PATIENCE_S)
        assert output.error == "aborted"
        # Its id is free again, and its old preparation is dropped.
        (again,) = omni.generate(OmniRequest("fast", "s"))
        gate.open()
        assert token_ids(again) == token_ids(omni.generate("fast")[0])
    with omni.paused() as pipeline:
        pipeline.stages["writer"].check_integrity()
        assert not pipeline.stages["writer"].has_unfinished_requests


def test_leaving_while_a_request_is_prepared_leaves_nothing_behind(omni: Omni, gate: Gate) -> None:
    outputs = omni.stream([OmniRequest("slow", "s"), OmniRequest("fast", "f")])
    ended(outputs)
    outputs.close()
    gate.open()
    assert token_ids(omni.generate(OmniRequest("fast", "s"))[0])
    with omni.paused() as pipeline:
        assert not pipeline.stages["writer"].has_unfinished_requests


def test_what_cannot_run_is_refused_alone(omni: Omni, gate: Gate) -> None:
    gate.open()
    bad: list[Any] = [
        TokensPrompt((10**9,)),
        "x" * 10**5,
        ChatPrompt(({"role": "user"},)),
        TokensPrompt(()),
    ]
    outputs = omni.generate([bad[0], "fast", *bad[1:], "slow"])
    reported = ["vocabulary", None, "characters", "lacks content", "is empty", None]
    for output, part in zip(outputs, reported, strict=True):
        assert output.finished and (output.error is None) is (part is None)
        if part is not None:
            assert part in str(output.error) and "stage 'writer'" in str(output.error)
            assert output.stages == {} and output.refused


def test_a_duplicate_id_is_refused_while_the_first_is_prepared(omni: Omni, gate: Gate) -> None:
    outputs = omni.stream([OmniRequest("slow", "s"), OmniRequest("fast", "s")])
    assert "belongs to a request that is still running" in str(ended(outputs).error)
    gate.open()
    assert token_ids(ended(outputs))


def test_closing_ends_what_is_being_prepared(omni: Omni, gate: Gate) -> None:
    with ThreadPoolExecutor(2) as others:
        slow = others.submit(omni.generate, "slow")
        assert gate.reached.wait(PATIENCE_S)
        closing = others.submit(omni.close)
        assert "closed before it finished" in str(slow.result(PATIENCE_S)[0].error)
        gate.open()
        closing.result(PATIENCE_S)


def test_a_pipeline_is_not_lent_out_while_a_request_is_prepared(omni: Omni, gate: Gate) -> None:
    with ThreadPoolExecutor(1) as other:
        slow = other.submit(omni.generate, "slow")
        assert gate.reached.wait(PATIENCE_S)
        with pytest.raises(RuntimeError, match="1 requests are running"), omni.paused():
            pass
        gate.open()
        slow.result(PATIENCE_S)
    with omni.paused():
        pass


class InTurn(AutoregressiveStage):
    """Prepares requests one after another, in its own order."""

    turns: Sequence[str]

    def prepare(self, request: StageRequest) -> Prepared:
        wait_for(lambda: self.turns[:1] == request.request_id)
        prepared = super().prepare(request)
        self.turns = self.turns[1:]
        return prepared


def test_seeds_follow_the_order_of_requests_and_not_of_their_preparation(
    seeded: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "_NUM_THREADS", 3)  # all are prepared at once
    config = EngineConfig(model=seeded("qwen2"), block_size=4, num_blocks=64, max_model_len=64)
    drawn = SamplingParams(temperature=1.0, max_tokens=12, n=2)
    results = []
    for turns in ("abc", "cba"):
        stage = InTurn("writer", config, sampling=drawn)
        stage.turns = turns
        with Omni(Pipeline([stage])) as omni:
            outputs = omni.generate([OmniRequest("Hello", name) for name in "abc"])
        stages = [each.stages["writer"] for each in outputs]
        results.append([[each.token_ids for each in stage.completions] for stage in stages])
    assert results[0] == results[1]
    assert len({str(each) for each in results[0]}) == 3, "three different draws"


def test_the_queue_goes_by_the_order_of_requests(seeded: Callable[[str], str]) -> None:
    config = EngineConfig(
        model=seeded("qwen2"), block_size=4, num_blocks=64, max_model_len=64, max_num_seqs=1
    )
    engine = AutoregressiveStage("writer", config).engine
    for order, name in reversed(list(enumerate("ab"))):
        engine.add(engine.prepare(name, "Hello", GREEDY, order=order))
    ends = []
    while engine.has_unfinished_requests:
        ends += [output.request_id for output in engine.step() if output.finished]
    assert ends == ["a", "b"]
    engine.close()


class SlowStage(FakeStage):
    """Prepares a prompt in parallel to its steps, and is held up by a gate."""

    gate: Gate

    def prepare(self, request: StageRequest) -> Prepared:
        self.gate.pass_through(request.request_id)
        return super().prepare(request)


@pytest.mark.parametrize("large", [False, True])
def test_a_large_prompt_is_prepared_aside_behind_another_stage_as_well(
    large: bool, gate: Gate
) -> None:
    reader = SlowStage("reader", ("writer",))
    reader.gate = gate
    text = "x" * 2**16 if large else "x"
    requests = [OmniRequest("fast", "fast")]
    if large:
        requests.insert(0, OmniRequest(text, "slow"))
    with Omni(Pipeline([FakeStage("writer", steps=1), reader])) as omni:
        outputs = omni.stream(requests)
        first = ended(outputs)
        assert first.request_id == "fast" and first.stages["reader"].text == "reader(writer(fast))"
        gate.open()
        if large:
            second = ended(outputs)
            assert second.stages["reader"].text == f"reader(writer({text}))"
    assert not reader.held


def test_a_request_refused_by_a_later_stage_keeps_earlier_outputs(gate: Gate) -> None:
    gate.open()
    reader = SlowStage("reader", ("writer",), refuse={"bad"})
    reader.gate = gate
    text = "x" * 2**16
    with Omni(Pipeline([FakeStage("writer", steps=1), reader])) as omni:
        bad, good = omni.generate([OmniRequest(text, "bad"), OmniRequest(text, "good")])
    assert good.error is None
    assert bad.error == "stage 'reader': refused" and bad.refused
    assert bad.stages["writer"].text == f"writer({text})"


def test_a_preparation_that_ends_its_thread_ends_its_request_alone() -> None:
    class Leaving(FakeStage):
        def prepare(self, request: StageRequest) -> Prepared:
            if request.request_id == "bad":
                raise SystemExit("enough")
            return super().prepare(request)

    with Omni(Pipeline([Leaving("s")])) as omni:
        bad, good = omni.generate([OmniRequest("x", "bad"), OmniRequest("x", "good")])
    assert good.error is None
    assert "its preparation was ended by SystemExit: enough" in str(bad.error)


def submit(
    preparations: Preparations[str, Any],
    owner: str,
    work: Callable[[], Any] = lambda: None,
    light: bool = True,
) -> None:
    preparations.submit(owner, work, light=light)


def taken(preparations: Preparations[str, Any], *, is_idle: bool = False) -> list[str]:
    """Return the owners of the next ready ones."""
    wait_for(lambda: preparations.has_ready(is_idle=is_idle))
    return [owner for owner, _ in preparations.take()]


def test_what_is_light_begins_together_where_nothing_runs() -> None:
    preparations: Preparations[str, Any] = Preparations(max_wait_s=PATIENCE_S)
    go: Future[None] = Future()
    submit(preparations, "a", go.result)
    submit(preparations, "b")
    submit(preparations, "heavy", go.result, light=False)
    wait_for(lambda: preparations.has_ready(is_idle=False))
    assert not preparations.has_ready(is_idle=True), "b waits for a"
    go.set_result(None)
    assert taken(preparations, is_idle=True)[:2] == ["a", "b"], "in the order of submission"
    preparations.close()


def test_no_light_one_waits_where_something_runs_nor_for_what_was_dropped() -> None:
    preparations: Preparations[str, Any] = Preparations(max_wait_s=PATIENCE_S)
    go: Future[None] = Future()
    submit(preparations, "a", go.result)
    submit(preparations, "b")
    assert taken(preparations) == ["b"]
    submit(preparations, "c")
    preparations.drop("a")
    assert taken(preparations, is_idle=True) == ["c"]
    go.set_result(None)
    preparations.close()
    assert preparations.take() == [], "what was dropped is not taken"


def test_what_is_light_is_not_waited_for_beyond_patience() -> None:
    woken = threading.Event()
    preparations: Preparations[str, Any] = Preparations(woken.set, max_wait_s=0.01)
    go: Future[None] = Future()
    submit(preparations, "a", go.result)
    submit(preparations, "b")
    wait_for(lambda: preparations.has_ready(is_idle=False))
    woken.clear()
    if not preparations.has_ready(is_idle=True):
        assert woken.wait(PATIENCE_S), "who sleeps until something is ready hears of it"
    assert taken(preparations, is_idle=True) == ["b"]
    go.set_result(None)
    preparations.close()


def test_what_is_light_overtakes_what_is_not() -> None:
    preparations: Preparations[str, Any] = Preparations()
    go: Future[None] = Future()
    for number in range(20):
        submit(preparations, f"heavy {number}", go.result, light=False)
    submit(preparations, "light")
    assert taken(preparations) == ["light"]
    go.set_result(None)
    left = 20
    while left:
        left -= len(taken(preparations))
    preparations.close()


def test_what_is_light_is_known_without_reading_it() -> None:
    light = ["x", TextPrompt("x"), TokensPrompt((1,) * 1000), EmbedsPrompt(torch.zeros(2, 8))]
    heavy = [
        "x" * 10**6,
        TextPrompt("x" * 10**6),
        TextPrompt("x", multi_modal_data={"image": ["a.png"]}),
        TokensPrompt((1,), multi_modal_data={"audio": ["a.wav"]}),
        EmbedsPrompt(torch.zeros(1, 64).expand(10**6, 64)),
        ChatPrompt(({"role": "user", "content": "x"},)),
        TextPrompt(3),  # type: ignore[arg-type]
        None,
    ]
    assert all(map(is_light, light))
    assert not any(map(is_light, heavy))
    assert is_light(EmbedsPrompt(None)), "what is no tensor is refused at once"  # type: ignore[arg-type]

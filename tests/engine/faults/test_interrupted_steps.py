"""An engine continues correctly after an exception at any line of a step.

Whatever interrupts a step (a lack of memory, a signal), the requests start over, and only those
whose tokens were being processed fail. Every run here interrupts one step at one line, or between
two bytecodes, continues, and repeats all requests: every answer must equal that of the request
alone, uncached. ``torture/interrupted_steps.py`` does so at every line.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from engine import Engine, EngineConfig, LLMEngine, SamplingParams, TokensPrompt
from engine.interface.engine import EngineBrokenError
from engine.interface.outputs import FinishReason
from engine.requests.request import RequestGroup
from tests.support.disturbed_run import Subject, disturbed_run, events_of_steps, warmed_up
from tests.support.idle_engine import finish
from tests.support.line_faults import LineFault, choose_events
from tests.support.patience import PATIENCE_S
from tests.support.subjects import SUBJECTS, subject_of

FAULTS = 6
# Its run takes as long as ten of the others.
FAULTS_OF_VOCODER = 2
SOUND = {"went on", "failed alone"}


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(request: pytest.FixtureRequest, seeded: Callable[[str], str]) -> Subject:
    return subject_of(request.param, seeded)


@pytest.mark.parametrize(
    ("error", "bytecodes"),
    [(MemoryError, False), (KeyboardInterrupt, True)],
    ids=["a lack of memory at a line", "a signal between bytecodes"],
)
def test_a_step_interrupted_anywhere_gives_no_wrong_answer(
    subject: Subject, error: type[BaseException], bytecodes: bool
) -> None:
    draw = random.Random(error.__name__)
    places = choose_events(events_of_steps(subject, bytecodes=bytecodes), 1, draw)
    engine = warmed_up(subject)
    kinds = set()
    num_faults = FAULTS_OF_VOCODER if "vocoder" in subject.name else FAULTS
    for number, (step, nth) in enumerate(sorted(draw.sample(places, num_faults))):
        if "swapping" in subject.name:  # after a failure, an engine stops swapping
            engine = warmed_up(subject)
        engine.reset_prefix_cache()
        fault = LineFault(nth, error, bytecodes=bytecodes)
        aborted = number % subject.num_asks if number % 3 == 0 else None
        outcome = disturbed_run(engine, subject, step, fault, aborted)
        assert outcome.place is not None, "the line was not reached"
        assert outcome.kind in SOUND, outcome
        kinds.add(outcome.kind)
    assert "went on" in kinds


@pytest.mark.parametrize("subject", ["qwen2"], indirect=True)
def test_an_engine_interrupted_during_recovery_is_broken(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = subject.build()
    engine.add_request("r", TokensPrompt((30, 31, 32)))

    def fail() -> None:
        raise MemoryError("again")

    monkeypatch.setattr(engine._runner, "clear", fail)
    with pytest.raises(MemoryError, match="again"), LineFault(40, KeyboardInterrupt):
        engine.step()
    monkeypatch.undo()
    calls: list[Callable[[], object]] = [engine.step, lambda: engine.abort("r")]
    for call in calls:
        with pytest.raises(EngineBrokenError, match="KeyboardInterrupt.*build a new one"):
            call()


@pytest.mark.parametrize("subject", ["qwen2"], indirect=True)
def test_a_request_interrupted_while_it_ends_is_answered(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interruption comes after its completion has ended, but not the request."""
    engine: Any = subject.build()
    engine.add_request("r", TokensPrompt((30, 31, 32)), SamplingParams(max_tokens=1))

    def interrupted(group: RequestGroup, *_: object) -> None:
        group.completions[0].finish_reason = FinishReason.LENGTH
        raise KeyboardInterrupt

    monkeypatch.setattr(RequestGroup, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.undo()
    (output,) = engine.step()
    assert output.finished and "interrupted" in output.error
    assert not engine.has_unfinished_requests


@pytest.mark.parametrize("subject", ["qwen2"], indirect=True)
def test_a_call_interrupted_at_its_begin_or_end_releases_the_engine(subject: Subject) -> None:
    engine: Any = subject.build()
    num_doors = 0
    while True:
        engine.add_request("r", TokensPrompt((30, 31, 32)))
        fault = LineFault(
            num_doors, KeyboardInterrupt, bytecodes=True, folders=["engine/interface"]
        )
        with suppress(KeyboardInterrupt), fault:
            engine.step()
        if fault.place is None:
            break
        num_doors += 1
        other = threading.Thread(target=engine.abort, args=("r",), daemon=True)
        other.start()
        other.join(timeout=PATIENCE_S)
        assert not engine.live_request_ids, fault.place
    assert num_doors > 50


@pytest.mark.parametrize("subject", ["qwen2", "bert"], indirect=True)
def test_wrong_outcomes_are_detected(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost output, an endless run and a failed integrity check are detected."""
    engine: Any = subject.build()
    step = engine.step

    def forgetful() -> list[Any]:
        return [output for output in step() if not output.request_id.endswith("1")]

    monkeypatch.setattr(engine, "step", forgetful)
    assert disturbed_run(engine, subject, -1, LineFault(-1)).kind == "wrong"
    monkeypatch.setattr(engine, "step", list)
    assert disturbed_run(engine, subject, -1, LineFault(-1)).kind == "hangs"
    monkeypatch.undo()
    broken: Engine[Any] = subject.build()

    def abort_in_vain() -> None:
        raise AssertionError("lost")

    monkeypatch.setattr(broken, "check_integrity", abort_in_vain)
    assert disturbed_run(broken, subject, -1, LineFault(-1)).kind == "wrong"


PROMPT = TokensPrompt(tuple(range(20, 61)))
PARAMS = SamplingParams(temperature=0.0, max_tokens=3)


@pytest.fixture
def engine(seeded: Callable[[str], str]) -> LLMEngine:
    return LLMEngine(EngineConfig(model=seeded("qwen2"), block_size=8, num_blocks=14))


def test_a_reset_interrupted_at_any_line_leaves_the_engine_sound(engine: LLMEngine) -> None:
    (expected,) = engine.generate([PROMPT], PARAMS)
    line = 0
    while True:
        fault = LineFault(line, KeyboardInterrupt)
        with suppress(KeyboardInterrupt), fault:
            engine.reset_prefix_cache()
        engine.check_integrity()
        (output,) = engine.generate([PROMPT], PARAMS)
        assert output.error is None, fault.place
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids, fault.place
        if fault.place is None:
            break
        line += 1
    assert line > 20 and not engine.is_broken


def test_an_exception_without_a_text_is_handled_like_any_other(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SpeechlessError(KeyboardInterrupt):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def interrupted() -> None:
        raise SpeechlessError

    with monkeypatch.context() as patched:
        patched.setattr(engine._runner, "execute", lambda _: interrupted())
        engine.add_request("r", PROMPT, PARAMS)
        with pytest.raises(SpeechlessError):
            engine.step()
    assert not engine.is_broken and not engine.ownership.is_inside
    assert finish(engine)["r"].error is None

"""The three engines keep one contract; each has one owner and one driver until it is closed."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from engine import Engine, EngineConfig, LLMEngine, Prompt, SamplingParams
from engine.interface.ownership import Ownership
from stages import AutoregressiveStage
from tests.support.idle_engine import drop_all
from tests.support.patience import PATIENCE_S
from tests.support.three_engines import KINDS, LIMITS, TOKENS, build_engine

Case = tuple[Engine[Any], Prompt]


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, seeded: Callable[[str], str]) -> Case:
    return build_engine(request.param, seeded)


def test_an_id_is_live_from_adding_to_the_finished_output(case: Case) -> None:
    engine, prompt = case
    before = engine.stats()
    assert not engine.step() and not engine.live_request_ids
    engine.add_request("a", prompt)
    engine.add_request("b", prompt, priority=1, cache_salt="salt")
    with pytest.raises(ValueError, match="'a' is already in use by a live request"):
        engine.add_request("a", prompt)
    assert engine.live_request_ids == ("a", "b") and not engine.needs_input("a")
    finished: list[str] = []
    while engine.has_unfinished_requests:
        finished += [output.request_id for output in engine.step() if output.finished]
        engine.check_integrity()
        assert not set(finished) & set(engine.live_request_ids)
    assert sorted(finished) == ["a", "b"]
    work = engine.stats().since(before)
    assert work.num_steps > 0 and work.busy_s > 0 and work.prompt_tokens > 0


def test_calls_about_requests_that_are_not_live_do_nothing(case: Case) -> None:
    engine, prompt = case
    engine.add_request("a", prompt)
    engine.abort("a")
    engine.abort("a")
    assert not engine.step() and not engine.needs_input("a")
    if engine.takes_chunks:
        engine.extend_request("a", prompt)
    engine.add_request("b", prompt)
    drop_all(engine)
    assert not engine.has_unfinished_requests
    engine.check_integrity()


def test_an_engine_without_tokens_takes_no_sampling(case: Case) -> None:
    engine, prompt = case
    if isinstance(engine, LLMEngine):
        engine.check_sampling(SamplingParams())
        return
    with pytest.raises(ValueError, match="takes no sampling parameters"):
        engine.add_request("a", prompt, SamplingParams())
    assert not engine.has_unfinished_requests


def test_the_cache_can_be_switched_and_reset(case: Case) -> None:
    engine, _ = case
    assert engine.enable_prefix_caching
    engine.enable_prefix_caching = False
    assert not engine.enable_prefix_caching
    engine.enable_prefix_caching = True
    engine.reset_prefix_cache()
    assert engine.dtype == torch.float32
    assert {"dtype", "device", "memory"} <= engine.describe().keys()


def test_a_request_is_prepared_in_another_thread_while_the_engine_steps(case: Case) -> None:
    engine, prompt = case
    engine.reset_prefix_cache()
    engine.add_request("b", prompt)
    with ThreadPoolExecutor(1) as other:
        prepared = other.submit(engine.prepare, "a", prompt)
        outputs = [*engine.step()]
        assert "a" not in engine.live_request_ids
        engine.add(prepared.result())
    assert "a" in engine.live_request_ids
    while engine.has_unfinished_requests:
        outputs += engine.step()
    assert {output.request_id for output in outputs if output.finished} == {"a", "b"}
    engine.check_integrity()


def test_a_prepared_request_does_not_reserve_its_id(case: Case) -> None:
    engine, prompt = case
    engine.prepare("a", prompt)
    assert not engine.live_request_ids and not engine.step()
    prepared = engine.prepare("a", prompt)
    engine.add_request("a", prompt)
    with pytest.raises(ValueError, match="'a' is already in use by a live request"):
        engine.add(prepared)
    assert engine.live_request_ids == ("a",)
    engine.abort("a")
    engine.check_integrity()


GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


class Owner:
    """An arbitrary owner."""


@pytest.fixture
def engine(seeded: Callable[[str], str]) -> LLMEngine:
    return LLMEngine(EngineConfig(model=seeded("qwen2"), **LIMITS))


def test_a_dropped_owner_owns_nothing() -> None:
    owned, owner = Ownership("this thing"), Owner()
    owned.claim(owner, "the first")
    del owner
    gc.collect()
    assert owned.owner_name is None
    owned.claim(Owner(), "the second")


def test_one_of_many_threads_claims_and_one_enters() -> None:
    owned, owners, start = Ownership("it"), [Owner() for _ in range(8)], threading.Barrier(8)

    def claim(owner: Owner) -> tuple[bool, bool]:
        start.wait(PATIENCE_S)
        try:
            owned.claim(owner, "one")
            claimed = True
        except RuntimeError:
            claimed = False
        try:
            entered = owned.enter()
        except RuntimeError:
            entered = False
        start.wait(PATIENCE_S)
        return claimed, entered

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(claim, owners))
    assert [sum(column) for column in zip(*results, strict=True)] == [1, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_engine_drops_its_requests_and_refuses_others(
    kind: str, seeded: Callable[[str], str]
) -> None:
    engine, prompt = build_engine(kind, seeded)
    engine.add_request("a", prompt)
    engine.close()
    engine.close()
    assert not engine.has_unfinished_requests
    engine.check_integrity()
    calls: list[Callable[[], object]] = [lambda: engine.add_request("b", prompt), engine.step]
    if isinstance(engine, LLMEngine):
        llm = engine
        calls += [lambda: llm.generate(prompt), lambda: list(llm.stream(prompt))]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"this \w+Engine is closed: build a new one"):
            call()
    engine.abort("a")


@dataclass
class Held:
    """A step that waits inside the model."""

    inside: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def held(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    plain, held = engine._runner.execute, Held()

    def execute(output: Any) -> Any:
        held.inside.set()
        assert held.go_on.wait(PATIENCE_S)
        return plain(output)

    monkeypatch.setattr(engine._runner, "execute", execute)
    yield held
    held.go_on.set()


def test_a_second_thread_is_refused_without_effect_on_the_first(
    engine: LLMEngine, held: Held
) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(engine.generate, TOKENS, GREEDY)
        assert held.inside.wait(PATIENCE_S)
        for call in (lambda: engine.add_request("b", TOKENS, GREEDY), engine.step):
            with pytest.raises(RuntimeError, match="in use by another thread: one thread drives"):
                call()
        with pytest.raises(ValueError, match="drives the engine alone, but 1 requests are live"):
            engine.generate(TOKENS, GREEDY)
        held.go_on.set()
        (output,) = first.result(PATIENCE_S)
    assert output.error is None
    (again,) = engine.generate(TOKENS, GREEDY)
    assert again.outputs[0].token_ids == output.outputs[0].token_ids
    engine.check_integrity()


def test_an_abort_from_another_thread_waits_for_the_step(engine: LLMEngine, held: Held) -> None:
    """A dropped stream, for example, aborts in the thread that collects it."""
    engine.add_request("a", TOKENS, GREEDY)
    with ThreadPoolExecutor(2) as pool:
        stepping = pool.submit(engine.step)
        assert held.inside.wait(PATIENCE_S)
        aborting = pool.submit(engine.abort, "a")
        held.go_on.set()
        stepping.result(PATIENCE_S)
        aborting.result(PATIENCE_S)
    assert not engine.has_unfinished_requests
    engine.check_integrity()


def test_an_engine_of_a_stage_cannot_be_shared_or_driven(engine: LLMEngine) -> None:
    stage = AutoregressiveStage("a", engine)
    with pytest.raises(RuntimeError, match="this LLMEngine belongs to stage 'a' already"):
        AutoregressiveStage("b", engine)
    with pytest.raises(RuntimeError, match="generate drives .* alone, but it belongs to stage 'a'"):
        engine.generate(TOKENS)
    stage.close()
    assert engine.generate(TOKENS, GREEDY)[0].error is None, "its builder owns it again"
    other = AutoregressiveStage("b", engine)
    del other
    gc.collect()
    AutoregressiveStage("c", engine)


def test_an_engine_is_refused_in_a_forked_process(monkeypatch: pytest.MonkeyPatch) -> None:
    owned, pid = Ownership("this thing"), os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    assert owned.is_over
    with pytest.raises(RuntimeError, match=f"built in process {pid} .* fork {pid + 1}.*'spawn'"):
        owned.check()

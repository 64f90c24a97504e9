"""The three engines keep one contract."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from engine import (
    Engine,
    LLMEngine,
    Prompt,
    SamplingParams,
)
from tests.support.idle_engine import drop_all
from tests.support.three_engines import KINDS, build_engine


@pytest.fixture(scope="module", params=KINDS)
def case(
    request: pytest.FixtureRequest, seeded: Callable[[str], str]
) -> tuple[Engine[Any], Prompt]:
    return build_engine(request.param, seeded)


def test_an_id_is_live_from_adding_to_the_finished_output(case: tuple[Engine[Any], Prompt]) -> None:
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


def test_calls_about_requests_that_are_not_live_do_nothing(
    case: tuple[Engine[Any], Prompt],
) -> None:
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


def test_an_engine_without_tokens_takes_no_sampling(case: tuple[Engine[Any], Prompt]) -> None:
    engine, prompt = case
    if isinstance(engine, LLMEngine):
        engine.check_sampling(SamplingParams())
        return
    with pytest.raises(ValueError, match="takes no sampling parameters"):
        engine.add_request("a", prompt, SamplingParams())
    assert not engine.has_unfinished_requests


def test_the_cache_can_be_switched_and_forgotten(case: tuple[Engine[Any], Prompt]) -> None:
    engine, _ = case
    assert engine.enable_prefix_caching
    engine.enable_prefix_caching = False
    assert not engine.enable_prefix_caching
    engine.enable_prefix_caching = True
    engine.reset_prefix_cache()
    assert engine.dtype == torch.float32
    assert {"dtype", "device", "memory"} <= engine.describe().keys()


def test_a_request_is_prepared_in_another_thread_while_the_engine_steps(
    case: tuple[Engine[Any], Prompt],
) -> None:
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


def test_one_that_is_never_added_leaves_nothing_and_an_id_is_taken_once(
    case: tuple[Engine[Any], Prompt],
) -> None:
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

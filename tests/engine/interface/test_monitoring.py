"""Addition and subtraction of counters; fields of log records."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace

import pytest

from engine import EngineStats
from engine.interface import log_fields as module
from engine.interface.log_fields import LogFields, log_fields, package_logger, set_process_fields
from omni.pipelines.pipeline import Pipeline
from omni.requests.request import OmniRequest
from prefix_cache import GroupStats, KVCacheStats, OffloadStats
from stages import StageStats
from tests.support.fake_stage import FakeStage
from tests.support.speech_pipeline import drain
from tests.support.whole_orchestrator import WholeOrchestrator

POOL = KVCacheStats(8, 7, 0, 0, evictions=2, hit_tokens=3, queried_tokens=4)


def test_since_returns_the_difference_of_two_readings() -> None:
    before = EngineStats(num_steps=2, prompt_tokens=5, kv=KVCacheStats(8, 6, 1, 0, 0, 0, 0))
    after = before.plus(num_steps=1, busy_s=0.5, generated_tokens=4)
    assert (after.num_steps, after.prompt_tokens, after.kv) == (3, 5, before.kv)
    later = EngineStats(num_steps=3, busy_s=0.5, prompt_tokens=9, num_preemptions=1, kv=POOL)
    assert later.since(before) == EngineStats(
        num_steps=1, busy_s=0.5, prompt_tokens=4, num_preemptions=1, kv=POOL
    )


def test_stats_are_immutable_and_shared_with_stages() -> None:
    with pytest.raises(FrozenInstanceError):
        EngineStats().num_steps = 1  # type: ignore[misc]
    assert StageStats is EngineStats


def test_stats_of_parallel_engines_are_added() -> None:
    group = GroupStats("full attention", 1, 2, block_bytes=64, evictions=3, misses=4)
    misses = {"unseen": 1, "group": 2}
    pool = replace(POOL, nbytes=512, output_bytes=3, groups=(group,), misses=misses)
    tiers = OffloadStats(1, 2, 3, 4, 5, 6, 7, 8)
    one = EngineStats(num_steps=2, num_running=3, num_restarts=1, kv=pool)
    both = one.beside(EngineStats(num_steps=1, num_waiting=4, kv=pool, offload=tiers))
    assert both == EngineStats(
        num_steps=3,
        num_running=3,
        num_waiting=4,
        num_restarts=1,
        kv=KVCacheStats(
            *(16, 14, 0, 0, 4, 6, 8, 1024, 6),
            (replace(group, held=2, cached=4, evictions=6, misses=8),),
            {"unseen": 2, "group": 4},
        ),
        offload=tiers,
    )
    assert tiers.beside(tiers) == OffloadStats(2, 4, 6, 8, 10, 12, 14, 8)


def test_a_following_reading_adds_counters_and_replaces_gauges() -> None:
    before = EngineStats(num_steps=2, num_running=3, kv=POOL)
    after = EngineStats(num_steps=1, num_waiting=1)
    assert after.following(before) == EngineStats(num_steps=3, num_waiting=1)


@pytest.fixture(autouse=True)
def no_process_fields() -> Iterator[None]:
    yield
    set_process_fields(LogFields())


def fields_of(record: logging.LogRecord) -> tuple[object, ...]:
    return tuple(getattr(record, name) for name in LogFields.__slots__)


def test_a_record_has_the_fields_of_its_context(caplog: pytest.LogCaptureFixture) -> None:
    logger = package_logger("stages.anywhere")
    assert logger.name == "omni.stages.anywhere"
    assert package_logger("omni.runtime.x").name == "omni.runtime.x"
    with caplog.at_level("INFO", "omni"):
        logger.info("outside")
        with log_fields("talker"):
            logger.info("of a stage")
            with log_fields("talker", "r"):
                logger.info("of a request")
            logger.info("given", extra={"request_id": "other"})
        logger.info("outside again")
    assert [fields_of(record) for record in caplog.records] == [
        (None, None, None),
        ("talker", None, None),
        ("talker", None, "r"),
        ("talker", None, "other"),
        (None, None, None),
    ]


def test_process_fields_apply_to_all_threads(caplog: pytest.LogCaptureFixture) -> None:
    logger = package_logger("stages.anywhere")
    set_process_fields(LogFields(stage="talker", replica=2))
    with caplog.at_level("INFO", "omni"):
        thread = threading.Thread(target=logger.info, args=("from a thread",))
        thread.start()
        thread.join()
        with log_fields("talker", "r"):
            logger.info("of a request")
    assert [fields_of(record) for record in caplog.records] == [
        ("talker", 2, None),
        ("talker", 2, "r"),
    ]


def test_fields_of_one_thread_do_not_apply_to_another(caplog: pytest.LogCaptureFixture) -> None:
    logger = package_logger("stages.anywhere")
    inside, logged = threading.Event(), threading.Event()

    def other() -> None:
        with log_fields("writer", "x"):
            inside.set()
            logged.wait()

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait()
    with caplog.at_level("INFO", "omni"):
        logger.info("here")
    logged.set()
    thread.join()
    assert fields_of(caplog.records[0]) == (None, None, None)


def test_a_logger_requested_again_has_one_filter() -> None:
    for _ in range(3):
        logger = package_logger("stages.anywhere")
    assert logger.filters.count(module._FILTER) == 1


def test_logs_of_a_failing_stage_name_the_stage_and_the_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(context: object) -> str:
        raise ArithmeticError("boom")

    stages = [FakeStage("a", explode=("x",)), FakeStage("b", ("a",), transform=broken)]
    orchestrator = WholeOrchestrator(Pipeline(stages))
    with caplog.at_level("INFO", "omni"):
        for request_id in ("y", "x"):
            orchestrator.add_request(OmniRequest("hi", request_id))
            drain(orchestrator)
    fields = {fields_of(record) for record in caplog.records}
    assert fields == {("b", None, "y"), ("a", None, None)}

"""Log records say which stage, which of its workers and which request they are about."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from engine.interface import log_fields as module
from engine.interface.log_fields import LogFields, log_fields, package_logger, set_process_fields
from omni.pipelines.pipeline import Pipeline
from omni.requests.request import OmniRequest
from tests.support.fake_stage import FakeStage
from tests.support.speech_pipeline import drain
from tests.support.whole_orchestrator import WholeOrchestrator


@pytest.fixture(autouse=True)
def no_process_fields() -> Iterator[None]:
    yield
    set_process_fields(LogFields())


def about(record: logging.LogRecord) -> tuple[object, ...]:
    return tuple(getattr(record, name) for name in LogFields.__slots__)


def test_a_record_carries_what_it_is_about(caplog: pytest.LogCaptureFixture) -> None:
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
    assert [about(record) for record in caplog.records] == [
        (None, None, None),
        ("talker", None, None),
        ("talker", None, "r"),
        ("talker", None, "other"),
        (None, None, None),
    ]


def test_a_worker_says_so_in_all_of_its_threads(caplog: pytest.LogCaptureFixture) -> None:
    logger = package_logger("stages.anywhere")
    set_process_fields(LogFields(stage="talker", replica=2))
    with caplog.at_level("INFO", "omni"):
        thread = threading.Thread(target=logger.info, args=("from a thread",))
        thread.start()
        thread.join()
        with log_fields("talker", "r"):
            logger.info("of a request")
    assert [about(record) for record in caplog.records] == [("talker", 2, None), ("talker", 2, "r")]


def test_one_thread_does_not_speak_for_another(caplog: pytest.LogCaptureFixture) -> None:
    logger = package_logger("stages.anywhere")
    inside, told = threading.Event(), threading.Event()

    def other() -> None:
        with log_fields("writer", "x"):
            inside.set()
            told.wait()

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait()
    with caplog.at_level("INFO", "omni"):
        logger.info("here")
    told.set()
    thread.join()
    assert about(caplog.records[0]) == (None, None, None)


def test_a_logger_has_one_filter_however_often_it_is_asked_for() -> None:
    for _ in range(3):
        logger = package_logger("stages.anywhere")
    assert logger.filters.count(module._FILTER) == 1


def test_what_a_failing_stage_logs_names_it_and_the_request(
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
    abouts = {about(record) for record in caplog.records}
    assert abouts == {("b", None, "y"), ("a", None, None)}

"""Log records of a worker appear in the pipeline's process with stage, replica and request."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from engine.interface.log_fields import LogFields, log_fields, package_logger, set_process_fields
from omni.commands.command import shown_log
from stages.remote.worker_log import LogForwarder, Logged, forward_log, relay


@pytest.fixture
def reported() -> Iterator[list[Logged]]:
    """Records forwarded from a logger below ``omni``, as in a worker."""
    logger = logging.getLogger("omni")
    before = (logger.level, logger.propagate)
    records: list[Logged] = []
    forwarder = forward_log(records.append, logging.INFO, LogFields("talker", 2))
    yield records
    logger.removeHandler(forwarder)
    logger.level, logger.propagate = before
    set_process_fields(LogFields())


def test_a_forwarded_record_is_shown_unchanged(
    reported: list[Logged], capsys: pytest.CaptureFixture[str]
) -> None:
    logger = package_logger("engine.anywhere")
    logger.debug("too little")
    logger.warning("100%% of %s", "it")
    with log_fields("talker", "r 7"):
        try:
            raise KeyError("k")
        except KeyError:
            logger.exception("it failed")
    assert [(each.logger, each.level, each.message) for each in reported] == [
        ("omni.engine.anywhere", logging.WARNING, "100% of it"),
        ("omni.engine.anywhere", logging.ERROR, "it failed"),
    ]
    logging.getLogger("omni").handlers.clear()
    with shown_log(1, tracebacks=False):
        for each in reported:
            relay(each)
    assert capsys.readouterr().err.splitlines() == [
        "warning: [talker/2] 100% of it",
        "error: [talker/2 r 7] it failed: KeyError: 'k'",
    ]
    with shown_log(0, tracebacks=True):
        relay(reported[1])
    shown = capsys.readouterr().err
    assert shown.startswith("error: it failed\nTraceback (most recent call last):\n")
    assert shown.endswith("KeyError: 'k'\n")


def test_only_records_at_the_level_are_shown_and_never_used_as_a_format(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with shown_log(0, tracebacks=False):
        relay(Logged("omni.engine", logging.INFO, "a detail"))
        relay(Logged("root", logging.WARNING, "under a name of ours"))
        relay(Logged("omni.x", logging.WARNING, "%s %d {0}"))
    assert capsys.readouterr().err == "warning: under a name of ours\nwarning: %s %d {0}\n"


def test_a_closed_receiver_does_not_break_logging() -> None:
    def gone(logged: Logged) -> None:
        raise ConnectionResetError("closed")

    logger = logging.getLogger("omni.gone")
    logger.addHandler(forwarder := LogForwarder(gone))
    try:
        logger.error("nobody hears it")
    finally:
        logger.removeHandler(forwarder)


def test_forwarding_that_logs_does_not_recurse() -> None:
    logger = logging.getLogger("omni.echo")
    heard: list[Logged] = []

    def tell(logged: Logged) -> None:
        heard.append(logged)
        logger.error("telling %s", logged.message)

    logger.addHandler(forwarder := LogForwarder(tell))
    try:
        logger.error("once")
    finally:
        logger.removeHandler(forwarder)
    assert [each.message for each in heard] == ["once"]


def test_long_messages_are_truncated(reported: list[Logged]) -> None:
    package_logger("engine.anywhere").warning("x" * 2**20)
    assert len(reported[0].message) == 2**16

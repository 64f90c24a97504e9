"""Log records are shown in the terminal as lines, through one logger."""

from __future__ import annotations

import ast
import logging
from pathlib import Path

import pytest

from omni.commands.command import shown_log
from tests.support.import_graph import LAYERS, ROOT, modules

FOREIGN = {"transformers.configuration_utils", "transformers.modeling_rope_utils", "ray"}
"""Loggers of other packages, which are silenced."""
MAKERS = (
    Path(ROOT, "omni/commands/command.py"),
    Path(ROOT, "engine/interface/log_fields.py"),
    Path(ROOT, "stages/remote/worker_log.py"),
)
"""Files that configure loggers of any name below ``omni``."""


def loggers_outside(source: str, package: str) -> list[str]:
    """Names of loggers that are not below ``omni``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("getLogger"):
            name = ast.unparse(node.args[0]) if node.args else ""
            below = ("f'omni.{__name__}'", *(("__name__",) if package == "omni" else ()))
            literal = name.strip("'")
            if name not in below and not literal.startswith("omni") and literal not in FOREIGN:
                found.append(name)
    return found


@pytest.mark.parametrize("package", LAYERS)
def test_everything_logs_below_one_logger(package: str) -> None:
    found = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in modules(package)
        if file not in MAKERS
        for name in loggers_outside(file.read_text("utf-8"), package)
    ]
    assert not found, found


def test_a_planted_logger_is_found() -> None:
    planted = "import logging\nlogging.getLogger(__name__)"
    assert loggers_outside(planted, "engine") == ["__name__"]
    assert loggers_outside(planted, "omni") == []


LEVELS = {-1: ["error"], 0: ["warning", "error"], 1: ["info", "warning", "error"]}


@pytest.mark.parametrize("verbosity", [-1, 0, 1, 2])
def test_more_is_logged_with_a_higher_verbosity(
    verbosity: int, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("omni.engine.anywhere")
    with shown_log(verbosity, tracebacks=False):
        for level in ("debug", "info", "warning", "error"):
            getattr(logger, level)("it is %s", level)
    expected = LEVELS.get(verbosity, ["debug", "info", "warning", "error"])
    assert capsys.readouterr().err.splitlines() == [f"{each}: it is {each}" for each in expected]
    logger.error("nobody listens any more")
    assert "nobody" not in capsys.readouterr().err


@pytest.mark.parametrize("tracebacks", [False, True])
def test_an_exception_is_one_line_unless_tracebacks_are_on(
    tracebacks: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with shown_log(0, tracebacks=tracebacks):
        try:
            raise KeyError("k")
        except KeyError:
            logging.getLogger("omni.x").exception("request %s failed", "r")
    reported = capsys.readouterr().err
    if tracebacks:
        assert reported.startswith("error: request r failed\nTraceback")
    else:
        assert reported == "error: request r failed: KeyError: 'k'\n"


def test_the_logger_is_restored() -> None:
    logger = logging.getLogger("omni")
    before = (logger.level, logger.propagate, list(logger.handlers))
    with shown_log(2, tracebacks=False):
        assert logger.level == logging.DEBUG
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({}, ""),
        ({"stage": "talker"}, "[talker] "),
        ({"stage": "talker", "replica": 1}, "[talker/1] "),
        ({"stage": "talker", "replica": 0, "request_id": "r 7"}, "[talker/0 r 7] "),
        ({"request_id": "r"}, "[r] "),
    ],
)
def test_with_v_a_line_names_its_stage_and_request(
    fields: dict[str, object], place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("omni.x")
    for verbosity, reported in ((1, place), (0, "")):
        with shown_log(verbosity, tracebacks=False):
            logger.warning("100%% of %s", "it", extra=fields)
            try:
                raise KeyError("k")
            except KeyError:
                logger.exception("failed", extra=fields)
        lines = capsys.readouterr().err.splitlines()
        assert lines == [
            f"warning: {reported}100% of it",
            f"error: {reported}failed: KeyError: 'k'",
        ]

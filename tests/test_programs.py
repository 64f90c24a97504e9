"""What ``make test`` leaves to ``make test-programs`` is a list that nobody makes longer unseen."""

from __future__ import annotations

import pytest

from tests.support.import_graph import ROOT
from tests.support.programs import FILES, leaves_out_programs, marks_programs

TESTS = ROOT / "tests"


def test_only_listed_files_mark_tests_and_each_of_them_does() -> None:
    marked = {
        file.relative_to(TESTS).as_posix()
        for file in TESTS.rglob("*.py")
        # By the rule that stands beside the list.
        if file != TESTS / "conftest.py" and marks_programs(file.read_text("utf-8"))
    }
    assert marked == FILES.keys()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("pytestmark = pytest.mark.programs", True),
        ("pytestmark = [pytest.mark.gpu, pytest.mark.programs]", True),
        ("@pytest.mark.programs\ndef test_it(): ...", True),
        ("from pytest import mark\n@mark.programs\ndef test_it(): ...", True),
        ("def test_programs(mark): programs = mark.others", False),
        ("text = 'pytest.mark.programs'", False),
    ],
)
def test_a_mark_is_seen_wherever_it_stands(source: str, expected: bool) -> None:
    assert marks_programs(source) is expected


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("not programs", True),
        ("not programs and not gpu", True),
        ("not gpu and not (slow or programs)", True),
        ("", False),
        ("programs", False),
        ("programs or gpu", False),
        ("gpu", False),
        ("not gpu", False),
    ],
)
def test_an_expression_leaves_programs_out_or_not(expression: str, expected: bool) -> None:
    assert leaves_out_programs(expression) is expected

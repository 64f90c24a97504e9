"""What ARCHITECTURE.md describes exists in the code."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support.import_graph import ROOT

PAGE = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
PLACES = sorted(set(re.findall(r"`(\w+/[\w/]+\.py):([\w.]+)`", PAGE)))
STOPS = re.findall(r"^\| (\d+) \| `([^`:]+):([^`]+)` \|", PAGE, re.M)
MOST_STOPS = 12


def defined(source: str, name: str) -> bool:
    """Return True if a dotted name is a class, method or function of a source file."""
    body = ast.parse(source).body
    for part in name.split("."):
        found = [
            node
            for node in body
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name == part
        ]
        if not found:
            return False
        body = found[0].body
    return True


def test_a_requests_walk_is_short_and_in_order():
    assert [int(number) for number, _, _ in STOPS] == list(range(1, len(STOPS) + 1))
    assert 8 <= len(STOPS) <= MOST_STOPS


def test_the_ways_to_other_processes_and_to_ray_are_told():
    assert {stop[1:] for stop in STOPS} < set(PLACES)
    rooms = {file.rpartition("/")[0] for file, _ in PLACES}
    assert {"stages/remote", "stages/cluster"} <= rooms


@pytest.mark.parametrize(("file", "name"), PLACES)
def test_a_place_that_is_named_exists(file: str, name: str):
    assert defined((ROOT / file).read_text("utf-8"), name), f"{file} defines no {name}"


def test_a_stop_that_is_gone_is_found():
    source = "class Scheduler:\n    def schedule(self): ...\n"
    assert defined(source, "Scheduler.schedule")
    assert not defined(source, "Scheduler.complete")
    assert not defined(source, "schedule")


def test_every_path_that_is_named_exists():
    named = set(re.findall(r"`((?:omni|stages|engine|prefix_cache|tests)/[\w/.]+)`", PAGE))
    assert len(named) > 8
    assert not [path for path in named if not (ROOT / path).exists()]

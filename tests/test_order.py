"""The order of tests omits none, and every name in it exists."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support.import_graph import ROOT
from tests.support.order import FIRST, first_things_first

NAMES = (
    *("a.py", "a.py", "b.py", "c.py", FIRST[4], FIRST[3], FIRST[3]),
    *("d.py", "e.py", "f.py", FIRST[0]),
)
LONG = {FIRST[0]: "X", FIRST[3]: "Y", FIRST[4]: "Z"}


def order(names: tuple[str, ...], num_workers: int) -> str:
    items = [SimpleNamespace(path=ROOT / "tests" / name, name=name) for name in names]
    found = first_things_first(items, num_workers)
    assert sorted(map(id, found)) == sorted(map(id, items))
    return "".join(LONG.get(item.name, item.name[0]) for item in found)


@pytest.mark.parametrize("name", FIRST)
def test_what_comes_first_is_there(name: str) -> None:
    assert (ROOT / "tests" / name).is_file()


@pytest.mark.parametrize(
    ("num_workers", "expected"),
    [(1, "XYYZaabcdef"), (2, "XZaab" + "YYcdef"), (3, "Xaa" + "YYbc" + "Zdef")],
)
def test_each_worker_begins_with_its_share_of_what_takes_longest(
    num_workers: int, expected: str
) -> None:
    assert order(NAMES, num_workers) == expected


def test_more_long_ones_than_a_share_lose_nothing() -> None:
    assert order((*FIRST[3:5], FIRST[0], "a.py"), 2) == "XZYa"
    assert order((), 3) == ""

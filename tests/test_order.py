"""The order in which tests are run leaves none out and knows all that it names."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.import_graph import ROOT
from tests.support.order import FIRST, first_things_first


@pytest.mark.parametrize("name", FIRST)
def test_what_comes_first_is_there(name: str) -> None:
    assert (ROOT / "tests" / name).is_file()


def test_what_takes_longest_comes_first_and_the_rest_stays_as_it_was() -> None:
    names = ("engine/a.py", FIRST[1], "omni/b.py", FIRST[0], "engine/c.py", FIRST[1])
    items = [SimpleNamespace(path=ROOT / "tests" / name, at=at) for at, name in enumerate(names)]
    assert [item.at for item in first_things_first(items)] == [3, 1, 5, 0, 2, 4]
    elsewhere = SimpleNamespace(path=Path("/somewhere") / FIRST[0], at=6)
    assert first_things_first([*items, elsewhere])[-1] is elsewhere

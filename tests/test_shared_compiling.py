"""Each worker of a run compiles its share of the tests, and leaves what is wrong to pytest."""

from __future__ import annotations

import importlib

import pytest

from tests.support.import_graph import ROOT
from tests.support.shared_compiling import compile_own_share


def test_the_shares_are_all_test_files_by_the_names_that_pytest_imports_them_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares: list[list[str]] = []

    def note(name: str) -> None:
        shares[-1].append(name)
        raise SyntaxError("of a file that is being written")

    monkeypatch.setattr(importlib, "import_module", note)
    for worker in range(3):
        shares.append([])
        compile_own_share(worker, 3)
    names = [name for share in shares for name in share]
    assert __name__ in names
    assert len(names) == len(set(names)) == len(list((ROOT / "tests").rglob("test_*.py")))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1

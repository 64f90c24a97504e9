"""Has a run's workers compile each test file once, and not each of them all."""

from __future__ import annotations

import importlib
from contextlib import suppress

import pytest

from tests.support.import_graph import ROOT

__all__ = ["compile_own_share"]


def compile_own_share(worker: int, num_workers: int) -> None:
    """Import a share of all test files.

    Workers collect the same files in the same order at the same time: in a fresh clone each of them
    would rewrite and compile all. Python and pytest keep what each of them compiles of its share,
    and the others find it when they come to it.

    Args:
        worker: its number, from 0.
        num_workers: of the run.
    """
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    for file in files[worker::num_workers]:
        # Whatever is wrong with it, pytest meets again when it collects it, and reports.
        with suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))

"""Tests that are tried wherever users run stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import USUAL, examples

__all__ = ["PLACES", "Anywhere", "everywhere"]

PLACES = ("inline", "processes", "ray")
"""Kinds of runtimes over which promises are tried."""

_EXAMPLES = {"inline": USUAL, "processes": 50, "ray": 10}
"""Examples of a property: a call takes microseconds inline, and milliseconds on Ray."""

_Test = TypeVar("_Test", bound=Callable[..., Any])


@dataclass(frozen=True)
class Anywhere:
    """Where the stages of a test's orchestrators run.

    Attributes:
        kind: one of :data:`PLACES`.
        end_workers: ends all workers that there are; those of later orchestrators start again.
    """

    kind: str
    end_workers: Callable[[], object] = lambda: None

    def try_property(self, property_: Callable[[st.DataObject], None]) -> None:
        """Try a property with examples of hypothesis, each of which has workers of its own."""

        @settings(max_examples=examples(_EXAMPLES[self.kind]))
        @given(st.data())
        def check(data: st.DataObject) -> None:
            self.end_workers()  # of the example before, with all of their threads and calls
            property_(data)

        check()


def everywhere(test: _Test) -> _Test:
    """Have a test's orchestrators run over all of them, by the fixture ``anywhere``."""
    parametrized = pytest.mark.parametrize("anywhere", PLACES, indirect=True)(test)
    return pytest.mark.usefixtures("anywhere")(parametrized)

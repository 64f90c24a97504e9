"""Tests that run over every kind of runtime that users can run stages on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni.pipelines.pipeline import Pipeline
from omni.pipelines.runtime_config import RuntimeConfig
from omni.runtime.omni import place_pipeline
from tests.support.examples import examples

PLACES = ("inline", "processes")
"""Kinds of runtimes over which promises are tested: without and with a transport."""

_EXAMPLES = {"inline": 100, "processes": 50, "ray": 10}
"""Examples of a property: a call takes microseconds inline, and milliseconds on Ray."""

_Test = TypeVar("_Test", bound=Callable[..., Any])


@dataclass(frozen=True)
class Anywhere:
    """The runtime of a test's stages."""

    kind: str
    end_workers: Callable[[], object] = lambda: None

    def try_property(self, property_: Callable[[st.DataObject], None]) -> None:
        """Test a property with hypothesis examples, each with its own workers."""

        @settings(max_examples=examples(_EXAMPLES[self.kind]))
        @given(st.data())
        def check(data: st.DataObject) -> None:
            self.end_workers()  # of the previous example, with all of their threads and calls
            property_(data)

        check()


def everywhere(test: _Test) -> _Test:
    """Run a test's orchestrators over :data:`PLACES`, by the fixture ``anywhere``."""
    return _over(test, PLACES)


def over_every_transport(test: _Test) -> _Test:
    """Run them over Ray as well: for promises that any transport must keep."""
    return _over(test, (*PLACES, "ray"))


def _over(test: _Test, kinds: Sequence[str]) -> _Test:
    parametrized = pytest.mark.parametrize("anywhere", kinds, indirect=True)(test)
    return pytest.mark.usefixtures("anywhere")(parametrized)


def place(pipeline: Pipeline, kind: str) -> Pipeline:
    """Make a pipeline's stages run on a kind of runtime; failures are not retried."""
    return place_pipeline(pipeline, RuntimeConfig.model_validate({"kind": kind, "max_retries": 0}))

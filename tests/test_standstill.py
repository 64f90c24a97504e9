"""A test that stands still shows where, although nobody asks for that before each test."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.support import standstill
from tests.support.import_graph import ROOT
from tests.support.standstill import StandstillWatch

# In a process of its own: there is one such printing in a process, which that of this run is.
STANDS_STILL = """\
import threading
from tests.support.standstill import StandstillWatch

def stands_still():
    threading.Event().wait()

watch = StandstillWatch(timeout_s=0.01, renewal_s=10)
watch.begin_test()
stands_still()
"""


def test_where_a_test_stands_still_its_stack_is_printed() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STANDS_STILL], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    with process, process.stderr as lines:
        for line in lines:
            if line.strip().endswith("in stands_still"):
                break
        else:
            pytest.fail("the process ended without it")
        process.kill()


class Recorded:
    """Stands in for faulthandler and time: what is to be printed, and when."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.prints_at: float | None = None
        self.times_asked = 0
        monkeypatch.setattr(standstill, "faulthandler", self)
        monkeypatch.setattr(standstill, "time", self)

    def monotonic(self) -> float:
        return self.now

    def dump_traceback_later(self, timeout_s: float, **options: Any) -> None:
        self.prints_at = self.now + timeout_s
        self.times_asked += 1

    def left_s(self) -> float | None:
        return None if self.prints_at is None else self.prints_at - self.now

    def cancel_dump_traceback_later(self) -> None:
        self.prints_at = None


def test_it_is_asked_for_anew_now_and_then_and_never_comes_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = Recorded(monkeypatch)
    watch = StandstillWatch(timeout_s=300, renewal_s=30)
    for _ in range(1000):
        watch.begin_test()
        left_s = recorded.left_s()
        assert left_s is not None and 270 < left_s <= 300
        recorded.now += 0.5
    assert recorded.times_asked == 17
    watch.forget()
    assert recorded.left_s() is None
    watch.begin_test()
    assert recorded.left_s() == 300
    watch.close()
    assert recorded.left_s() is None

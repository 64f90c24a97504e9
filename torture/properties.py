"""Runs every property test with 40 times the examples of a usual test run."""

from __future__ import annotations

import argparse
import sys

import pytest

from torture.outcome_table import Tally


class _Outcomes:
    """Pytest plugin that counts the outcomes of tests."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._tally.add("wrong", f"{report.nodeid} ({report.when})")
        elif report.when == "call" and report.passed:
            self._tally.add("went on")


def main() -> int:
    """Run the tests; return 1 if a property did not hold, or none was tested."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("where", nargs="*", default=["tests"], help="files or folders of tests")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    tally = Tally("property, many examples")
    chosen = ["-m", "hypothesis", "--hypothesis-profile=long", "-n", str(options.workers)]
    status = pytest.main(["-q", *chosen, *options.where], plugins=[_Outcomes(tally)])
    return int(Tally.report([tally]) or status != pytest.ExitCode.OK)


if __name__ == "__main__":
    sys.exit(main())

"""The demo, and what it suggests to try next."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import soundfile

from omni.commands.demo import NEXT, summarize
from omni.verification.verify import StageVerification, VerifyReport
from tests.support.command_line import omni
from tests.support.pages import commands

pytestmark = pytest.mark.usefixtures("checkpoint_cache")


def test_the_demo_hears_answers_aloud_and_hits(tmp_path: Path) -> None:
    result = omni("demo", "--output-dir", tmp_path / "answers", status=0)
    heard = re.findall(r"heard +(.*)\n +said +'(.*)', in", result.stdout)
    assert heard[:2] == [("12 + 30", "forty two"), ("42 * 2", "eighty four")]
    assert len(heard) == 3
    lengths = [soundfile.info(file).duration for file in sorted((tmp_path / "answers").iterdir())]
    assert len(lengths) == 3 and all(0.3 < seconds < 4 for seconds in lengths)
    hits = re.findall(r"thinker: (\d+) of (\d+) input tokens", result.stdout)
    assert int(hits[1][0]) >= int(hits[0][1]) - 8  # the second turn hits the first
    assert result.stdout.count("first sound after") == 3
    assert "cached equals uncached: 3 of 3" in result.stdout
    # Confidence is peaked where something was learnt: rounding decides nothing.
    assert "near tie" not in result.stdout


@pytest.mark.parametrize(
    ("warm_s", "message"),
    [
        (1.5, "and saved 0.50 of 2.00 seconds of a."),
        (2.1, "is less than such short runs differ by."),
    ],
)
def test_what_was_saved_is_told_of_stages_with_a_cache_and_never_below_nothing(
    warm_s: float, message: str
) -> None:
    stages = (
        StageVerification("a", 30, 0, 16, (), 2.0, 2.0, warm_s),
        StageVerification("b", 12, 0, 0, (), 9.0, 9.0, 1.0, has_cache=False),
    )
    said = summarize(VerifyReport(1, stages, (), (), ()))
    assert said.strip().startswith("Warm caches hit 16 of 42 input tokens") and said.endswith(
        message
    )


@pytest.mark.parametrize(
    "command",
    # What the README and pages show is run by their own test.
    [each for each in NEXT if f"omni {each}" not in commands()],
)
def test_what_the_demo_suggests_works_as_printed(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = omni(*shlex.split(command), status=0)
    assert "nothing was proven" not in result.output
    assert "near tie" not in result.output

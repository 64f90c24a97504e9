"""Parts of the training beside each other, and the folder that they work in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from training.spoken_sums.lanes import needed_programs, run_lanes
from training.spoken_sums.work_folder import claim

PART = """
import pathlib, sys, time
folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
(folder / name).touch()
if name == "rests":
    sys.stdin.read()
if name == "fails":
    while not (folder / "rests").exists():
        time.sleep(0.01)
    sys.exit(3)
"""


def test_parts_of_a_lane_follow_each_other(tmp_path: Path) -> None:
    run_lanes((("one", "two"), ("three",)), [sys.executable, "-c", PART, str(tmp_path)])
    assert sorted(each.name for each in tmp_path.iterdir()) == ["one", "three", "two"]


def test_a_part_that_fails_ends_what_runs_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What rests reads a pipe that nobody closes: only being ended ends it.
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as open_pipe:
        begin = subprocess.Popen

        def popen(command: list[str]) -> subprocess.Popen[bytes]:
            return begin(command, stdin=open_pipe.stdout)

        monkeypatch.setattr(subprocess, "Popen", popen)
        lanes = (("rests", "after"), ("fails", "never"))
        with pytest.raises(subprocess.CalledProcessError, match="exit status 3") as caught:
            run_lanes(lanes, [sys.executable, "-c", PART, str(tmp_path)])
        open_pipe.terminate()
    assert caught.value.cmd[-1] == "fails"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["fails", "rests"]


def test_what_is_not_installed_is_told_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="espeak-ng and flite not found"):
        needed_programs()


def test_a_folder_is_taken_up_by_the_plan_that_made_it_alone(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "work"
    claim(folder, {"typed": 3, "ctc": 2})
    claim(folder, {"typed": 3, "ctc": 2})
    assert json.loads((folder / "plan.json").read_text()) == {"typed": 3, "ctc": 2}
    with pytest.raises(ValueError, match=r"another plan: typed 3 \(wanted: 620\)\. Choose"):
        claim(folder, {"typed": 620, "ctc": 2})

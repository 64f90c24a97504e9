"""A small ``make gpu`` on a CPU; stopping or failing in the middle loses nothing."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_parts


def rows_of(part: str, folder: Path) -> list[dict[str, object]]:
    file = folder / f"{part}.jsonl"
    run = gpu_parts.Run(torch.device("cpu"), file, time.monotonic() + 3600, small=True)
    gpu_parts.PARTS[part](run)
    return gpu.read_rows(file)


@pytest.mark.parametrize(
    ("part", "tables"),
    [
        ("device", {"versions", "ceilings"}),
        ("throughput-0.5b", {"decodes, tiny", "prefills, tiny"}),
        ("profile", {"one step", "where its time goes"}),
        ("parity", {"parity"}),
        ("families", {"families"}),
        ("tests", {"tests"}),
        ("verify", {"verify"}),
    ],
)
def test_a_part_runs_on_a_cpu(part: str, tables: set[str], tmp_path: Path, seeded: object):
    rows = rows_of(part, tmp_path)
    assert {row["table"] for row in rows} == tables
    assert not [row for row in rows if "error" in row]
    for row in rows:
        assert row.get("equal_tokens", True) in (True, "16 of 16")
        assert row.get("equal", True) is True


def test_every_part_has_a_time(tmp_path: Path):
    assert set(gpu.PARTS) == set(gpu_parts.PARTS)


def test_parts_that_fail_or_hang_leave_what_they_found(tmp_path: Path):
    report = gpu.Report(tmp_path, ["good", "bad", "hanging", "later"], "a device")
    row = json.dumps({"table": "found", "what": "a | b", "value": 0.123456})

    def script(part: str, end: str) -> list[str]:
        code = f"open({str(tmp_path / f'{part}.jsonl')!r}, 'w').write({row!r} + '\\n'); {end}"
        return [sys.executable, "-S", "-c", code]

    gpu.run_part(report, "good", script("good", "pass"), 60)
    gpu.run_part(report, "bad", script("bad", "raise SystemExit('too bad')"), 60)
    file = tmp_path / "hanging.jsonl"
    wait = "import time; time.sleep(3600)"
    # It is stopped when its row has arrived, however slow this machine is.
    limit_s = 0.0
    while not gpu.read_rows(file):
        limit_s = 2 * limit_s + 0.5
        gpu.run_part(report, "hanging", script("hanging", wait), limit_s)
    content = json.loads((tmp_path / "report.json").read_text())["parts"]
    assert [content[name]["status"] for name in content] == ["ok", "failed", "stopped", "not begun"]
    assert [len(content[name]["rows"]) for name in content] == [1, 1, 1, 0]
    assert content["bad"]["log"] == ["too bad"]
    text = (tmp_path / "report.md").read_text()
    assert text.count("| a / b | 0.1235 |") == 3


def test_a_row_that_is_being_written_is_left_for_the_next_time(tmp_path: Path):
    file = tmp_path / "part.jsonl"
    file.write_text('{"table": "a"}\n{"table": "b')
    assert gpu.read_rows(file) == [{"table": "a"}]


def fail() -> None:
    raise KeyError("x")


def test_a_case_that_fails_is_a_row_and_a_part_out_of_time_ends(tmp_path: Path):
    file = tmp_path / "part.jsonl"
    run = gpu_parts.Run(torch.device("cpu"), file, time.monotonic() + 3600)
    with run.case("cases", name="first"):
        fail()
    assert gpu.read_rows(file) == [{"table": "cases", "name": "first", "error": "KeyError: 'x'"}]
    late = gpu_parts.Run(torch.device("cpu"), file, time.monotonic() - 1)
    with pytest.raises(TimeoutError), late.case("cases"):
        pass


def test_results_of_pytest_are_read(tmp_path: Path):
    results = tmp_path / "results.xml"
    results.write_text(
        '<testsuites><testsuite><testcase name="a"/><testcase name="b"><failure message="no"/>'
        '</testcase><testcase name="c"><skipped/></testcase></testsuite></testsuites>'
    )
    run = gpu_parts.Run(torch.device("cpu"), tmp_path / "tests.jsonl", time.monotonic() + 60)
    gpu_parts.report_tests(run, results)
    first, second = gpu.read_rows(run.file)
    assert (first["passed"], first["failed"], first["skipped"]) == (1, 1, 1)
    assert (second["name"], second["said"]) == ("b", "no")

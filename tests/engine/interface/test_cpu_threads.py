"""How many cores a process may use, and what PyTorch's OpenMP is given before it is loaded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.interface import cpu_threads
from engine.interface.cpu_threads import available_cores, cpu_quota

V2 = "0::/user/job\n"
V1 = "5:devices:/\n3:cpu,cpuacct:/job\n0::/\n"
HOST = "0::/docker/0123\n"


@pytest.mark.parametrize(
    ("memberships", "files", "expected"),
    [
        (V2, {}, None),
        (V2, {"user/job/cpu.max": "max 100000"}, None),
        (V2, {"user/job/cpu.max": "150000 100000"}, 1.5),
        (V2, {"user/cpu.max": "50000 100000", "user/job/cpu.max": "150000 100000"}, 0.5),
        (HOST, {"cpu.max": "200000 100000"}, 2.0),
        (
            V1,
            {"cpu,cpuacct/job/cpu.cfs_quota_us": "-1", "cpu,cpuacct/job/cpu.cfs_period_us": "1"},
            None,
        ),
        (
            V1,
            {
                "cpu,cpuacct/cpu.cfs_quota_us": "300000",
                "cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            3.0,
        ),
    ],
)
def test_the_smallest_quota_of_the_groups_counts(
    memberships: str, files: dict[str, str], expected: float | None, tmp_path: Path
):
    own = tmp_path / "cgroup"
    own.write_text(memberships)
    for name, text in files.items():
        path = tmp_path / "mount" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert cpu_quota(own, tmp_path / "mount") == expected


def test_without_cgroups_there_is_no_quota(tmp_path: Path):
    assert cpu_quota(tmp_path / "none", tmp_path) is None


@pytest.mark.parametrize(("quota", "cores"), [(None, 3), (0.2, 1), (1.5, 2), (64.0, 3)])
def test_a_quota_bounds_the_cores(quota: float | None, cores: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    monkeypatch.setattr(cpu_threads, "cpu_quota", lambda: quota)
    assert available_cores() == cores


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' torch has another OpenMP")
@pytest.mark.parametrize(
    ("first", "given", "expected"),
    [
        ("import engine", None, "PASSIVE"),
        ("import omni; omni.LLMEngine", None, "PASSIVE"),
        ("import stages", "ACTIVE", "ACTIVE"),
    ],
)
def test_torch_is_loaded_with_threads_that_sleep(first: str, given: str | None, expected: str):
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    environment["OMP_DISPLAY_ENV"] = "TRUE"
    if given is not None:
        environment["OMP_WAIT_POLICY"] = given
    ran = subprocess.run(
        [sys.executable, "-c", f"{first}; import torch"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.findall("OMP_WAIT_POLICY = '(.*)'", ran.stderr) == [expected]

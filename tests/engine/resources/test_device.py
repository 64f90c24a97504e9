"""Devices, CPU cores and freed memory that an engine may use."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from engine.interface import cpu_threads
from engine.interface.cpu_threads import available_cores, cpu_quota
from engine.resources.device import on_device, resolve_device, resolve_dtype
from tests.support.three_engines import KINDS, build_engine


def test_a_cuda_device_is_current_inside_and_a_cpu_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    current = [0]

    def exchange(index: int) -> int:
        current.append(index)
        return current[-2]

    monkeypatch.setattr(torch.cuda, "_exchange_device", exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", exchange)
    with on_device(torch.device("cuda:1")):
        assert current == [0, 1]
    assert current == [0, 1, 0]
    with on_device(torch.device("cpu", 0)):
        assert current == [0, 1, 0]


@pytest.mark.parametrize("name", ["mps", "meta", "xpu:0"])
def test_an_unsupported_device_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"device '{name}' is none that models run on"):
        resolve_device(name)


def test_auto_is_float32_on_a_cpu():
    cpu = torch.device("cpu")
    assert resolve_dtype("auto", torch.bfloat16, cpu) is torch.float32
    assert resolve_dtype("bfloat16", torch.float32, cpu) is torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_every_model_runs_inside_its_device(
    kind: str, seeded: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
):
    entered: list[torch.device] = []
    runs: list[bool] = []

    @contextmanager
    def recorded(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield
        entered.pop()

    for user in (
        "engine.execution.model_runner",
        "engine.encoder.encoder_engine",
        "engine.encoder.sentence_layout",
        "engine.generator.generator_engine",
    ):
        monkeypatch.setattr(f"{user}.on_device", recorded)
    engine, prompt = build_engine(kind, seeded)
    engine.add_request("r", prompt)
    with register_module_forward_pre_hook(lambda *_: runs.append(bool(entered))):
        while engine.has_unfinished_requests:
            assert all(output.error is None for output in engine.step())
    assert runs
    assert all(runs)
    assert entered == []


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
            {"cpu,cpuacct/cpu.cfs_quota_us": "300000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            3.0,
        ),
    ],
)
def test_the_smallest_cgroup_quota_applies(
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
def test_torch_is_loaded_with_sleeping_threads(first: str, given: str | None, expected: str):
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


# Allocates 20 MiB twice, like a prefill's activations; counts the page faults of the second time.
SCRIPT = """
import ctypes, resource, sys
from engine.resources.device import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
if sys.argv[1] == "keep":
    keep_freed_memory()
else:
    libc.mallopt(-3, 128 << 10)
def use():
    block = libc.malloc(20 << 20)
    ctypes.memset(block, 1, 20 << 20)
    libc.free(block)
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is on Linux")
def test_freed_memory_is_reused_without_page_faults():
    faults = {}
    for mode in ("keep", "default"):
        command = [sys.executable, "-c", SCRIPT, mode]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        faults[mode] = int(done.stdout)
    # With transparent huge pages even the default rarely faults, so it is only an upper bound.
    assert faults["keep"] <= min(faults["default"], 10)

"""Run time of a job next to other programs that keep the cores busy.

    python -m benchmarks.busy_cores [--rounds 3] [--before ../before] [--beside none loop ...]

The job is that of ``engine_cpu``: 16 requests of 256 + 64 tokens on a Qwen2 of 0.1 B, whose prompts
share none or 192 of their tokens, as a pipeline of one stage. Each side is a runtime (``inline``,
``processes``), or with ``--before`` the same of another checkout. Each side is a process that
loads its model once, then runs jobs on request. The concurrent load is one of

* ``none``: nothing;
* ``loop``, ``loops``: one or two busy loops;
* ``background``: a program of two threads at a lower priority (nice 10);
* ``quota``: nothing, but the side's cgroup limits it to 1.5 cores. It needs permission to create a
  cgroup; without it, it is skipped with the reason.

A round runs each side once. The output shows median seconds, and their ratio to those of the same
side without load. Goals on two cores: 1.6 with one loop, 2.3 with two.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

RUNTIMES = ("inline", "processes")
BESIDE = ("none", "loop", "loops", "background", "quota")
SHARED = (0, 192)
_REQUESTS, _PROMPT, _GENERATED = 16, 256, 64
_QUOTA, _PERIOD_US = 1.5, 100_000
_LOOP = "while True: pass"
_BACKGROUND = """
import hashlib, os, threading
os.nice(10)
def burn():
    while True: hashlib.sha256(bytes(1 << 20)).digest()
for _ in range(2): threading.Thread(target=burn).start()
"""
_PROGRAMS = {"loop": [_LOOP], "loops": [_LOOP] * 2, "background": [_BACKGROUND]}


def serve_jobs(runtime: str, model: str) -> None:
    """For each line read, a number of shared tokens, run the job and print its seconds."""
    import torch

    from omni import Omni, TokensPrompt
    from omni.pipelines.pipeline_config import PipelineConfig

    engine = {
        "num_blocks": 512,
        "max_model_len": _PROMPT + _GENERATED,
        "max_num_seqs": _REQUESTS,
        "max_num_batched_tokens": 2048,
    }
    config = PipelineConfig.model_validate(
        {
            "name": "busy_cores",
            "runtime": {"kind": runtime},
            "stages": {
                "writer": {
                    "kind": "autoregressive",
                    "model": model,
                    "engine": engine,
                    "sampling": {
                        "temperature": 0.0,
                        "max_tokens": _GENERATED,
                        "ignore_eos": True,
                    },
                    "final_output": "text",
                }
            },
        }
    )
    drawn = torch.Generator().manual_seed(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(1000, 31_000, (count,), generator=drawn).tolist())

    with Omni(config) as omni:
        for line in sys.stdin:
            shared = ids(int(line))
            prompts = [TokensPrompt(shared + ids(_PROMPT - len(shared))) for _ in range(_REQUESTS)]
            began = time.perf_counter()
            outputs = omni.generate(prompts)
            print(time.perf_counter() - began, flush=True)
            assert all(output.error is None for output in outputs)


@dataclass(frozen=True, slots=True)
class Side:
    """One way of running the job.

    Attributes:
        name: name in the table.
        checkout: folder of its code.
        runtime: as ``runtime: {kind}``.
    """

    name: str
    checkout: Path
    runtime: str

    @contextmanager
    def started(self, cgroup: Path | None) -> Iterator[subprocess.Popen[str]]:
        """Start its process and warm it up."""
        join = f"echo $$ > {cgroup}/cgroup.procs; " if cgroup is not None else ""
        here = str(Path(__file__).resolve())
        from benchmarks.models import benchmark_model

        arguments = ["--serve", self.runtime, "--model", benchmark_model("qwen2")]
        process = subprocess.Popen(
            ["sh", "-c", f'{join}exec "$@"', "sh", sys.executable, here, *arguments],
            cwd=self.checkout,
            env=os.environ | {"PYTHONPATH": str(self.checkout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            seconds_of(process, 0)
            yield process
        finally:
            process.communicate()


def seconds_of(process: subprocess.Popen[str], num_shared: int) -> float:
    """Run one job in the process and return its seconds."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{num_shared}\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a side's process ended; what it printed stands above")
    return float(line)


@contextmanager
def programs_beside(kind: str) -> Iterator[None]:
    """Run the programs of this kind of load within the context."""
    running = [
        subprocess.Popen([sys.executable, "-c", source]) for source in _PROGRAMS.get(kind, [])
    ]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


@contextmanager
def quota_group() -> Iterator[Path]:
    """Create a cgroup with a quota.

    Raises:
        OSError: this process may not create cgroups.
    """
    is_v2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    folder = Path("/sys/fs/cgroup" if is_v2 else "/sys/fs/cgroup/cpu", f"busy_cores_{os.getpid()}")
    folder.mkdir()
    quota = int(_QUOTA * _PERIOD_US)
    try:
        if is_v2:
            (folder / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
        else:
            (folder / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(quota))
        yield folder
    finally:
        folder.rmdir()


def measure(sides: Sequence[Side], kind: str, rounds: int) -> dict[tuple[str, int], float]:
    """Measure median seconds, by the side's name and shared tokens."""
    with ExitStack() as stack:
        cgroup = stack.enter_context(quota_group()) if kind == "quota" else None
        processes = {side.name: stack.enter_context(side.started(cgroup)) for side in sides}
        stack.enter_context(programs_beside(kind))
        seconds: dict[tuple[str, int], list[float]] = {}
        for _ in range(rounds):
            for num_shared in SHARED:
                for name, process in processes.items():
                    taken = seconds_of(process, num_shared)
                    seconds.setdefault((name, num_shared), []).append(taken)
    return {key: statistics.median(values) for key, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--beside", nargs="*", choices=BESIDE, default=list(BESIDE))
    parser.add_argument("--runtimes", nargs="*", choices=RUNTIMES, default=list(RUNTIMES))
    parser.add_argument("--serve", choices=RUNTIMES, help=argparse.SUPPRESS)
    parser.add_argument("--model", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        return serve_jobs(args.serve, args.model)
    root = Path(__file__).resolve().parents[1]
    sides = [Side(runtime, root, runtime) for runtime in args.runtimes]
    if args.before is not None:
        sides += [Side(f"{each}, before", args.before.resolve(), each) for each in args.runtimes]
    print(f"{'beside it':<12}{'shared':>8}", *(f"{side.name:>20}" for side in sides))
    idle: dict[tuple[str, int], float] = {}
    for kind in args.beside:
        try:
            medians = measure(sides, kind, args.rounds)
        except OSError as error:
            print(f"{kind:<12}left out: {error}")
            continue
        idle = idle or medians
        for num_shared in SHARED:
            row = [(medians[side.name, num_shared], idle[side.name, num_shared]) for side in sides]
            cells = (f"{seconds:.2f} ({seconds / least:.2f})" for seconds, least in row)
            print(f"{kind:<12}{num_shared:>8}", *(f"{cell:>20}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()

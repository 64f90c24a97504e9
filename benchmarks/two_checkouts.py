"""Two checkouts of this project compared: the same jobs, alternating, on one machine.

    git worktree add ../before <commit>
    python -m benchmarks.two_checkouts ../before . [--rounds 5] [--jobs engine pipeline ...]

Each checkout runs in a separate process, which builds its engines once and then waits; a round
runs the first, then the second, so that a drift of the machine affects both. Jobs use only public
names, which both checkouts have. The output shows medians and the ratio of the pairs' times, second
to first: above 1 the second is slower.

Jobs:

* ``engine``, ``shared``: a Qwen2 of 0.1 B, 16 requests of 256 + 64 tokens, which share none or 192;
* ``encoder_decoder``: a BART of 50 M, 16 requests of 128 tokens in and 64 out;
* ``pipeline``: Qwen2.5-Omni's three stages on a checkpoint of 94 M, 4 requests, streaming;
* ``voice``: ``omni_speech`` as it is shipped, 16 requests;
* ``rows``: writing and gathering the mirrored rows of a step in the stage-output cache;
* ``help``, ``validate``: ``omni --help`` and ``omni validate two_step``, seconds of CPU time.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

JOBS = ("engine", "shared", "encoder_decoder", "pipeline", "voice", "rows", "help", "validate")
_READY = "ready"


def text_job(model: str, length: int, num_shared: int, largest_id: int) -> Callable[[], float]:
    import torch

    from engine import EngineConfig, LLMEngine, SamplingParams, TokensPrompt

    engine = LLMEngine(
        EngineConfig(
            model=model,
            device="cpu",
            max_num_seqs=16,
            max_num_batched_tokens=2048,
            num_blocks=512,
            max_model_len=512,
        )
    )
    draw = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        drawn: list[int] = torch.randint(10, largest_id, (count,), generator=draw).tolist()
        return drawn

    shared = ids(num_shared)
    prompts = [TokensPrompt((*shared, *ids(length - num_shared))) for _ in range(16)]
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)

    def run() -> float:
        engine.reset_prefix_cache()
        started = time.perf_counter()
        engine.generate(prompts, params)
        return time.perf_counter() - started

    return run


def larger(model: str) -> dict[str, Any]:
    places: dict[str, Any] = {}
    for name in ("thinker", "talker", "code2wav"):
        places[f"stages.{name}.model"] = model
        places[f"stages.{name}.placement.threads"] = None
    return places | {
        "stages.thinker.sampling.max_tokens": 24,
        "stages.thinker.sampling.ignore_eos": True,
        "stages.talker.sampling.max_tokens": 96,
        "stages.talker.sampling.ignore_eos": True,
    }


def speech_job(overrides: Mapping[str, Any], num_requests: int) -> Callable[[], float]:
    from omni import ChatPrompt, Omni, OmniRequest, PipelineConfig

    omni = Omni(PipelineConfig.load("omni_speech", overrides))
    requests = [
        OmniRequest(ChatPrompt(({"role": "user", "content": f"Say the number {number}."},)))
        for number in range(num_requests)
    ]

    def run() -> float:
        with omni.paused() as pipeline:
            for stage in pipeline.stages.values():
                stage.reset_prefix_cache()
        started = time.perf_counter()
        for output in omni.generate(requests):
            if output.error is not None:
                raise RuntimeError(output.error)
        return time.perf_counter() - started

    return run


def rows_job() -> Callable[[], float]:
    import torch

    from prefix_cache import BlockPool, StageOutputCache

    pool = BlockPool.uniform(2048)
    cache = StageOutputCache(2048, 16, pool.generations(0))
    slots = torch.randperm(2048 * 16 - 16)[:64] + 16
    rows = {name: torch.randn(64, 2048) for name in ("a", "b", "c")}
    blocks = list(range(1, 65))
    cache.write(torch.arange(16, 65 * 16), {name: torch.randn(1024, 2048) for name in rows})

    def run() -> float:
        started = time.perf_counter()
        for _ in range(200):
            cache.write(slots, rows)
        for _ in range(20):
            cache.gather(blocks, 1024)
        return time.perf_counter() - started

    return run


def command_job(*arguments: str) -> Callable[[], float]:
    command = [sys.executable, "-m", "omni", *arguments]

    def run() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return run


MODELS = {
    "engine": "qwen2",
    "shared": "qwen2",
    "encoder_decoder": "bart",
    "pipeline": "qwen2_5_omni",
}
MAKE: dict[str, Callable[[str], Callable[[], float]]] = {
    "engine": lambda model: text_job(model, 256, 0, 31_000),
    "shared": lambda model: text_job(model, 256, 192, 31_000),
    "encoder_decoder": lambda model: text_job(model, 128, 0, 700),
    "pipeline": lambda model: speech_job(larger(model), 4),
    "voice": lambda _: speech_job({}, 16),
    "rows": lambda _: rows_job(),
    "help": lambda _: command_job("--help"),
    "validate": lambda _: command_job("validate", "two_step"),
}


def serve(name: str, model: str) -> None:
    """Build a job, then run it once for every line on standard input, and print its seconds."""
    run = MAKE[name](model)
    run()  # not counted: first calls allocate and compile
    print(_READY, flush=True)
    for _ in sys.stdin:
        print(run(), flush=True)


class Side:
    """A checkout's process for one job."""

    def __init__(self, checkout: Path, job: str, model: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--serve", job, "--model", model],
            cwd=checkout,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read(_READY)

    def run(self) -> float:
        """Run the job once and return its seconds."""
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        return float(self._read())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self, wanted: str | None = None) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if wanted is None or line.strip() == wanted:
                return line.strip()
        raise RuntimeError(f"the process ended with status {self._process.wait()}")


def compare(before: Path, after: Path, job: str, rounds: int) -> None:
    from benchmarks.models import benchmark_model

    model = benchmark_model(MODELS[job]) if job in MODELS else ""
    sides = [Side(before, job, model), Side(after, job, model)]
    pairs = [(sides[0].run(), sides[1].run()) for _ in range(rounds)]
    for side in sides:
        side.close()
    first, second = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    ratios = sorted(pair[1] / pair[0] for pair in pairs)
    print(
        f"{job:16} before {first:8.4f} s   after {second:8.4f} s   ratio "
        f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    parser.add_argument("before", type=Path, nargs="?")
    parser.add_argument("after", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", nargs="*", choices=JOBS, default=JOBS)
    parser.add_argument("--serve", choices=JOBS, help=argparse.SUPPRESS)
    parser.add_argument("--model", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.model)
        return
    if args.before is None or args.after is None:
        parser.error("name two checkouts")
    for job in args.jobs:
        compare(args.before.resolve(), args.after.resolve(), job, args.rounds)


if __name__ == "__main__":
    main()

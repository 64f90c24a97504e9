"""Savings of blocks on disk, and the cost of storing them.

    python benchmarks/offload.py [--rounds 7] [--prompt 2000] [--requests 16] [--path FOLDER]

The model is that of ``engine_cpu``. Two comparisons, alternating in one process:

* reading: the first token of a long prompt that is computed, hit on disk (with its files in the
  system's page cache, and dropped from it) and hit in the pool;
* writing: requests of 256 + 64 tokens that share nothing, by an engine with ``offload`` and by one
  without. Every computed block is written. In addition to the seconds, which are noisy on a busy
  machine, the share of the process's CPU time that steps and the io thread spend on it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.engine_cpu import TokenIds, make_prompts
from benchmarks.models import benchmark_model
from benchmarks.ratios import Ratios
from engine import EngineConfig, LLMEngine, SamplingParams, TokensPrompt
from prefix_cache import DiskTier, OffloadedBlocks


def build(args: argparse.Namespace, path: str | None) -> LLMEngine:
    offload = None if path is None else {"disk": {"path": path, "bytes": 32 * 2**30}}
    return LLMEngine(
        EngineConfig(
            **{
                "model": args.model or benchmark_model("qwen2"),
                "dtype": "float32",
                "device": "cpu",
                "max_num_seqs": args.requests,
                "max_num_batched_tokens": 512,
                "num_blocks": 600,
                "max_model_len": max(args.prompt, 320) + 100,
                "offload": offload,
            }
        )
    )


def seconds(engine: LLMEngine, prompts: TokenIds, max_tokens: int) -> tuple[float, int]:
    """Run prompts; return the seconds, and how many of their tokens were hits."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    started = time.perf_counter()
    outputs = engine.generate([TokensPrompt(tuple(prompt)) for prompt in prompts], params)
    return time.perf_counter() - started, sum(output.num_cached_tokens or 0 for output in outputs)


def timed(owner: type, name: str, cpu: dict[str, float]) -> None:
    """Accumulate the CPU time that threads spend in a method."""
    method = getattr(owner, name)

    def wrapper(*args: Any) -> Any:
        started = time.thread_time()
        try:
            return method(*args)
        finally:
            cpu[name] += time.thread_time() - started

    setattr(owner, name, wrapper)


def drop_pages(path: str) -> None:
    """Advise the system to drop the block files from its page cache."""
    for file in Path(path).rglob("*.block"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def forget_pool(engine: LLMEngine) -> None:
    engine._kv.reset_prefix_cache()


def reading(args: argparse.Namespace, path: str, engine: LLMEngine) -> None:
    times: dict[str, list[float]] = {"computed": [], "disk": [], "dropped": [], "pool": []}
    disk = engine._offloaded.disk if engine._offloaded is not None else None
    assert disk is not None
    for number in range(args.rounds):
        prompts = make_prompts(number + 2, args.prompt, 0)[-1:]
        for name, values in times.items():
            if name in ("disk", "dropped"):
                disk.flush()
                forget_pool(engine)
            if name == "dropped":
                drop_pages(path)
            took, num_hits = seconds(engine, prompts, 1)
            assert (num_hits > 0) == (name != "computed"), (name, num_hits)
            values.append(took)
    size = sum(file.stat().st_size for file in Path(path).rglob("*.block")) / args.rounds
    print(f"a prompt of {args.prompt} tokens, {size / 2**20:.0f} MiB of files; seconds, medians")
    for name, values in times.items():
        ratio = statistics.median(v / c for v, c in zip(values, times["computed"], strict=True))
        print(f"  {name:10} {statistics.median(values):.3f}   {ratio:.3f} of computed")


def writing(args: argparse.Namespace, with_disk: LLMEngine, without: LLMEngine) -> None:
    cpu: dict[str, float] = defaultdict(float)
    timed(OffloadedBlocks, "store", cpu)
    timed(DiskTier, "_write", cpu)
    whole = 0.0
    ratios, both = [], ([], [])  # type: tuple[list[float], tuple[list[float], list[float]]]
    for number in range(args.rounds):
        order = (with_disk, without) if number % 2 else (without, with_disk)
        took = {}
        for engine in order:
            prompts = make_prompts((number + 2) * args.requests, 256, 0)[-args.requests :]
            before = time.process_time()
            took[id(engine)], num_hits = seconds(engine, prompts, 64)
            whole += (time.process_time() - before) * (engine is with_disk)
            assert not num_hits
        both[0].append(took[id(with_disk)])
        both[1].append(took[id(without)])
        ratios.append(both[0][-1] / both[1][-1])
    stats = with_disk.stats().offload
    assert stats is not None
    print(
        f"{args.requests} requests of 256 + 64 tokens: {statistics.median(both[0]):.2f} s with, "
        f"{statistics.median(both[1]):.2f} without: {Ratios(ratios)}"
    )
    in_steps, beside = (100 * cpu[name] / whole for name in ("store", "_write"))
    print(f"  of the CPU time {in_steps:.1f} % in steps, {beside:.1f} % in the io thread")
    print(f"  {stats.stored} blocks kept, {stats.dropped} dropped, {stats.errors} errors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--model", help="a checkpoint's folder; default: a Qwen2 of 0.1 B")
    parser.add_argument("--path", help="a folder on the disk in question; default: a temporary one")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=args.path) as path,
        closing(build(args, path)) as engine,
        closing(build(args, None)) as without,
    ):
        for each in (engine, without):
            seconds(each, make_prompts(1, 100, 0), 4)
        reading(args, path, engine)
        writing(args, engine, without)


if __name__ == "__main__":
    main()

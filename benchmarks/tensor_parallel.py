"""Speed of tensor parallelism over processes on this machine.

    python -m benchmarks.tensor_parallel [--rounds 5] [--processes 2]

The 0.1 B model of ``engine_cpu.py``. In every round the same requests run in one process with all
cores, in one with a share of them, and in ``--processes`` with a share each: 8 prompts of 256
tokens, with 32 generated tokens each. Times are those of the prefills and of one decode step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.word_checkpoint import word_checkpoint
from engine import EngineConfig, LLMEngine, SamplingParams, TokensPrompt

_NUM_PROMPTS, _PROMPT, _GENERATED = 8, 256, 32


def run(engine: LLMEngine) -> tuple[float, float]:
    """Measure seconds of the prefills, and of a decode step after them."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(1000, 31_000, (_NUM_PROMPTS, _PROMPT), generator=generator).tolist()
    prompts = [TokensPrompt(tuple(each)) for each in rows]
    seconds = []
    for num_tokens in (1, _GENERATED):
        engine.reset_prefix_cache()
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        started = time.perf_counter()
        engine.generate(prompts, params)
        seconds.append(time.perf_counter() - started)
    return seconds[0], (seconds[1] - seconds[0]) / (_GENERATED - 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    share = max(1, cores // args.processes)
    sides = {
        f"1 process, {cores} threads": (1, cores),
        f"1 process, {share} threads": (1, share),
        f"{args.processes} processes, {share} threads each": (args.processes, share),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as folder:
        model = str(word_checkpoint(Path(folder)))
        for _ in range(args.rounds):
            for name, (size, num_threads) in sides.items():
                torch.set_num_threads(num_threads)
                config = EngineConfig(
                    model=model, device="cpu", dtype="float32", tensor_parallel=size
                )
                with closing(LLMEngine(config)) as engine:
                    run(engine)
                    times[name].append(run(engine))
    first = times[next(iter(sides))]
    table = Table(title="medians; the ratio is to the first row, of the same round")
    for column in ("side", "prefills, ms", "ratio", "decode step, ms", "ratio"):
        table.add_column(column, justify="left" if column == "side" else "right")
    for name, values in times.items():
        cells = [name]
        for part in (0, 1):
            ratios = [a[part] / b[part] for a, b in zip(values, first, strict=True)]
            cells.append(f"{1000 * statistics.median(each[part] for each in values):.1f}")
            cells.append(f"{statistics.median(ratios):.2f}")
        table.add_row(*cells)
    Console().print(table)


if __name__ == "__main__":
    main()
